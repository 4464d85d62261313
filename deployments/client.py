"""Owns a caller's side of the public API: requests from plain values, replies gathered into one result.

A stream that breaks because a server died is resumed behind what it has delivered: nobody who reads the text notices.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import grpc

from deployments.channels import bearer, open_channel
from deployments.models import home
from deployments.resuming import RESUME_FOR_S, CallFailed, NothingAnswers, Patience
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc

__all__ = ["DEFAULT_ADDRESS", "Ask", "CallFailed", "Client", "Result", "address_note", "default_address"]

DEFAULT_ADDRESS = "127.0.0.1:9000"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Exactly one of prompt, messages and token_ids is given; None leaves a field to the server.

    Attributes:
        prompt: raw text.
        messages: role and content of each, for the chat template.
        token_ids: ids, used as they are.
        speculation: "auto" or "off".
        drafter: "" or "auto" lets the policy pick; else "draft_model" or "ngram".
        max_draft_tokens: cap on K.
        num_speculative_tokens: K, whatever pays; None leaves it to the router.
        run_ahead: let the draft draft on while its proposal is verified.
        workload: class of the request, one of the server's; "" for none in particular.
        smooth_stream: tokens come one by one, evenly over the time of a round, instead of several at a time.
        request_id: by which the server knows it; "" for one made here.
        sampling: fields of pb.SamplingParams by name.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    speculation: str = "auto"
    drafter: str = ""
    max_draft_tokens: int | None = None
    num_speculative_tokens: int | None = None
    run_ahead: bool = True
    workload: str = ""
    smooth_stream: bool = False
    request_id: str = ""
    sampling: Mapping[str, Any] | None = None

    def to_pb(self) -> pb.GenerateRequest:
        modes = {"auto": pb.Speculation.MODE_AUTO, "off": pb.Speculation.MODE_OFF}
        request = pb.GenerateRequest(
            sampling_params=pb.SamplingParams(**(self.sampling or {})),
            speculation=pb.Speculation(
                mode=modes[self.speculation],
                drafter=self.drafter,
                max_draft_tokens=self.max_draft_tokens,
                num_speculative_tokens=self.num_speculative_tokens,
                run_ahead=self.run_ahead,
                workload=self.workload,
            ),
            smooth_stream=self.smooth_stream,
        )
        if self.messages is not None:
            request.chat.messages.extend(pb.ChatMessage(**message) for message in self.messages)
        elif self.token_ids is not None:
            request.tokenized.input_ids.extend(self.token_ids)
        else:
            request.prompt = self.prompt or ""
        return request


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request: all its text and ids, what the server said at the end, and how often it was resumed."""

    text: str
    token_ids: tuple[int, ...]
    complete: pb.Complete
    resumes: int = 0
    request_id: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The object that `outrider generate --json` prints."""
        spoken, timing, usage = self.complete.speculation, self.complete.timing, self.complete.usage
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.complete.finish_reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "speculation": _speculation(spoken),
            "timing": {
                "ttft_ms": round(timing.ttft_ms, 3),
                "decode_tokens_per_s": round(timing.decode_tokens_per_s, 3),
                "itl_ms_p50": round(timing.itl_ms_p50, 3),
                "itl_ms_p95": round(timing.itl_ms_p95, 3),
                "router_ms_p50": round(timing.router_ms_p50, 3),
            },
            "failovers": self.complete.failovers,
            "resumes": self.resumes,
        }


def _speculation(stats: pb.SpeculationStats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "mean_num_speculative_tokens": round(stats.mean_num_speculative_tokens, 4),
        "drafted_per_position": list(stats.drafted_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "switched_off_reason": stats.switched_off_reason,
        "dropped_proposals": stats.dropped_proposals,
        "rounds_ahead": stats.rounds_ahead,
        "early_hits": stats.early_hits,
        "early_hit_rate": round(stats.early_hit_rate, 4),
        "wasted_draft_tokens": stats.wasted_draft_tokens,
        "drafters": {name: asdict(_Drafter.of(each)) for name, each in sorted(stats.drafters.items())},
    }


@dataclass(frozen=True, slots=True)
class _Drafter:
    rounds: int
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, stats: pb.DrafterStats) -> _Drafter:
        return cls(stats.rounds, stats.draft_tokens, stats.accepted_tokens)


def default_address() -> str:
    """Where a server is expected: $OUTRIDER_ADDRESS, what a running `outrider serve` noted, or port 9000 here."""
    note = address_note()
    noted = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    return os.environ.get("OUTRIDER_ADDRESS") or noted or DEFAULT_ADDRESS


def address_note() -> Any:
    """The file in which `outrider serve` notes its address while it runs."""
    return home() / "address"


class Stream:
    """The replies to one request, each once, over as many calls as it takes. Iterate once; `cancel` to end early.

    Attributes:
        request_id: of all its calls, known here so that it is known too of a call that no server ends.
        token_ids: delivered so far.
        resumes: calls after the first.
    """

    def __init__(self, client: Client, ask: Ask, patience: Patience, timeout_s: float | None) -> None:
        self._client, self._ask, self._patience = client, ask, patience
        self._give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._call: Any = None
        self.request_id = ask.request_id or uuid4().hex
        self.token_ids: list[int] = []
        self.resumes = 0

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """Deltas, then one message with `complete`. Raises CallFailed."""
        while True:
            try:
                yield from self._one_call()
            except CallFailed as failure:
                pause_s = self._patience.pause_s(failure, self.resumes + 1, len(self.token_ids))
                if pause_s is None:
                    raise
            else:
                return
            time.sleep(max(0.0, min(pause_s, self._time_left_s)))
            self.resumes += 1

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _one_call(self) -> Iterator[pb.GenerateResponse]:
        """What is still missing, as far as one call gets."""
        request = self._ask.to_pb()
        request.request_id = self.request_id
        request.resume_from.extend(self.token_ids)
        try:
            self._call = self._client.call(request, None if self._give_up_at == math.inf else self._time_left_s)
            for response in self._call:
                self.token_ids += response.delta.token_ids
                yield response
                if response.HasField("complete"):
                    return
        except grpc.RpcError as error:
            raise self._client.failure(error, self.request_id) from error
        finally:
            self.cancel()
        what = "the server ended the stream without a final message"
        raise CallFailed(what, grpc.StatusCode.DATA_LOSS, request_id=self.request_id)

    @property
    def _time_left_s(self) -> float:
        return max(0.0, self._give_up_at - time.monotonic())


class Client:
    """A connection to one server. Use it in a `with` block.

    Args:
        address: host:port of the public gRPC API; https://host:port where TLS is spoken.
        resume_for_s: seconds without a new token for which a request whose server went away is resumed; 0 never.
        application: which of several Serve applications behind the address is meant.
        api_key: key or token that says who calls; None takes $OUTRIDER_API_KEY.
    """

    def __init__(
        self, address: str, resume_for_s: float = RESUME_FOR_S, application: str = "", api_key: str | None = None
    ) -> None:
        self.address, self._resume_for_s = address, resume_for_s
        self._metadata = [*([("application", application)] if application else []), *bearer(api_key)]
        self._channel = open_channel(address)
        self._stub = pb_grpc.GenerationStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._channel.close()

    def generate(
        self, ask: Ask, on_text: Callable[[str], object] = lambda _: None, timeout_s: float | None = None
    ) -> Result:
        """Runs one request to its end, handing text to `on_text` as it comes, each piece once.

        When the server goes away, the request is sent again with what it has delivered, and goes on behind that: to
        the identical text if it is greedy or seeded, else to a fair draw.

        Args:
            timeout_s: seconds from now after which it fails, however often it was resumed; None never.

        Raises:
            CallFailed: the server refused or failed it, or was gone for too long.
        """
        stream, text = self.stream(ask, timeout_s), list[str]()
        try:
            for response in stream:
                if response.HasField("complete"):
                    ids, name = tuple(stream.token_ids), stream.request_id
                    return Result("".join(text), ids, response.complete, stream.resumes, name)
                text.append(response.delta.text)
                on_text(response.delta.text)
        finally:
            stream.cancel()
        raise AssertionError("a stream ends with its final message or raises")

    def stream(self, ask: Ask, timeout_s: float | None = None) -> Stream:
        """The replies one by one, as `generate` gathers them."""
        return Stream(self, ask, Patience(self._resume_for_s, time.monotonic, random.random), timeout_s)

    def call(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """One call, not resumed: an iterator of responses that raises grpc.RpcError."""
        return self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)

    def model_info(self, timeout_s: float = 10.0) -> pb.GetModelInfoResponse:
        """What is served. Raises CallFailed."""
        try:
            info: pb.GetModelInfoResponse = self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
            return info
        except grpc.RpcError as error:
            raise self.failure(error) from error

    def failure(self, error: Any, sent_id: str = "") -> CallFailed:
        """What a call's RpcError means to a caller, of the request that was sent with an id."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
            hint = "`outrider serve --config demo` starts a server"
            return NothingAnswers(f"nothing answers at {self.address}; {hint}", code)
        return CallFailed.of(error, sent_id)
