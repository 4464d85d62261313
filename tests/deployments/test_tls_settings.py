"""What the section `tls` makes of each replica; files that cannot be used are a fault of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.discovery import Endpoint
from deployments.config_file import ConfigError, parse_config
from deployments.replicas import DraftDeployment, TargetDeployment
from deployments.tls_settings import mutual_tls
from engine.errors import PermissionDenied, Unavailable
from rpc.clients import DraftClient, TargetClient
from rpc.security import Role
from tests.rpc.authority import Authority, put
from tests.rpc.fakes import FakeDraft, FakeTarget

AUTHORITY = Authority()


def config_of(folder: Path, **rest: object):
    return parse_config({"tls": {"folder": str(folder), **rest}}, "test")


def folder_of(path: Path, *names: str) -> Path:
    return put(path, AUTHORITY.issue(*names), AUTHORITY.certificate)


def test_there_is_none_by_default() -> None:
    assert mutual_tls(parse_config({}, "test"), Role.ROUTER) is None


def test_one_certificate_may_stand_for_all_on_one_machine(tmp_path: Path) -> None:
    folder_of(tmp_path, *(f"{role}.mine" for role in Role))
    assert all(mutual_tls(config_of(tmp_path, domain="mine"), role) for role in Role)


@pytest.mark.parametrize("role", Role)
def test_files_that_cannot_be_used_are_a_fault_of_the_configuration(tmp_path: Path, role: Role) -> None:
    folder_of(tmp_path, "somebody.else")
    with pytest.raises(ConfigError) as refused:
        mutual_tls(config_of(tmp_path), role)
    expected = f"found 'a certificate for somebody.else', allowed is one for {role}.outrider"
    assert str(refused.value) == f"tls.folder: {tmp_path}/tls.crt: {expected}"


class Target(TargetDeployment):
    engine, client = FakeTarget, TargetClient

    def __del__(self) -> None:
        """Serve awaits the parent's; here the test does."""


class Draft(DraftDeployment):
    engine, client = FakeDraft, DraftClient

    def __del__(self) -> None: ...


@pytest.mark.parametrize(("kind", "role"), [(Target, Role.TARGET), (Draft, Role.DRAFT)])
async def test_a_replica_serves_routers_alone_and_is_healthy_without_a_certificate(
    monkeypatch, tmp_path: Path, kind, role: Role
) -> None:
    """Serve asks the actor for its health, not the port."""
    monkeypatch.setattr(kind, "_build", staticmethod(lambda config: kind.engine()))
    replica = kind.__new__(kind)
    await replica.__init__(config_of(folder_of(tmp_path / "own", f"{role}.outrider")))
    try:
        endpoint = replica.endpoint()
        assert isinstance(endpoint, Endpoint)
        router = mutual_tls(config_of(folder_of(tmp_path / "router", "router.outrider")), Role.ROUTER)
        client = await kind.client.connect(endpoint.address, tls=router)
        assert client.info.model == "fake"
        await client.close()
        own = mutual_tls(config_of(tmp_path / "own"), role)
        with pytest.raises(PermissionDenied):
            await kind.client.connect(endpoint.address, tls=own)
        with pytest.raises(Unavailable):
            await kind.client.connect(endpoint.address)
        replica.check_health()
    finally:
        await super(kind, replica).__del__()


async def test_a_replica_with_wrong_files_does_not_read_weights_first(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Target, "_build", staticmethod(lambda config: pytest.fail("weights were read")))
    replica = Target.__new__(Target)
    with pytest.raises(ConfigError, match=r"tls\.crt: found 'No such file or directory'"):
        await replica.__init__(config_of(tmp_path))
