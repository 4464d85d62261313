"""Mutual TLS over real sockets: who is let in, who is not and why, and certificates that change under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.errors import PermissionDenied, Unavailable
from engine.proposal import EarlyProposals, RunAhead, State
from rpc.clients import DraftClient, TargetClient
from rpc.pb import session_pb2, verification_pb2, verification_pb2_grpc
from rpc.security import MutualTls, Role
from rpc.servers import serve_engine
from rpc.servicers import VerificationServicer
from tests.rpc.authority import SERVER, Authority, Issued, put
from tests.rpc.fakes import next_token
from tests.rpc.serving import GREEDY, SERVING, STOPS, Served, Sides, served_draft, served_target

OURS, OTHERS = Authority(), Authority("others")


class Folders:
    """A folder of files for each kind of process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for role in Role:
            self.renew(role)

    def renew(self, role: Role, authority: Authority = OURS) -> None:
        put(self._root / role, authority.issue(f"{role}.outrider"), authority.certificate)

    def side(self, role: Role, **rest) -> MutualTls:
        return MutualTls(self._root / role, role, **rest)

    def sides(self, role: Role) -> Sides:
        return Sides(self.side(role), self.side(Role.ROUTER))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@asynccontextmanager
async def raw_channel(
    address: str, issued: Issued | None, authority: Authority = OURS
) -> AsyncIterator[grpc.aio.Channel]:
    """As somebody calls who does not use our client, and so checks nothing beforehand."""
    own = (None, None) if issued is None else (issued.key, issued.chain)
    credentials = grpc.ssl_channel_credentials(authority.certificate, *own)
    options = (("grpc.ssl_target_name_override", "target.outrider"),)
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        yield channel


async def check(channel: grpc.aio.Channel) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def test_a_whole_round_of_draft_and_target(folders: Folders) -> None:
    early: asyncio.Queue[EarlyProposals] = asyncio.Queue()
    async with (
        served_target(tls=folders.sides(Role.TARGET)) as served,
        served_draft(tls=folders.sides(Role.DRAFT)) as (_, _, drafts),
    ):
        verifying = served.client.open([1, 2], [], GREEDY, STOPS)
        drafting = drafts.open([1, 2], GREEDY, on_early=early.put_nowait)
        first = await verifying.verdict()
        base = State(3, 5)
        drafting.advance(
            base, first.tokens, 3, run_ahead=RunAhead(num_speculative_tokens=2, budget_s=60.0, acceptance=0.75)
        )
        proposal = await drafting.proposal()
        verifying.propose(proposal)
        verifying.propose_early(await early.get())
        verdict = await verifying.verdict()
        assert (verdict.base, verdict.num_accepted) == (base, 3)
        assert verdict.tokens == tuple(next_token(3 + i) for i in range(4))
        await verifying.close()
        await drafting.close()
        assert served.engine.lengths == {}


async def test_health_is_for_those_with_a_routers_certificate(folders: Folders) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        async with raw_channel(served.server.address, OURS.issue("router.outrider")) as channel:
            assert await check(channel) == SERVING
        async with grpc.aio.insecure_channel(served.server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)


UNTRUSTED = {
    "none": None,
    "self-signed": OURS.issue("router.outrider", self_signed=True),
    "another authority's": OTHERS.issue("router.outrider"),
    "expired": OURS.issue("router.outrider", days=-1),
    "a server's only": OURS.issue("router.outrider", usages=[SERVER]),
}


@pytest.mark.parametrize("certificate", UNTRUSTED)
async def test_a_caller_nobody_vouches_for_gets_no_connection_and_disturbs_nobody(
    folders: Folders, certificate: str
) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        async with raw_channel(served.server.address, UNTRUSTED[certificate]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(channel)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        session.decode(1)
        assert (await session.verdict()).tokens == (next_token(3),)


@pytest.mark.parametrize("role", [Role.DRAFT, Role.TARGET])
async def test_a_draft_or_target_that_calls_is_told_who_may(folders: Folders, role: Role) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        caller = OURS.issue(f"{role}.outrider", "elsewhere")
        async with raw_channel(served.server.address, caller) as channel:
            for call in every_method(channel):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
                expected = f"certificate is for {role}.outrider, elsewhere, allowed is router.outrider alone"
                assert expected in (refused.value.details() or "")
        await served.settle()
        assert served.engine.lengths == {}


def every_method(channel: grpc.aio.Channel):
    """A call of each method that a target has, awaiting its first answer."""
    service, healths = verification_pb2_grpc.VerificationStub(channel), health_pb2_grpc.HealthStub(channel)
    opening = verification_pb2.OpenTarget(
        session=1,
        prompt_token_ids=[1],
        sampling=session_pb2.EngineSampling(top_p=1.0),
        stops=session_pb2.EngineStops(max_tokens=4),
    )
    frame = verification_pb2.VerificationRequests(requests=[verification_pb2.VerificationRequest(open=opening)])
    services = reflection_pb2.ServerReflectionRequest(list_services="")
    yield service.GetInfo(session_pb2.EngineInfoRequest())
    yield service.Stream(iter([frame])).read()
    yield check(channel)
    yield healths.Watch(health_pb2.HealthCheckRequest()).read()
    yield reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([services])).read()


async def test_our_own_client_says_that_it_was_refused(folders: Folders) -> None:
    draft = folders.side(Role.DRAFT)
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        with pytest.raises(PermissionDenied, match=r"is for draft\.outrider, allowed is router\.outrider alone"):
            await TargetClient.connect(served.server.address, tls=draft)


async def test_a_target_in_the_place_of_a_draft_is_refused_by_the_router(folders: Folders) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        with pytest.raises(Unavailable) as refused:
            await DraftClient.connect(served.server.address, tls=folders.side(Role.ROUTER))
        assert "Hostname Verification Check failed" in str(refused.value)
        assert str(refused.value).endswith("to whoever is draft.outrider")


async def test_a_server_of_another_authority_is_refused_by_the_router(folders: Folders) -> None:
    ours = folders.side(Role.ROUTER)
    for role in (Role.TARGET, Role.ROUTER):
        folders.renew(role, OTHERS)
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        folders.renew(Role.ROUTER)
        with pytest.raises(Unavailable, match=r"handshake failed.*over TLS as router\.outrider \(valid until 20"):
            await TargetClient.connect(served.server.address, tls=ours)


async def test_a_server_whose_certificate_has_expired_is_refused_by_the_router(folders: Folders) -> None:
    expired = OURS.issue("target.outrider", days=-1)
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(expired.key, expired.chain)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    with pytest.raises(Unavailable, match="certificate has expired"):
        await TargetClient.connect(f"127.0.0.1:{port}", tls=folders.side(Role.ROUTER))
    await server.stop(None)


async def test_plaintext_and_tls_do_not_meet(folders: Folders) -> None:
    router = folders.side(Role.ROUTER)
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        with pytest.raises(Unavailable):
            await TargetClient.connect(served.server.address)
    async with served_target() as served:
        with pytest.raises(Unavailable, match=r"called over TLS as router\.outrider"):
            await TargetClient.connect(served.server.address, tls=router)


async def test_a_router_whose_certificate_expired_after_it_was_read_says_so(folders: Folders) -> None:
    late = folders.side(Role.ROUTER, clock=lambda: 4e9)
    with pytest.raises(Unavailable, match=r"as router\.outrider \(which expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC\)"):
        await TargetClient.connect("127.0.0.1:1", tls=late)


async def test_installations_with_one_authority_are_kept_apart_by_their_domain(tmp_path: Path) -> None:
    put(tmp_path, OURS.issue("router.a", "target.a", "router.b"), OURS.certificate)
    target, ours, others = (MutualTls(tmp_path, role, domain) for role, domain in DOMAINS)
    async with served_target(tls=Sides(target, ours)) as served:
        with pytest.raises(Unavailable, match=r"to whoever is target\.b"):
            await TargetClient.connect(served.server.address, tls=others)


DOMAINS = [(Role.TARGET, "a"), (Role.ROUTER, "a"), (Role.ROUTER, "b")]


async def decode_one(session) -> tuple[int, ...]:
    session.decode(1)
    return (await session.verdict()).tokens


async def test_a_renewal_leaves_open_streams_alone_and_new_ones_take_it(folders: Folders) -> None:
    """Everybody moves to another authority at once: only who shows the new certificate connects from now on."""
    before = OURS.issue("router.outrider")
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        for role in Role:
            folders.renew(role, OTHERS)
        newcomer = await TargetClient.connect(served.server.address, tls=folders.side(Role.ROUTER))
        assert await decode_one(session) == (next_token(3),)
        assert (await served.client.refresh()).model == "fake"
        await newcomer.close()
        async with raw_channel(served.server.address, before, OTHERS) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(channel)


@asynccontextmanager
async def replaced(served: Served, tls: MutualTls) -> AsyncIterator[None]:
    """Another server, where the one before was."""
    await served.server.stop()
    port = int(served.server.address.rpartition(":")[2])
    server = await serve_engine(VerificationServicer(served.loop), port=port, tls=tls)
    try:
        yield
    finally:
        await server.stop()


@pytest.mark.parametrize("by", ["a stream", "asking"])
async def test_a_router_that_connects_again_shows_its_renewed_certificate(folders: Folders, by: str) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        for role in Role:
            folders.renew(role, OTHERS)
        async with replaced(served, folders.side(Role.TARGET)):
            with pytest.raises(Unavailable):
                await session.verdict()
            if by == "asking":
                assert (await served.client.refresh()).model == "fake"
            again = served.client.open([1] * 5, [], GREEDY, STOPS)
            assert (await again.verdict()).tokens == (next_token(5),)
            await again.close()


async def test_broken_new_files_change_nothing_for_anybody(folders: Folders, tmp_path: Path, caplog) -> None:
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        for role in (Role.TARGET, Role.ROUTER):
            put(tmp_path / role, Issued(b"nonsense", b"nonsense"), OURS.certificate)
        async with raw_channel(served.server.address, OURS.issue("router.outrider")) as channel:
            assert await check(channel) == SERVING
            assert (await served.client.refresh()).model == "fake"
        async with raw_channel(served.server.address, OURS.issue("router.outrider")) as channel:
            assert await check(channel) == SERVING
    kept = [line for line in caplog.messages if line.startswith("the certificate in use stays")]
    assert len(kept) == 2  # one of the server, one of the client


_CROSSED = "Internal error from Core"
"""What grpc's client says of a stream whose first message crosses with its refusal: the reason is lost, seldom."""


async def test_a_session_whose_stream_is_refused_says_why(folders: Folders, monkeypatch) -> None:
    """A certificate that stops being a router's, between asking for the info and opening a session."""
    async with served_target(tls=folders.sides(Role.TARGET)) as served:
        draft = OURS.issue("draft.outrider")
        async with raw_channel(served.server.address, draft) as channel:
            monkeypatch.setattr(served.client._peer, "_stub", verification_pb2_grpc.VerificationStub(channel))
            said = _CROSSED
            while _CROSSED in said:
                with pytest.raises(Unavailable) as refused:
                    await served.client.open([1, 2], [], GREEDY, STOPS).verdict()
                said = str(refused.value)
    assert "broke: the caller's certificate is for draft.outrider" in said
