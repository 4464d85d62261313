"""Owns one session's running ahead: what the draft is told, what of its early proposals the target gets, and what is
learned from when they come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.proposal import EarlyProposals, Proposal, RunAhead, State, Verdict
from router.costs import CostModel
from router.early import EarlyBook


@dataclass(slots=True)
class _Told:
    """What a draft was told while a round was under way, and how long that and its answer took. Seconds.

    Attributes:
        is_asked: it was asked for the proposal that is verified.
        took_s: how long it took.
        answered_s: from when the draft was told until its early proposals came.
    """

    base: State
    run_ahead: RunAhead
    is_asked: bool
    at: float
    took_s: float | None = None
    answered_s: float | None = None

    @property
    def reserve_s(self) -> float | None:
        """What would have had to be left of the round's expected time for the early proposals to come in time."""
        if self.took_s is None or self.answered_s is None:
            return None
        return self.run_ahead.round_s - self.took_s + self.answered_s - self.run_ahead.budget_s


class RunningAhead:
    """Between the draft and the target of one session.

    Args:
        costs: of the router.
        clock: seconds, monotonic.
        propose_early: gives the target proposals for what may come of the round under way.
    """

    def __init__(
        self, costs: CostModel, clock: Callable[[], float], propose_early: Callable[[EarlyProposals], None]
    ) -> None:
        self._costs, self._clock, self._propose_early = costs, clock, propose_early
        self._book = EarlyBook()
        self._told: deque[_Told] = deque(maxlen=2)  # the round under way, and the one before
        self._plain_otherwise = False
        self._next: Proposal | None = None

    @property
    def num_wasted(self) -> int:
        """Draft tokens that came early and were for nothing."""
        return self._book.num_wasted

    @property
    def next_proposal(self) -> Proposal | None:
        """What the target verifies already, an empty proposal in a plain round; None while it waits for one."""
        return self._next

    def forget(self) -> None:
        """Another target, or none: what was drafted ahead is of no use."""
        self._book.forget()
        self._told.clear()
        self._next = None

    def begin(
        self, proposal: Proposal, run_ahead: RunAhead | None, *, is_asked: bool, plain_otherwise: bool
    ) -> RunAhead | None:
        """A round has begun that the draft may run ahead of; what it is to be told.

        Args:
            proposal: what is verified.
            run_ahead: how far to run.
            is_asked: the draft was asked for the proposal, and runs ahead of it already.
            plain_otherwise: what the target is to do where nothing was drafted for what comes of it.
        """
        self._next, self._plain_otherwise = None, plain_otherwise
        self._book.begin(proposal)
        if run_ahead is None:
            return None
        told = self.timed(run_ahead, len(proposal.tokens), is_asked=is_asked)
        self._told.append(_Told(proposal.base, told, is_asked, self._clock()))
        return told

    def timed(self, run_ahead: RunAhead, num_proposed: int, *, is_asked: bool) -> RunAhead:
        """How far, and how long, while so many draft tokens are verified."""
        return replace(
            run_ahead,
            budget_s=self._costs.ahead_s(num_proposed, is_asked=is_asked),
            round_s=self._costs.next_forward_s(num_proposed),
            num_proposed=num_proposed,
        )

    def arrived(self, early: EarlyProposals) -> None:
        """Proposals that the draft made ahead. Those that come too late it will make again, if it is asked."""
        shortest = min(len(branch.tokens) for branch in early.branches)
        for told in self._told:
            if told.base == early.after and shortest < told.run_ahead.num_speculative_tokens:
                told.answered_s = self._clock() - told.at
                self._learn(told)
        early = replace(early, plain_otherwise=self._plain_otherwise)
        if self._book.takes(early):
            self._propose_early(early)

    def end(self, verdict: Verdict, state: State) -> bool | None:
        """The round is over and has led to `state`.

        Returns:
            Whether the proposal for that was at the target in time; None where the draft did not run ahead.
        """
        self._next = self._book.end(verdict, state)
        is_hit = None
        for told in self._told:
            if told.base == verdict.base:
                told.took_s = self._clock() - told.at
                self._learn(told)
                is_hit = self._next is not None and bool(self._next.tokens)
        return is_hit

    def _learn(self, told: _Told) -> None:
        if told.reserve_s is not None:
            self._costs.saw_ahead_reserve(told.reserve_s, is_asked=told.is_asked)
