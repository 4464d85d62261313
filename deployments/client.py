"""Owns a caller's side of the public API: requests from plain values, replies gathered into one result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from deployments.models import home
from engine.errors import OutriderError
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:9000"
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class CallFailed(OutriderError):
    """A call to the server failed; the message is the server's own, or says that nothing answers.

    Args:
        code: gRPC status code.
    """

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        self.code = code
        super().__init__(message)


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
        sampling: fields of pb.SamplingParams by name.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    speculation: str = "auto"
    drafter: str = ""
    max_draft_tokens: int | None = None
    sampling: Mapping[str, Any] | None = None

    def to_pb(self) -> pb.GenerateRequest:
        modes = {"auto": pb.Speculation.MODE_AUTO, "off": pb.Speculation.MODE_OFF}
        request = pb.GenerateRequest(
            sampling_params=pb.SamplingParams(**(self.sampling or {})),
            speculation=pb.Speculation(mode=modes[self.speculation], drafter=self.drafter),
        )
        if self.max_draft_tokens is not None:
            request.speculation.max_draft_tokens = self.max_draft_tokens
        if self.messages is not None:
            request.chat.messages.extend(pb.ChatMessage(**message) for message in self.messages)
        elif self.token_ids is not None:
            request.tokenized.input_ids.extend(self.token_ids)
        else:
            request.prompt = self.prompt or ""
        return request


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request: all its text and ids, and what the server said at the end."""

    text: str
    token_ids: tuple[int, ...]
    complete: pb.Complete

    def as_dict(self) -> dict[str, Any]:
        """The object that `outrider generate --json` prints."""
        spoken, timing, usage = self.complete.speculation, self.complete.timing, self.complete.usage
        return {
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


class Client:
    """A connection to one server. Use it in a `with` block.

    Args:
        address: host:port of the public gRPC API.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        self._stub = pb_grpc.GenerationStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._channel.close()

    def generate(
        self, ask: Ask, on_text: Callable[[str], object] = lambda _: None, timeout_s: float | None = None
    ) -> Result:
        """Runs one request to its end, handing text to `on_text` as it comes. Raises CallFailed."""
        text, token_ids = list[str](), list[int]()
        call = self._stub.Generate(ask.to_pb(), timeout=timeout_s)
        try:
            for response in call:
                if response.HasField("complete"):
                    return Result("".join(text), tuple(token_ids), response.complete)
                text.append(response.delta.text)
                token_ids += response.delta.token_ids
                on_text(response.delta.text)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()
        raise CallFailed("the server ended the stream without a final message", grpc.StatusCode.DATA_LOSS)

    def model_info(self, timeout_s: float = 10.0) -> pb.GetModelInfoResponse:
        """What is served. Raises CallFailed."""
        try:
            info: pb.GetModelInfoResponse = self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)
            return info
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.RpcError) -> CallFailed:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
            details = f"nothing answers at {self.address}; `outrider serve --config demo` starts a server"
        return CallFailed(details or code.name, code)
