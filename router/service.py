"""Owns the Router: one call from text to text. Checks a request, tokenizes, admits, runs its session, reports."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field

from engine.errors import InvalidArgument, OutriderError, Unavailable
from engine.info import EngineInfo
from engine.sampling import StopParams
from router.acceptance import DRAFT_MODEL, AcceptancePriors
from router.access import Spend, spend_nothing
from router.admission import Admission
from router.costs import CostModel
from router.detokenizer import Detokenizer
from router.events import Complete, Event, NoObserver, Observer, RequestRecord
from router.pacing import paced
from router.peers import PeerSet
from router.request_span import RequestSpan
from router.requests import (
    FIELDS,
    Chat,
    GenerateRequest,
    Input,
    RawPrompt,
    RequestLimits,
    SessionRequest,
    TokenIds,
    check_input,
    check_request,
    check_resumed,
    check_resumed_ends,
    fit_to_window,
)
from router.session import Session
from router.shared import SessionConfig, Shared
from router.stopping import Output, StopStrings, TextStream
from router.stopwatch import Stopwatch
from router.tokenizer import Tokenizer

_LARGE_TEXT_BYTES = 1 << 15  # tokenizing more takes milliseconds, so it is not done on the event loop


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a router serves.

    Attributes:
        max_concurrent: requests that run at once.
        max_queued: requests that may wait for it.
        default_max_tokens: max_tokens of a request that names none.
        max_bytes_per_token: a text of more bytes than this times its most tokens is refused without tokenizing it.
        version: what GetModelInfo says.
        limits: most that one request may hold.
    """

    max_concurrent: int = 64
    max_queued: int = 256
    default_max_tokens: int = 256
    max_bytes_per_token: int = 64
    version: str = ""
    limits: RequestLimits = field(default_factory=RequestLimits)
    sessions: SessionConfig = field(default_factory=SessionConfig)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may know of the models; field names are those of the public API."""

    model: str
    draft_model: str
    vocab_size: int
    max_context_length: int
    draft_max_context_length: int
    eos_token_ids: tuple[int, ...]
    drafters: tuple[str, ...]
    version: str


class Router:
    """Serves requests on the peers of a PeerSet, which whoever discovers peers keeps up to date."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        peers: PeerSet,
        config: RouterConfig,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer, self._config, self._clock = tokenizer, config, clock
        self._observer = observer or NoObserver()
        priors = AcceptancePriors(config.sessions.workloads)
        costs = CostModel(config.sessions.costs, config.sessions.batch_weight)
        self._shared = Shared(peers, clock, config.sessions, costs, priors, self._observer)
        self._admission = Admission(config.max_concurrent, config.max_queued, clock)

    @property
    def running_requests(self) -> int:
        return self._admission.running

    @property
    def queued_requests(self) -> int:
        return self._admission.queued

    async def generate(self, request: GenerateRequest, spend: Spend = spend_nothing) -> AsyncGenerator[Event, None]:
        """Deltas, then one Complete.

        Args:
            spend: told of tokens as they are used: those of the prompt when it is known, of the output as they come.

        Raises:
            InvalidArgument: naming the field that is wrong.
            Overloaded: too many requests wait already.
            Unavailable: no target was there, or one after another was lost. Where none is there, as in a redeployment,
                a request waits for one for `failover_wait_s`, like one whose target is lost: whoever sends one then
                would rather wait than be refused. Who asks whether the system is ready is answered at once.
            DeadlineExceeded: the request's deadline passed.
        """
        stopwatch = Stopwatch(self._clock)
        span = RequestSpan(request)
        outcome, complete, num_delivered = "cancelled", None, 0
        try:
            sessions = self._config.sessions
            check_request(request, sessions.drafters, sessions.workloads, self._config.limits)
            async with self._admission.place(request.deadline_s):
                stopwatch.admitted()
                async with aclosing(await self._start(request, spend, stopwatch, span)) as events:
                    async for event in events:
                        if isinstance(event, Complete):
                            outcome, complete = event.finish_reason, event
                        else:
                            num_delivered += len(event.token_ids)
                            spend(len(event.token_ids))
                            span.delivered(event)
                        yield event
        except OutriderError as error:
            outcome = type(error).__name__
            raise
        except Exception:
            outcome = "InternalError"
            raise
        finally:
            self._observer.request_finished(RequestRecord(outcome, complete, num_delivered, stopwatch.elapsed_s))
            span.end(outcome, complete)

    async def tokenize(
        self, given: RawPrompt | Chat, *, add_special_tokens: bool = False
    ) -> tuple[list[int], list[str]]:
        """Ids and their spelling in the vocabulary. Raises InvalidArgument naming the field."""
        if isinstance(given, RawPrompt):
            self._check_size(given.text, "text", self._target_info())
            ids = await _off_loop(
                len(given.text), lambda: self._tokenizer.encode(given.text, add_special_tokens=add_special_tokens)
            )
        else:
            check_input(given, self._config.limits)
            ids = await self._encode(given, self._target_info())
        return ids, [self._tokenizer.token(token_id) or "" for token_id in ids]

    def get_model_info(self) -> ModelInfo:
        """Raises Unavailable while no target is ready."""
        target, draft = self._target_info(), self._shared.peers.drafts.any()
        return ModelInfo(
            model=target.model,
            draft_model="" if draft is None else draft.info.model,
            vocab_size=target.vocab_size,
            max_context_length=target.max_context_length,
            draft_max_context_length=0 if draft is None else draft.info.max_context_length,
            eos_token_ids=target.eos_token_ids,
            drafters=tuple(name for name in self._config.sessions.drafters if name != DRAFT_MODEL or draft is not None),
            version=self._config.version,
        )

    async def _start(
        self, request: GenerateRequest, spend: Spend, stopwatch: Stopwatch, span: RequestSpan
    ) -> AsyncGenerator[Event, None]:
        """The events of a session for the request, once it is tokenized and known to fit."""
        wait_s = self._config.sessions.target_link.failover_wait_s
        await self._shared.peers.target_ready(wait_s, self._time_left(request, stopwatch) or math.inf)
        info = self._target_info()
        prompt = await self._encode(request.input, info)
        config = self._config
        stops = fit_to_window(request, len(prompt), info.max_context_length, config.default_max_tokens, config.limits)
        stops.validate(info.vocab_size)
        span.note_target(info, stops)
        output = await self._resumed_output(request, stops, info)
        spend(len(prompt) + len(request.resume_from))
        checked = SessionRequest(
            tuple(prompt),
            request.sampling,
            stops,
            request.speculation,
            request.resume_from,
            self._time_left(request, stopwatch),
            span.span,
            request.workload,
            request.smooth_stream,
        )
        events = Session(checked, output, stopwatch, self._shared).events()
        return paced(events, self._clock) if request.smooth_stream else events

    async def _resumed_output(self, request: GenerateRequest, stops: StopParams, info: EngineInfo) -> Output:
        """The request's output as it was behind the tokens it resumes from. Raises InvalidArgument naming the field."""
        output = Output(
            TextStream(
                Detokenizer(self._tokenizer, skip_special_tokens=request.skip_special_tokens),
                StopStrings(request.stop, stops.min_tokens, request.include_stop_str_in_output),
            )
        )
        resumed = request.resume_from
        if resumed:
            finish_reason = check_resumed(resumed, stops, info)
            await asyncio.to_thread(output.take, resumed, finish_reason)
            check_resumed_ends(output.num_tokens, len(resumed))
        return output

    def _time_left(self, request: GenerateRequest, stopwatch: Stopwatch) -> float:
        """Seconds to the request's deadline, never less than a millisecond; 0 if it has none."""
        if not request.deadline_s:
            return 0.0
        return max(request.deadline_s - stopwatch.elapsed_s, 1e-3)

    async def _encode(self, given: Input, info: EngineInfo) -> list[int]:
        """Token ids of the prompt, each known to the target. Raises InvalidArgument."""
        name = FIELDS[type(given)]
        if isinstance(given, TokenIds):
            _check_token_ids(given.input_ids, info.vocab_size)
            return list(given.input_ids)
        if isinstance(given, RawPrompt):
            self._check_size(given.text, name, info)
            ids = await _off_loop(len(given.text), lambda: self._tokenizer.encode_prompt(given.text))
        else:
            self._check_size("".join(message.content for message in given.messages), name, info)
            text = self._tokenizer.render_chat([asdict(message) for message in given.messages])
            ids = await _off_loop(len(text), lambda: self._tokenizer.encode(text))
        if not ids:
            raise InvalidArgument(name, "nothing that makes a token", "at least one token")
        return ids

    def _check_size(self, text: str, name: str, info: EngineInfo) -> None:
        """Refuses what cannot fit before any work is done on it."""
        most = self._config.limits.prompt_tokens(info.max_context_length)
        limit = (most + 1) * self._config.max_bytes_per_token
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidArgument(name, "a lone surrogate", "valid Unicode") from None
        if num_bytes > limit:
            allowed = f"at most {most} tokens, never more than {limit} bytes"
            raise InvalidArgument(name, f"{num_bytes} bytes", allowed)

    def _target_info(self) -> EngineInfo:
        port = self._shared.peers.targets.any()
        if port is None:
            raise Unavailable("no target is ready")
        return port.info


def _check_token_ids(input_ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in input_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument("tokenized.input_ids", token_id, f"0 to {vocab_size - 1}")


async def _off_loop(num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    return encode() if num_chars < _LARGE_TEXT_BYTES else await asyncio.to_thread(encode)
