"""Owns what a request yields, Delta and Complete, and what observers of rounds and requests are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.proposal import FinishReason
from router.acceptance import SpeculationTotals


@dataclass(frozen=True, slots=True)
class Delta:
    """New output: tokens as they were committed, text as far as it is certain (it may lag behind the tokens).

    Attributes:
        pieces: the same token by token, where the request asked for a smooth stream.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Delta, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, tokens delivered, prompt tokens found in the target's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request; where its stream is smoothed, they are those of the tokens before that.

    Attributes:
        ttft_ms: from arrival to the first token, waiting for admission included.
        decode_tokens_per_s: delivered tokens after the first, by the time since it; 0 for one token.
        itl_ms_p50: median time per token as delivered; the tokens of one delta share the time since the delta before.
        itl_ms_p95: its 95th percentile.
        queue_ms: waiting for admission.
        router_ms_p50: median of what a round spent neither in the target's queue and forward nor waiting for a draft.
    """

    ttft_ms: float
    decode_tokens_per_s: float
    itl_ms_p50: float
    itl_ms_p95: float
    queue_ms: float
    router_ms_p50: float


@dataclass(frozen=True, slots=True)
class Complete:
    """The last event of a request that ended well.

    Attributes:
        failovers: how often the request went on with another target, or the same one restarted, after it was lost.
    """

    finish_reason: FinishReason
    matched_stop: str | None
    usage: Usage
    speculation: SpeculationTotals
    timing: Timing
    failovers: int = 0


Event = Delta | Complete


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round, for metrics. A token that the target decoded by itself is a round too.

    Attributes:
        drafter: who proposed, "" for a plain round.
        num_proposed: draft tokens judged.
        num_accepted: of them accepted.
        num_tokens: tokens committed.
        reason: why speculation, or the drafter asked for, was off.
        dropped: why a proposal was not judged.
        round_s: wall time.
        forward_s: of it, in the target's forward.
        draft_wait_s: of it, waiting for the draft.
        is_early: the target began it by itself, with a proposal that it had before.
        is_hit: whether it had the next proposal when this round was over; None where no draft ran ahead for it.
        num_wasted: draft tokens that were drafted ahead and that this round has made useless.
        queue_s: of round_s, waiting in the target for its forward.
        num_stale: proposals that came since the round before, for a state that had passed.
        is_switch: `reason` is not that of the request's round before.
        workload: the class that the request named, or "".
    """

    drafter: str
    num_proposed: int
    num_accepted: int
    num_tokens: int
    reason: str
    dropped: str
    round_s: float
    forward_s: float
    draft_wait_s: float
    is_early: bool
    is_hit: bool | None
    num_wasted: int
    queue_s: float = 0.0
    num_stale: int = 0
    is_switch: bool = False
    workload: str = ""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that ended.

    Attributes:
        outcome: "stop", "length", "cancelled", or the class name of the error.
        complete: its final event; None when it did not get one.
        num_delivered: tokens that this call streamed, whatever came of it; those it resumed from are not among them.
        elapsed_s: from arrival to its end, whatever that was.
    """

    outcome: str
    complete: Complete | None
    num_delivered: int = 0
    elapsed_s: float = 0.0


class Observer(Protocol):
    """Told about every round and request; must not block or raise."""

    def round_finished(self, record: RoundRecord) -> None: ...

    def request_finished(self, record: RequestRecord) -> None: ...


class NoObserver:
    """Watches nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        pass

    def request_finished(self, record: RequestRecord) -> None:
        pass
