"""Who is let in and counted, and what a call says beside its status: which request it was, and of one that fails which
field is wrong, when to come back, what was delivered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from deployments.access import Gate
from deployments.access_config import Access
from engine.errors import InvalidArgument, OutriderError, Overloaded, Unavailable
from router.access import Accounts, Spend, Tenant
from router.api_keys import key_hash, key_id, make_key
from router.events import Delta, Event, RequestRecord
from router.requests import GenerateRequest, RequestLimits
from router.service import RouterConfig
from rpc.pb import generation_pb2 as pb
from tests.deployments.calling import Clock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import
Code = grpc.StatusCode


class FailingRouter:
    """Delivers deltas, then fails, if it is to."""

    def __init__(self, deltas: Sequence[Delta], error: Exception | None) -> None:
        self._deltas, self._error = deltas, error
        self.asked: list[str] = []

    async def generate(self, request: GenerateRequest, spend: Spend) -> AsyncGenerator[Event, None]:
        self.asked.append(request.request_id)
        for delta in self._deltas:
            spend(len(delta.token_ids))
            yield delta
        if self._error is not None:
            raise self._error


class Context:
    """The part of Serve's gRPC context that the ingress uses."""

    def __init__(self, key: str = "") -> None:
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self.code: Code | None = None
        self.details = ""
        self.trailers: dict[str, str] = {}

    def traceparent(self) -> str | None:
        return None

    def request_id(self) -> str:
        return "r"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: Code) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailers: Sequence[tuple[str, str]]) -> None:
        self.trailers = dict(trailers)


class Refusals:
    """The metrics of refused requests."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def request_finished(self, record: RequestRecord) -> None:
        self.outcomes.append(record.outcome)


def ingress(router: Any = None, access: Access | None = None, *, haproxy: bool = True, **limits: int) -> Any:
    """The deployment without Serve, Ray and models around it."""
    from deployments.ingress import RouterDeployment

    class Ingress(RouterDeployment):
        def __init__(self) -> None:
            pass

        def __del__(self) -> None:
            pass

    made: Any = Ingress()
    made._router, made._metrics, made._slow_reader_s = router, Refusals(), 30.0
    made._status_needs_message = not haproxy
    made._settings = RouterConfig(limits=RequestLimits(**limits))
    made._gate, made._accounts = Gate(access or Access(), Clock()), Accounts(Clock())
    return made


@pytest.mark.parametrize(
    ("resumed", "deltas", "error", "code", "trailers"),
    [
        ([], [], Unavailable("gone"), Code.UNAVAILABLE, {}),
        (
            [],
            [Delta("a", (1,)), Delta("", (2, 3))],
            Unavailable("gone"),
            Code.UNAVAILABLE,
            {"outrider-delivered-tokens": "3"},
        ),
        ([7, 8], [Delta("a", (1,))], Unavailable("gone"), Code.UNAVAILABLE, {"outrider-delivered-tokens": "3"}),
        (
            [7, 8],
            [],
            Overloaded("full", 1.5),
            Code.RESOURCE_EXHAUSTED,
            {"outrider-retry-after-s": "1.500", "outrider-delivered-tokens": "2"},
        ),
        ([], [], InvalidArgument("prompt", "", "text"), Code.INVALID_ARGUMENT, {"outrider-field": "prompt"}),
    ],
)
async def test_a_failing_call_says_what_it_delivered(
    resumed: list[int], deltas: list[Delta], error: OutriderError, code: Code, trailers: dict[str, str]
) -> None:
    context = Context()
    request = pb.GenerateRequest(prompt="x", resume_from=resumed)
    replies = [reply async for reply in ingress(FailingRouter(deltas, error)).Generate(request, context)]
    assert [tuple(reply.delta.token_ids) for reply in replies] == [delta.token_ids for delta in deltas]
    expected = {"outrider-request-id": "r", **trailers}
    assert (context.code, context.details, context.trailers) == (code, str(error), expected)


async def test_without_haproxy_a_failure_rides_on_a_message() -> None:
    """Serve's Python proxy, which is there then, learns the status of a stream with its messages only."""
    context = Context()
    made = ingress(FailingRouter([Delta("a", (1,))], Unavailable("gone")), haproxy=False)
    replies = []
    async for reply in made.Generate(pb.GenerateRequest(prompt="x"), context):
        replies.append((reply.request_id, reply.WhichOneof("response"), context.code))
    assert replies == [("r", "delta", None), ("r", None, Code.UNAVAILABLE)]


class GoodRouter:
    """Delivers two deltas and ends; knows no model."""

    async def generate(self, request: GenerateRequest, spend: Spend) -> AsyncGenerator[Event, None]:
        for token_id in (1, 2):
            spend(1)
            yield Delta("a", (token_id,))

    def get_model_info(self) -> Any:
        raise Unavailable("no target is ready")

    async def tokenize(self, *_: Any, **__: Any) -> Any:
        raise Unavailable("no target is ready")


class Keyed:
    """An ingress that knows two tenants, of whom the first may have one stream at a time and ten tokens a minute."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.one, self.other = make_key(), make_key()
        one = {"name": "one", "limits": {"concurrent_streams": 1, "tokens_per_minute": 10, "requests_per_minute": 3}}
        entries = [
            {**entry, "id": key_id(key), "sha256": key_hash(key)}
            for entry, key in ((one, self.one), ({"name": "other"}, self.other))
        ]
        (folder / "keys.yaml").write_text(yaml.safe_dump(entries))
        self.ingress = ingress(GoodRouter(), Access(api_keys=str(folder / "keys.yaml")), **limits)

    async def generate(self, key: str, **request: Any) -> Context:
        context = Context(key)
        sent = pb.GenerateRequest(**{"prompt": "x", **request})
        replies = [reply async for reply in self.ingress.Generate(sent, context)]
        assert (len(replies) == 2) == (context.code is None)
        return context


@pytest.fixture
def keyed(tmp_path: Path) -> Keyed:
    return Keyed(tmp_path)


async def test_who_is_not_known_gets_nothing(keyed: Keyed) -> None:
    for key in ("", "outrider_wrong", make_key()):
        context = await keyed.generate(key)
        assert context.code is Code.UNAUTHENTICATED
        for method, request in (("GetModelInfo", pb.GetModelInfoRequest()), ("Tokenize", pb.TokenizeRequest(text="x"))):
            context = Context(key)
            await getattr(keyed.ingress, method)(request, context)
            assert context.code is Code.UNAUTHENTICATED
    assert keyed.ingress._metrics.outcomes == ["Unauthenticated"] * 3


async def test_who_is_known_gets_through(keyed: Keyed) -> None:
    assert (await keyed.generate(keyed.other)).code is None
    for method, request in (("GetModelInfo", pb.GetModelInfoRequest()), ("Tokenize", pb.TokenizeRequest(text="x"))):
        context = Context(keyed.other)
        await getattr(keyed.ingress, method)(request, context)
        assert context.code is Code.UNAVAILABLE, "the router's own answer"
    assert keyed.ingress._metrics.outcomes == [], "what becomes of a request that was let in, the router tells"


async def test_an_open_stream_counts_against_its_own_tenant_alone(keyed: Keyed) -> None:
    async with aclosing(keyed.ingress.Generate(pb.GenerateRequest(prompt="x"), Context(keyed.one))) as stream:
        await anext(stream)
        refused = await keyed.generate(keyed.one)
        assert (refused.code, "1 streams are open" in refused.details) == (Code.RESOURCE_EXHAUSTED, True)
        assert float(refused.trailers["outrider-retry-after-s"]) > 0
        assert (await keyed.generate(keyed.other)).code is None
    assert keyed.ingress._metrics.outcomes == ["LimitExceeded"]
    assert (await keyed.generate(keyed.one)).code is None, "a stream that its caller left is closed"


async def test_requests_of_all_methods_count(keyed: Keyed) -> None:
    for _ in range(2):
        await keyed.ingress.GetModelInfo(pb.GetModelInfoRequest(), Context(keyed.one))
    await keyed.ingress.Tokenize(pb.TokenizeRequest(text="x"), Context(keyed.one))
    refused = await keyed.generate(keyed.one)
    assert (refused.code, "3 requests a minute" in refused.details) == (Code.RESOURCE_EXHAUSTED, True)
    assert float(refused.trailers["outrider-retry-after-s"]) == pytest.approx(20.0)


async def test_what_was_not_used_of_max_tokens_is_given_back(keyed: Keyed) -> None:
    sampling = pb.SamplingParams(max_tokens=10)
    assert (await keyed.generate(keyed.one, sampling_params=sampling)).code is None
    async with aclosing(
        keyed.ingress.Generate(pb.GenerateRequest(prompt="x", sampling_params=sampling), Context(keyed.one))
    ) as stream:
        await anext(stream)
        budget = keyed.ingress._accounts._account(Tenant("one")).tokens
        assert budget.wait_s() > 0.0, "8 were left, of which 10 are reserved"
    assert budget.wait_s() == 0.0


async def test_a_message_that_is_too_large_is_not_looked_at(tmp_path: Path) -> None:
    keyed = Keyed(tmp_path, max_message_bytes=1000)
    context = await keyed.generate(keyed.other, prompt="x" * 1000)
    assert (context.code, context.trailers["outrider-field"]) == (Code.INVALID_ARGUMENT, "request")
    assert "at most 1000 bytes" in context.details
    context = Context(keyed.other)
    await keyed.ingress.Tokenize(pb.TokenizeRequest(text="x" * 1000), context)
    assert context.code is Code.INVALID_ARGUMENT
    assert (await keyed.generate(keyed.other, prompt="x" * 900)).code is None
    assert (await keyed.generate("", prompt="x" * 1000)).code is Code.UNAUTHENTICATED, "and strangers learn nothing"
