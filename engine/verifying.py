"""Owns what a target knows of one open sequence, above all which proposal its next round judges.

A round that ends leads to a new state. If a proposal for that was made while the round was under way, it is there
already and is judged in the very next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.proposal import EarlyProposals, FinishReason, Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Held:
    """A proposal for the present state; `dropped` says why it will not be judged after all."""

    proposal: Proposal
    arrived: float
    dropped: str = ""


Hold = Callable[[Proposal], Held]
"""Looks over a proposal that has come."""


@dataclass(frozen=True, slots=True)
class _Passed:
    """The round that led to the present state: the trunk that was verified, and its outcome."""

    base: State
    trunk: State
    num_accepted: int
    token: int


@dataclass(slots=True)
class TargetSession:
    """One open sequence.

    Attributes:
        state: identity of the committed tokens, which are sequence.tokens.
        allowance: rounds without a proposal that it may run by itself; opening grants the first.
        held: the proposal for `state`, if it is here.
        early: proposals for states that may follow `state`.
        passed: the round before, so that early proposals that come too late for it can still be met.
    """

    sequence: Sequence
    sampling: SamplingParams
    stops: StopParams
    ending_ids: frozenset[int]
    state: State
    allowance: int = 1
    held: Held | None = None
    early: EarlyProposals | None = None
    passed: _Passed | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_prompt

    @property
    def room(self) -> int:
        return self.stops.max_tokens - self.num_generated

    @property
    def wants_forward(self) -> bool:
        return self.finish_reason is None and (self.allowance > 0 or self.held is not None)

    @property
    def proposal(self) -> Proposal | None:
        """What is to be judged now."""
        return None if self.held is None or self.held.dropped else self.held.proposal.limited(self.room - 1)

    def propose(self, held: Held) -> bool:
        """Takes a proposal for the present state, in place of others and of plain decoding; False if for another."""
        if held.proposal.base != self.state:
            return False
        self.held, self.early, self.allowance = held, None, 0
        return True

    def propose_early(self, early: EarlyProposals, hold: Hold) -> bool:
        """Takes proposals for what follows the present state, or has led to it; False when they are for neither."""
        if early.after == self.state:
            self.early = early
            return True
        if self.passed is None or early.after != self.passed.base or self.held is not None:
            return False
        self.held = self._come_true(early, self.passed, hold)
        return True

    def pass_on(self, base: State, num_accepted: int, token: int, hold: Hold) -> None:
        """The round from `base` is over, and `state` the one it has led to: the early proposal for that is next."""
        trunk = base.extend(self.held.proposal.tokens) if self.held is not None else base
        self.passed = _Passed(base, trunk, num_accepted, token)
        early, self.early = self.early, None
        self.held = self._come_true(early, self.passed, hold) if early is not None else None

    def _come_true(self, early: EarlyProposals, passed: _Passed, hold: Hold) -> Held | None:
        if self.finish_reason is not None:
            return None
        branch = early.find(passed.num_accepted, passed.token)
        if branch is None:
            return hold(Proposal(self.state)) if early.plain_otherwise else None
        held = hold(early.proposal(branch, self.state))
        if early.trunk != passed.trunk:  # never judged, but whoever sent it counts on a round
            return Held(held.proposal, held.arrived, "it continues another proposal")
        return held
