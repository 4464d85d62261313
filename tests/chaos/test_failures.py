"""What callers see when a part of the system dies: the same tokens, none twice, none missing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import psutil
import pytest

from deployments.client import Ask, Client, Result
from deployments.config import OutriderConfig
from rpc.errors import RETRY_TRAILER
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc
from tests.chaos import processes
from tests.chaos.conftest import System
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.chaos,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

LONG = {"max_tokens": 440, "ignore_eos": True}
SEEDED = {**LONG, "temperature": 0.8, "seed": 11}


def stream(
    stub: Any, ask: Ask, at_token: int, do: Callable[[], object]
) -> tuple[tuple[int, ...], str, pb.Complete | None]:
    """Runs a request, and does something when it has delivered so many tokens; ids, text and final message."""
    token_ids: list[int] = []
    text, complete, is_done = "", None, False
    for response in stub.Generate(ask.to_pb(), timeout=120):
        if response.HasField("complete"):
            complete = response.complete
        token_ids += response.delta.token_ids
        text += response.delta.text
        if not is_done and len(token_ids) >= at_token:
            do()
            is_done = True
    return tuple(token_ids), text, complete


@pytest.mark.parametrize(("prompt", "drafter"), [("the fox", "draft_model"), ("x", "ngram"), ("grüße 🦊", "auto")])
def test_a_group_says_the_same_with_and_without_speculation(client: Client, prompt: str, drafter: str) -> None:
    sampling = {"max_tokens": 64, "ignore_eos": True}
    plain = client.generate(Ask(prompt=prompt, sampling=sampling, speculation="off"))
    speculated = client.generate(Ask(prompt=prompt, sampling=sampling, drafter=drafter))
    assert (speculated.token_ids, speculated.text) == (plain.token_ids, plain.text)


@pytest.mark.parametrize(("rank", "how"), [("follower", "draft_model"), ("leader", "seeded")])
def test_a_killed_rank_costs_no_token(system: System, client: Client, stub: Any, rank: str, how: str) -> None:
    ask = {
        "draft_model": Ask(prompt="the fox", sampling=LONG, drafter="draft_model"),
        "seeded": Ask(prompt="the fox", sampling=SEEDED),
    }[how]
    undisturbed = client.generate(ask)

    def kill() -> None:
        leader = system.leader(running=1)
        (leader if rank == "leader" else processes.followers(leader)[0]).kill()

    token_ids, text, complete = stream(stub, ask, 40, kill)
    assert complete is not None
    assert (token_ids, text) == (undisturbed.token_ids, undisturbed.text)
    assert complete.failovers == 1
    assert complete.usage.completion_tokens == LONG["max_tokens"]
    assert until(system.is_whole, 90.0)


def test_a_rank_that_hangs_in_a_forward_costs_its_group_and_no_token(system: System, client: Client, stub: Any) -> None:
    ask = Ask(prompt="the fox", sampling=LONG, speculation="off")
    undisturbed = client.generate(ask)
    token_ids, text, complete = stream(
        stub, ask, 40, lambda: processes.followers(system.leader(running=1))[0].send_signal(signal.SIGSTOP)
    )
    assert complete is not None
    assert (token_ids, text, complete.failovers) == (undisturbed.token_ids, undisturbed.text, 1)


def test_a_leader_that_hangs_is_passed_over_and_rebuilt(system: System, client: Client, stub: Any) -> None:
    ask = Ask(prompt="the fox", sampling=LONG, speculation="off")
    undisturbed = client.generate(ask)
    hung: list[psutil.Process] = []

    def stop() -> None:
        hung.append(system.leader(running=1))
        hung[0].suspend()

    token_ids, text, complete = stream(stub, ask, 40, stop)
    assert complete is not None
    assert (token_ids, text, complete.failovers) == (undisturbed.token_ids, undisturbed.text, 1)
    assert until(lambda: not hung[0].is_running(), 60.0)  # Serve replaces it


def test_streams_wait_when_every_group_is_gone(system: System, client: Client, stub: Any) -> None:
    ask = Ask(prompt="the fox", sampling=SEEDED)
    undisturbed = client.generate(ask)

    def kill() -> None:
        for process in processes.workers("ray::ServeReplica:outrider:Target"):
            process.kill()

    token_ids, text, complete = stream(stub, ask, 40, kill)
    assert complete is not None
    assert (token_ids, text) == (undisturbed.token_ids, undisturbed.text)
    assert complete.failovers >= 1


def test_a_killed_router_costs_a_client_of_ours_nothing(system: System, client: Client) -> None:
    ask = Ask(prompt="grüße 🦊", sampling=SEEDED)
    undisturbed = client.generate(ask)
    pieces: list[str] = []

    def on_text(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 20:
            for process in processes.workers("ray::ServeReplica:outrider:Router"):
                process.kill()

    result = client.generate(ask, on_text)
    assert len(pieces) > 20
    assert (result.token_ids, result.text) == (undisturbed.token_ids, undisturbed.text)
    assert "".join(pieces) == undisturbed.text


def test_a_stopped_draft_costs_no_token_and_comes_back(system: System, client: Client, stub: Any) -> None:
    ask = Ask(prompt="the fox", sampling=LONG, drafter="draft_model", num_speculative_tokens=3)
    plain = client.generate(Ask(prompt="the fox", sampling=LONG, speculation="off"))
    (draft,) = system.endpoints("Draft")
    process = processes.replica("Draft", draft.address)
    token_ids, text, complete = stream(stub, ask, 40, process.suspend)
    process.resume()
    assert complete is not None
    assert (token_ids, text) == (plain.token_ids, plain.text)

    def speculates() -> bool:
        return client.generate(ask).complete.speculation.accepted_tokens > 0

    assert until(speculates, 30.0)


def test_a_draft_at_a_tenth_of_its_speed_costs_no_token_and_is_used_again(
    system: System, client: Client, stub: Any
) -> None:
    ask = Ask(prompt="the fox", sampling=LONG, drafter="draft_model", num_speculative_tokens=3)
    plain = client.generate(Ask(prompt="the fox", sampling=LONG, speculation="off"))
    (draft,) = system.endpoints("Draft")
    heard_at, token_ids = [time.monotonic()], []
    with slowed_tenfold(processes.replica("Draft", draft.address)):
        for response in stub.Generate(ask.to_pb(), timeout=120):
            heard_at.append(time.monotonic())
            token_ids += response.delta.token_ids
    assert (tuple(token_ids), response.complete.finish_reason) == (plain.token_ids, "length")
    assert response.complete.speculation.dropped_proposals > 0

    def speculates() -> bool:
        short = replace(ask, sampling={**LONG, "max_tokens": 40})
        return client.generate(short).complete.speculation.accepted_tokens > 0

    back_at = time.monotonic()
    assert until(speculates, 30.0)
    silence_s = max(later - earlier for earlier, later in pairwise(heard_at))
    print(f"longest silence {silence_s:.3f} s; speculation back after {time.monotonic() - back_at:.3f} s")


@contextmanager
def slowed_tenfold(process: psutil.Process) -> Iterator[None]:
    """Has a process stopped for 90 ms of every 100."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            process.suspend()
            over.wait(0.09)
            process.resume()
            over.wait(0.01)

    with ThreadPoolExecutor() as pool:
        slowing = pool.submit(stop_and_go)
        try:
            yield
        finally:
            over.set()
            slowing.result()


def test_a_killed_controller_is_not_noticed_by_a_stream(system: System, client: Client, stub: Any) -> None:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    ask = Ask(prompt="the fox", sampling=LONG, speculation="off")
    undisturbed = client.generate(ask)
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    token_ids, _, complete = stream(stub, ask, 40, lambda: ray.kill(controller, no_restart=False))
    assert complete is not None
    assert (token_ids, complete.failovers) == (undisturbed.token_ids, 0)


def test_cancelled_streams_and_deadlines_leave_nothing_behind(system: System, stub: Any) -> None:
    """On both ranks of both groups: the fixture counts the blocks afterwards."""
    request = Ask(prompt="the long way " * 8, sampling={"max_tokens": 300, "ignore_eos": True}).to_pb()
    calls = [stub.Generate(request, timeout=60) for _ in range(100)]
    calls += [stub.Generate(request, timeout=0.3) for _ in range(50)]
    for turn, call in enumerate(calls[:50]):
        for _ in range(turn % 3):
            next(call)
    for call in calls[:100]:
        call.cancel()
    codes = {call.code() for call in calls[100:]}
    assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.timeout(400)
def test_streams_outlive_scaling_down_and_up(system: System, client: Client, stub: Any, config: OutriderConfig) -> None:
    """One of two targets and one of two routers go, and come back, under streams that never pause.

    Serve replaces every replica each time: routers finish their streams, targets hand theirs on.
    """
    from ray import serve

    from deployments.app import APPLICATION, build_app

    asks = [Ask(prompt=prompt, sampling=sampling) for prompt in ("the fox", "grüße 🦊") for sampling in (LONG, SEEDED)]
    undisturbed = [client.generate(ask) for ask in asks]
    scaled = threading.Event()

    def keep_streaming(ask: Ask, expected: Result) -> int:
        """Streams one after the other, until all is scaled; how many."""
        ended = 0
        while not scaled.is_set():
            token_ids, text, complete = stream(stub, ask, 1, lambda: None)
            assert complete is not None
            assert complete.finish_reason == "length"
            assert (token_ids, text) == (expected.token_ids, expected.text)
            ended += 1
        return ended

    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(keep_streaming, *each) for each in zip(asks, undisturbed, strict=True)]
        try:
            for copies in (1, 2):
                serve.run(build_app(scaled_to(copies, config)), name=APPLICATION, route_prefix="/")
                assert until(partial(has_copies, system, copies), 90.0)
        finally:
            scaled.set()
        assert all(streaming.result() > 0 for streaming in streams)
    assert until(system.is_whole, 90.0)


def scaled_to(copies: int, config: OutriderConfig) -> OutriderConfig:
    """The same system with so many targets and routers."""
    parts = {name: getattr(config, name).model_copy(update={"num_replicas": copies}) for name in ("target", "router")}
    return config.model_copy(update=parts)


def has_copies(system: System, copies: int) -> bool:
    """Whether so many targets are left, and so many routers, those that still drain included."""
    return len(system.endpoints("Target")) == copies == len(processes.workers("ray::ServeReplica:outrider:Router"))


def test_two_thousand_open_requests_against_room_for_sixty_four(system: System) -> None:
    """Two routers work on 32 each, and 64 more may wait at each; the rest are refused at once, with a hint."""
    request = Ask(prompt="the fox", sampling={"max_tokens": 16, "ignore_eos": True}).to_pb()
    routers = processes.workers("ray::ServeReplica:outrider:Router")
    before = sum(process.memory_info().rss for process in routers)
    with ExitStack() as channels:
        stubs = [
            generation_pb2_grpc.GenerationStub(
                channels.enter_context(grpc.insecure_channel(system.address, [(name, i)]))
            )
            for i, name in enumerate(["outrider.test_channel"] * 4)
        ]
        calls = [stubs[turn % 4].Generate(request, timeout=120) for turn in range(2000)]
        outcomes = [outcome_of(call) for call in calls]
    completed = [token_ids for token_ids, hint in outcomes if not hint]
    assert set(map(len, completed)) == {16}
    assert len(set(completed)) == 1
    assert len(completed) >= 64 * 2
    assert all(float(hint) > 0 for _, hint in outcomes if hint)
    assert len(completed) < 2000
    assert sum(process.memory_info().rss for process in routers) - before < 256 * 2**20


def outcome_of(call: Any) -> tuple[tuple[int, ...], str]:
    """Token ids of a call that completed; the retry hint of one that was refused."""
    try:
        return tuple(token for response in call for token in response.delta.token_ids), ""
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return (), dict(error.trailing_metadata())[RETRY_TRAILER]
