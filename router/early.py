"""Owns the book of one session's early proposals: which of them the target holds, and which came true. Pure.

A target that holds the early proposal for what comes of a round verifies it in its very next step and is not asked. So
router and target must agree on which one that is; both go by the same rule (engine.verifying), and messages arrive in
the order they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.proposal import EarlyProposals, Proposal, State, Verdict


@dataclass(frozen=True, slots=True)
class _Round:
    """A round under way: what is verified, and the state if all of that is accepted."""

    base: State
    trunk: State


class EarlyBook:
    """What may come of the round under way, as far as the target knows proposals for it.

    Attributes:
        num_wasted: draft tokens that came early and were for nothing.
    """

    def __init__(self) -> None:
        self._now: _Round | None = None
        self._held: EarlyProposals | None = None
        self.num_wasted = 0

    def begin(self, proposal: Proposal) -> None:
        """A round has begun whose proposal a draft may have drafted on from."""
        self._now = _Round(proposal.base, proposal.base.extend(proposal.tokens))

    def forget(self) -> None:
        """Nothing that was drafted ahead is of use any more: another target, or a round without the draft."""
        self._waste(self._held)
        self._now = self._held = None

    def takes(self, early: EarlyProposals) -> bool:
        """Whether the target is to have them: they are the first for what may come of the round under way.

        It may have gone on with one of the first when others reach it, and then only it would know which.
        """
        now = self._now
        if now is None or self._held is not None or (early.after, early.trunk) != (now.base, now.trunk):
            self._waste(early)
            return False
        self._held = early
        return True

    def end(self, verdict: Verdict, state: State) -> Proposal | None:
        """The round is over and has led to `state`; what the target verifies next, unless it waits for a proposal.

        An empty proposal means that no branch was for this outcome, and a plain round is under way.
        """
        now, held = self._now, self._held
        self._now = self._held = None
        self._waste(held)
        if now is None or now.base != verdict.base or held is None or verdict.finish_reason is not None:
            return None
        branch = held.find(verdict.num_accepted, verdict.tokens[-1])
        if branch is None:
            return Proposal(state) if held.plain_otherwise else None
        self.num_wasted -= len(branch.tokens)
        return held.proposal(branch, state)

    def _waste(self, early: EarlyProposals | None) -> None:
        self.num_wasted += early.num_tokens if early is not None else 0
