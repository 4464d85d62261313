"""What a failing call says beside its status: the field that is wrong, when to come back, what was delivered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from engine.errors import InvalidArgument, OutriderError, Overloaded, Unavailable
from router.events import Delta, Event
from router.requests import GenerateRequest
from rpc.pb import generation_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import
Code = grpc.StatusCode


class FailingRouter:
    """Delivers deltas, then fails."""

    def __init__(self, deltas: Sequence[Delta], error: OutriderError) -> None:
        self._deltas, self._error = deltas, error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        for delta in self._deltas:
            yield delta
        raise self._error


class Context:
    """The part of Serve's gRPC context that the ingress uses."""

    def __init__(self) -> None:
        self.code: Code | None = None
        self.details = ""
        self.trailers: dict[str, str] = {}

    def traceparent(self) -> str | None:
        return None

    def request_id(self) -> str:
        return "r"

    def set_code(self, code: Code) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailers: Sequence[tuple[str, str]]) -> None:
        self.trailers = dict(trailers)


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
    from deployments.ingress import RouterDeployment

    deployment: Any = SimpleNamespace(_router=FailingRouter(deltas, error))
    context: Any = Context()
    request = pb.GenerateRequest(prompt="x", resume_from=resumed)
    replies = [reply async for reply in RouterDeployment.Generate(deployment, request, context)]
    assert [tuple(reply.delta.token_ids) for reply in replies] == [delta.token_ids for delta in deltas]
    assert (context.code, context.details, context.trailers) == (code, str(error), trailers)
