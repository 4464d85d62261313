"""`outrider calibrate` times and ranks a pair whose replicas answer routers over mutual TLS alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.probing import Text
from deployments.commands.calibrate import _ranked, _timed
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from deployments.replicas import DraftDeployment, TargetDeployment
from rpc.security import Role
from tests.rpc.authority import Authority, put

PROMPT = list(range(16))
SIZE = (1, 128, 1)
"""One session, a second context of 128 tokens, one turn."""


class Target(TargetDeployment):
    def __del__(self) -> None:
        """Serve awaits the parent's; here the test does."""


class Draft(DraftDeployment):
    def __del__(self) -> None: ...


def config_of(folder: Path) -> OutriderConfig:
    """An emulated pair that is as fast as it can be, with one certificate for all that run on this machine."""
    authority = Authority()
    put(folder, authority.issue(*(f"{role}.outrider" for role in Role)), authority.certificate)
    engine = {"model": "emulated", "kv_cache": {"num_blocks": 256, "block_size": 16}}
    device = {"step_s": 1e-4, "row_share": 0.01}
    return parse_config(
        {
            "tls": {"folder": str(folder)},
            "emulation": {"target": device, "draft": device, "alpha": 0.8, "recall": 0.9},
            "target": {**engine, "reproducible": {"enabled": False}},
            "draft": engine,
        },
        "test",
    )


@asynccontextmanager
async def serving(config: OutriderConfig) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a target and a draft that serve as replicas do."""
    replicas = [kind.__new__(kind) for kind in (Target, Draft)]
    try:
        for replica in replicas:
            await replica.__init__(config)
        target, draft = (replica.endpoint().address for replica in replicas)
        yield target, draft
    finally:
        for replica in replicas:
            await super(type(replica), replica).__del__()


async def test_a_pair_that_speaks_tls_is_measured(tmp_path: Path) -> None:
    config = config_of(tmp_path / "certificates")
    async with serving(config) as peers:
        engines, devices = await _timed(config, peers, [PROMPT], SIZE)
        ranks = await _ranked(config, peers[1], [Text(tuple(PROMPT), (1, 2, 3, 4))])
    assert [info.model for info in engines] == ["emulated"] * 2
    assert {forward.rows_each for forward in devices.target.generated} == {1, 2, 4, 8}
    assert {round(forward.context) for forward in devices.draft.generated} == {88, 152}
    assert ranks.total == 3
