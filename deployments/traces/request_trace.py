"""Owns what is known of one traced request, as values: its rounds, what happened between them, what devices did."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

TARGET_LOST = "outrider.target_lost"
SPECULATION = "outrider.speculation"


@dataclass(frozen=True, slots=True)
class Round:
    """One round as the router saw it, or one stretch of plain decoding, in which the target runs on by itself.

    Attributes:
        number: from 1.
        start_ms: since the request began.
        drafter: asked for, "" for none; `num_speculative_tokens` is the K planned for it.
        num_proposed: draft tokens judged, which may be fewer than K.
        num_tokens: committed.
        reason: why speculation was off.
        dropped: why a proposal was not judged.
        is_early: the target began it by itself, with a proposal it had been sent before.
        is_stretch: the target ran on by itself; the numbers are those of all its tokens together.
        is_lost: the target was lost, and with it what it owed of this round.
        forward_ms, queue_ms: in the target's forward; waiting for it, in the target.
        draft_wait_ms: the router waited for the draft; `draft_ms` of device time went into the proposal.
        num_wasted: draft tokens drafted ahead that it made useless.
    """

    number: int
    start_ms: float
    duration_ms: float
    drafter: str = ""
    num_speculative_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    reason: str = ""
    dropped: str = ""
    is_early: bool = False
    is_stretch: bool = False
    is_lost: bool = False
    forward_ms: float = 0.0
    queue_ms: float = 0.0
    draft_wait_ms: float = 0.0
    draft_ms: float = 0.0
    num_wasted: int = 0

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.duration_ms

    @property
    def is_plain(self) -> bool:
        """Whether it was planned without draft tokens; an early one may have none, and is speculation all the same."""
        return self.is_stretch or not (self.drafter or self.is_early)

    @property
    def num_rejected(self) -> int:
        """Draft tokens that both sides rolled back."""
        return self.num_proposed - self.num_accepted

    @property
    def num_forwards(self) -> int:
        """Forwards it stands for in a reply's `rounds`."""
        return self.num_tokens if self.is_stretch else int(not self.is_lost)


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of the request: a target was lost, or speculation went on or off; `what` says it in words."""

    at_ms: float
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Work:
    """A span of draft or target, on its own clock.

    Attributes:
        who: "draft", "target", or "follower" for the ranks of the target behind the first.
        kind: "draft", "draft_ahead", "verify", "decode", "follow" for one forward of a follower, or "prefill" for the
            verdict that opens a session.
        rank: of a follower.
        is_early: nobody had asked for it.
        num_branches: outcomes drafted for.
        is_superseded: it came to nothing.
    """

    who: str
    kind: str
    start_ms: float
    duration_ms: float
    rank: int = 0
    is_early: bool = False
    num_branches: int = 0
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request.

    Attributes:
        outcome: finish reason, "cancelled", or the class of the error.
        began: on the router's clock.
        ttft_ms: to the first token; None if it got none, or did not end well.
        prompt_tokens, completion_tokens: as in the reply; None if it did not end well.
    """

    trace_id: str
    span_id: str
    request_id: str
    outcome: str
    began: datetime
    duration_ms: float
    ttft_ms: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    rounds: tuple[Round, ...]
    happenings: tuple[Happening, ...]
    work: tuple[Work, ...]
    services: tuple[str, ...]

    @property
    def ended_well(self) -> bool:
        return self.completion_tokens is not None

    @property
    def num_rounds(self) -> int:
        return sum(each.num_forwards for each in self.rounds)

    @property
    def draft_tokens(self) -> int:
        return sum(each.num_proposed for each in self.rounds)

    @property
    def accepted_tokens(self) -> int:
        return sum(each.num_accepted for each in self.rounds)

    @property
    def failovers(self) -> int:
        return sum(each.name == TARGET_LOST for each in self.happenings)
