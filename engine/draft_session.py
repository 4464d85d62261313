"""Owns what a draft knows of one open sequence: what is committed, what is drafted, and how a commit changes both.

Committing is arithmetic on lengths: the KV of draft tokens that came true stays, the rest is rolled back. Only a branch
that was drafted ahead and has come true has KV in another place, a few slots, which the commit says where to copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from engine.ahead import Choice, DraftedBranch, Lookahead
from engine.blocks import BlockPool
from engine.proposal import RunAhead, State
from engine.sampling import SamplingParams
from engine.sequence import Sequence


@dataclass(slots=True)
class DraftSession:
    """One sequence being drafted.

    Attributes:
        sequence: committed tokens, then the draft tokens of the proposal in the making or just made.
        state: identity of the committed tokens.
        drafted: those draft tokens, as they were chosen.
        wanted: draft tokens the router asked for; 0 when nothing is owed.
        draft_time_s: device time of this proposal so far.
        run_ahead: how far to run ahead of it once it is made.
        ahead_since: when its times began to count, in seconds of the engine's clock.
        lookahead: the branches that were drafted behind it.
        looks_out: there is no proposal, and what may follow the last committed token has to be found out first.
    """

    sequence: Sequence
    sampling: SamplingParams
    state: State
    drafted: list[Choice] = field(default_factory=list)
    wanted: int = 0
    confidence_threshold: float = 0.0
    draft_time_s: float = 0.0
    run_ahead: RunAhead | None = None
    ahead_since: float = 0.0
    lookahead: Lookahead | None = None
    looks_out: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the proposal that is owed is made."""
        if not self.wanted or not self.drafted:
            return False
        return len(self.drafted) >= self.wanted or self.drafted[-1].prob < self.confidence_threshold

    @property
    def is_ahead(self) -> bool:
        """Whether there are branches that have to be sent."""
        return self.lookahead is not None and not self.lookahead.sent

    @property
    def is_grown(self) -> bool:
        """Whether the branches are as long as they may be: those behind the round before may be all that is wanted."""
        return self.lookahead is not None and self.lookahead.is_complete

    @property
    def goes_on(self) -> bool:
        """Whether there are branches that were sent and may still grow."""
        return self.lookahead is not None and self.lookahead.sent and not self.is_grown

    def set_apart(self, num_proposed: int) -> list[Choice]:
        """Takes off the draft tokens past those that are being verified. Their KV stays where it is, behind the rest.

        Returns:
            Those tokens; none where there is no such KV.
        """
        is_computed = self.sequence.num_computed == len(self.sequence.tokens) - 1
        grown = self.drafted[num_proposed:]
        del self.drafted[num_proposed:], self.sequence.tokens[self.state.length + num_proposed :]
        self.sequence.num_computed = min(self.sequence.num_computed, len(self.sequence.tokens))
        return grown if is_computed else []

    def shorten(self, num_drafted: int) -> None:
        """Drops the draft tokens past the first `num_drafted`."""
        del self.drafted[num_drafted:], self.sequence.tokens[self.state.length + num_drafted :]
        self.sequence.roll_back(len(self.sequence.tokens) - 1)

    def commit(self, state: State, new: list[int], pool: BlockPool) -> tuple[list[int], list[int]]:
        """Puts `new` in the place of the draft tokens, and behind it the branch that was drafted for this outcome.

        Returns:
            Slots whose KV is to be copied, and where to; before anything else is computed.
        """
        known = self.state.length
        branch = self.lookahead.come_true(new) if self.lookahead is not None else None
        agreeing = takewhile(lambda pair: pair[0].token == pair[1], zip(self.drafted, new, strict=False))
        num_kept = known + sum(1 for _ in agreeing)
        self.drafted = branch.drafted if branch is not None else []
        self.sequence.tokens[known:] = [*new, *(choice.token for choice in self.drafted)]
        self.sequence.roll_back(num_kept)
        moves: tuple[list[int], list[int]] = ([], [])
        if branch is not None and self.sequence.num_computed == num_kept:
            moves = self._move_up(branch, pool.block_size)
        self.state, self.draft_time_s, self.lookahead = state, 0.0, None
        return moves

    def _move_up(self, branch: DraftedBranch, block_size: int) -> tuple[list[int], list[int]]:
        """From a branch's places in the tree to where its tokens now stand."""
        begin = self.sequence.num_computed
        end = begin + len(branch.nodes)
        sources = self.sequence.slots([self.state.length + node for node in branch.nodes], block_size)
        self.sequence.num_computed = end
        return sources, self.sequence.slots(range(begin, end), block_size)
