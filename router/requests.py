"""Owns what a caller asks for, GenerateRequest, what is left of it once it is checked, SessionRequest, and the checks
that need neither tokenizer nor peers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from engine.errors import InvalidArgument
from engine.info import EngineInfo
from engine.proposal import FinishReason
from engine.sampling import SamplingParams, StopParams
from engine.stopping import cut
from router.policy import SpeculationControl


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most that one request may hold. All is checked before anything is done for the request.

    Attributes:
        max_message_bytes: of the whole message.
        max_prompt_tokens: None: what the target's window takes.
        max_output_tokens: the largest max_tokens; None: any, cut to what the window leaves.
        max_stop_strings: stop strings, of max_stop_chars each.
        max_stop_chars: characters of a stop string.
        max_stop_token_ids: stop token ids.
        max_messages: turns of a chat.
        max_name_chars: characters of request_id, which every reply repeats, and of a role.
    """

    max_message_bytes: int = 16 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 256
    max_messages: int = 4096
    max_name_chars: int = 256

    def prompt_tokens(self, window: int) -> int:
        """Most tokens of a prompt for a target with this window; one has to be left for the output."""
        return window - 1 if self.max_prompt_tokens is None else min(self.max_prompt_tokens, window - 1)


DEFAULT_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text that is tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the model's chat template."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenized already."""

    input_ids: tuple[int, ...]


Input = RawPrompt | Chat | TokenIds

FIELDS: dict[type[Input], str] = {RawPrompt: "prompt", Chat: "chat.messages", TokenIds: "tokenized.input_ids"}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request as it came; field names are those of the public API.

    Attributes:
        max_tokens: None takes the router's default, or what the window leaves.
        stop: strings that end the output.
        workload: its class, one of those the router knows; "" if none in particular.
        smooth_stream: deliver the tokens of a round one by one, evenly over the time of a round.
        resume_from: ids of all tokens that an earlier call for the same request has delivered; this one goes on
            behind them.
        deadline_s: seconds from arrival; 0: none.
        traceparent: W3C trace context of the caller, or "".
    """

    input: Input
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculation: SpeculationControl = field(default_factory=SpeculationControl)
    workload: str = ""
    smooth_stream: bool = False
    resume_from: tuple[int, ...] = ()
    request_id: str = ""
    deadline_s: float = 0.0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A checked request.

    Attributes:
        prompt: token ids, at least one; prompt and max_tokens together fit the target's window.
        stops: what the target stops at.
        control: what the request asked of speculation.
        resumed: output that was delivered before; at most max_tokens ids.
        deadline_s: seconds from now after which the session ends; 0: never.
        span: of the request; None while it is not traced.
        workload, smooth_stream: as in GenerateRequest.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: StopParams
    control: SpeculationControl
    resumed: tuple[int, ...] = ()
    deadline_s: float = 0.0
    span: Span | None = None
    workload: str = ""
    smooth_stream: bool = False


def check_request(
    request: GenerateRequest,
    drafters: tuple[str, ...],
    workloads: Collection[str] = (),
    limits: RequestLimits = DEFAULT_LIMITS,
) -> None:
    """Raises InvalidArgument naming the first field that is wrong by itself.

    Args:
        drafters: those a request may name.
        workloads: the classes it may say to be of.
        limits: most it may hold.
    """
    _check_length("request_id", request.request_id, limits)
    request.sampling.validate()
    if request.max_tokens is not None:
        _check_max_tokens(request.max_tokens, limits.max_output_tokens)
    _check_stops(request.stop, limits)
    if len(request.stop_token_ids) > limits.max_stop_token_ids:
        found, allowed = f"{len(request.stop_token_ids)} ids", f"at most {limits.max_stop_token_ids}"
        raise InvalidArgument("sampling_params.stop_token_ids", found, allowed)
    _check_speculation(request.speculation, drafters)
    if request.workload and request.workload not in workloads:
        raise InvalidArgument("speculation.workload", request.workload, ", ".join(workloads) or "none")
    check_input(request.input, limits)


def check_input(given: Input, limits: RequestLimits = DEFAULT_LIMITS) -> None:
    """Raises InvalidArgument for a prompt without anything in it, and for a chat of too many turns."""
    if isinstance(given, RawPrompt) and not given.text:
        raise InvalidArgument("prompt", "", "at least one character")
    if isinstance(given, Chat):
        if not 0 < len(given.messages) <= limits.max_messages:
            allowed = f"1 to {limits.max_messages} messages"
            raise InvalidArgument("chat.messages", f"{len(given.messages)} messages", allowed)
        for message in given.messages:
            _check_length("chat.messages.role", message.role, limits)
    if isinstance(given, TokenIds) and not given.input_ids:
        raise InvalidArgument("tokenized.input_ids", [], "at least one token id")


def output_tokens(request: GenerateRequest, default_max_tokens: int, limits: RequestLimits) -> int:
    """Most tokens that the request may generate as far as it says itself; its prompt may leave room for fewer."""
    if request.max_tokens is not None:
        return request.max_tokens
    return min(default_max_tokens, limits.max_output_tokens or default_max_tokens)


def fit_to_window(
    request: GenerateRequest,
    num_prompt: int,
    window: int,
    default_max_tokens: int,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> StopParams:
    """The request's limits, so that prompt and output fit into the target's window.

    Raises:
        InvalidArgument: the prompt is longer than allowed, or leaves no room for a single token.
    """
    room, most = window - num_prompt, limits.prompt_tokens(window)
    if num_prompt > most:
        raise InvalidArgument(FIELDS[type(request.input)], f"{num_prompt} tokens", f"at most {most} tokens")
    asked = output_tokens(request, default_max_tokens, limits)
    if not 0 <= request.min_tokens <= asked:
        raise InvalidArgument("sampling_params.min_tokens", request.min_tokens, f"0 to max_tokens ({asked})")
    max_tokens = min(asked, room)
    return StopParams(max_tokens, min(request.min_tokens, max_tokens), request.ignore_eos, request.stop_token_ids)


def check_resumed(resumed: tuple[int, ...], stops: StopParams, info: EngineInfo) -> FinishReason | None:
    """How the tokens delivered earlier end the output by themselves, if they do: only the final message was lost then.

    Raises:
        InvalidArgument: they cannot be what was delivered for the request.
    """
    for token_id in resumed:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidArgument("resume_from", token_id, f"0 to {info.vocab_size - 1}")
    if len(resumed) > stops.max_tokens:
        raise InvalidArgument("resume_from", f"{len(resumed)} tokens", f"at most max_tokens ({stops.max_tokens})")
    kept = cut(resumed, 0, stops.ending_ids(info.eos_token_ids), stops.max_tokens)
    check_resumed_ends(len(kept.tokens), len(resumed))
    return kept.finish_reason


def check_resumed_ends(num_kept: int, num_resumed: int) -> None:
    """Raises InvalidArgument when the output had ended before the last of the tokens said to be delivered."""
    if num_kept < num_resumed:
        found = f"{num_resumed} tokens, of which number {num_kept} ends the output"
        raise InvalidArgument("resume_from", found, "the ids of the tokens that were delivered")


def _check_length(name: str, text: str, limits: RequestLimits) -> None:
    if len(text) > limits.max_name_chars:
        raise InvalidArgument(name, f"{len(text)} characters", f"at most {limits.max_name_chars}")


def _check_max_tokens(max_tokens: int, most: int | None) -> None:
    if max_tokens < 1 or (most is not None and max_tokens > most):
        allowed = "1 or more" if most is None else f"1 to {most}"
        raise InvalidArgument("sampling_params.max_tokens", max_tokens, allowed)


def _check_stops(stop: tuple[str, ...], limits: RequestLimits) -> None:
    name = "sampling_params.stop"
    if len(stop) > limits.max_stop_strings:
        raise InvalidArgument(name, f"{len(stop)} strings", f"at most {limits.max_stop_strings}")
    for text in stop:
        if not text:
            raise InvalidArgument(name, "", "strings of at least one character")
        if len(text) > limits.max_stop_chars:
            raise InvalidArgument(name, f"{len(text)} characters", f"at most {limits.max_stop_chars} each")


def _check_speculation(control: SpeculationControl, drafters: tuple[str, ...]) -> None:
    allowed = ("auto", *drafters)
    if control.drafter not in allowed:
        raise InvalidArgument("speculation.drafter", control.drafter, ", ".join(allowed))
    if control.max_draft_tokens is not None and control.max_draft_tokens < 0:
        raise InvalidArgument("speculation.max_draft_tokens", control.max_draft_tokens, "0 or more")
    if control.num_speculative_tokens == 0:
        raise InvalidArgument("speculation.num_speculative_tokens", 0, "1 or more; MODE_OFF decodes plainly")
