"""Owns running ahead of one proposal: which of its outcomes are drafted on from, and how far. Torch-free, pure but for
the Lookahead itself.

While the target verifies a proposal, the *trunk*, the draft goes on behind the outcomes that are likeliest: so many
of its tokens accepted, then another token ("Speculative Speculative Decoding", ICLR 2026, calls this an outcome cache).
All that is drafted is one tree over the committed tokens: the trunk first, then the branches' tokens in the order they
are computed, each in the slot after the one before. So the branches share the committed KV without a copy, one forward
takes all of them a token further, and the one whose outcome comes true is moved into its place.

Once they are sent the draft goes on with them until it hears which outcome it was: what has then been drafted behind
the tokens that were sent is the first branch of the next round, which counts where that word has far to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from engine.proposal import Branch, EarlyProposals, Proposal, RunAhead, SparseProbs, State, chain_parents


@dataclass(frozen=True, slots=True)
class Choice:
    """One token as a draft chose it.

    Attributes:
        token: the choice.
        prob: its probability under the draft.
        candidates: the likeliest tokens and their probabilities, in the order in which the target may choose them.
        sparse: what it was drawn from; None where it was not drawn.
    """

    token: int
    prob: float
    candidates: tuple[tuple[int, float], ...]
    sparse: SparseProbs | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_accepted` of a trunk's tokens, then `token`; None where the draft has not looked at that position yet."""

    weight: float
    num_accepted: int
    token: int | None


def outcomes(trunk: Sequence[Choice], acceptance: float | None, following: Choice | None = None) -> list[Outcome]:
    """What may come of verifying `trunk`, the likeliest first.

    Args:
        trunk: its tokens as they were chosen.
        acceptance: chance that a token is accepted if the one before it was; None takes the draft's probability of it,
            which is right where the target's choice does not depend on the proposal.
        following: what the draft would choose behind all of it, if it has looked.
    """
    found: list[Outcome] = []
    reached = 1.0
    for index, choice in enumerate(trunk):
        accepted = choice.prob if acceptance is None else acceptance
        rivals = [(token, prob) for token, prob in choice.candidates if token != choice.token]
        rest = max(1.0 - choice.prob, sum(prob for _, prob in rivals), 1e-9)
        found += [Outcome(reached * (1.0 - accepted) * prob / rest, index, token) for token, prob in rivals]
        reached *= accepted
    if following is None:
        found += _bonus_outcomes(reached, len(trunk), trunk[-1].candidates)
    else:
        found += [Outcome(reached * prob, len(trunk), token) for token, prob in following.candidates]
    return sorted(found, key=lambda outcome: -outcome.weight)


def _bonus_outcomes(reached: float, length: int, like: Sequence[tuple[int, float]]) -> Iterator[Outcome]:
    """Placeholders for what follows the whole trunk: its candidates are assumed to be about as sure as those before."""
    yield from (Outcome(reached * prob, length, None) for _, prob in like)


def how_many(found: Sequence[Outcome], plan: RunAhead, rows_for: Callable[[float], float]) -> int:
    """How many outcomes to draft on from, so that drafting the more of them does not leave them too short.

    Args:
        found: the outcomes, the likeliest first.
        plan: how far to go.
        rows_for: rows that a forward may have if so many of them are to fit into the time.
    """
    chances = list(accumulate(outcome.weight for outcome in found))
    # What follows the whole trunk is not known before one forward; the branches behind it are a token shorter.
    lag = sum(outcome.weight for outcome in found if outcome.token is None) / max(chances[-1], 1e-9)
    best, width = 0.0, 1
    expected, reached = 1.0, 1.0
    for depth in range(1, plan.num_speculative_tokens + 1):
        reached *= plan.acceptance
        expected += reached
        num_rows = int(min(rows_for(depth + lag), len(found)))
        if num_rows < 1:
            break
        value = 1.0 + chances[num_rows - 1] * (expected - 1.0)
        if value > best:
            best, width = value, num_rows
    return width


@dataclass(slots=True)
class DraftedBranch:
    """An outcome under way.

    Attributes:
        nodes: places in the tree of `token` and of the drafted tokens that have been computed.
        drafted: what was chosen behind `token`.
    """

    num_accepted: int
    token: int
    nodes: list[int] = field(default_factory=list)
    drafted: list[Choice] = field(default_factory=list)

    @property
    def next_token(self) -> int:
        """The token to be computed next."""
        return self.drafted[-1].token if self.drafted else self.token

    @property
    def waits(self) -> bool:
        """Whether its latest token has not been computed."""
        return len(self.nodes) == len(self.drafted)


class Lookahead:
    """The branches of one trunk.

    Args:
        state: the committed state that the trunk continues.
        trunk: what is being verified.
        num_computed: of the trunk's tokens, those whose KV is there.
        chosen: the outcomes to draft on from, the likeliest first.
        plan: how far to go.
        since: when the times of that began to count, in seconds of the engine's clock.

    Attributes:
        deadline: when the branches have to be sent.
        num_done: tokens of the tree that are computed.
        sent: the branches have been sent, as far as they were.
        seconds: device time spent on the branches.
    """

    def __init__(
        self,
        state: State,
        trunk: Sequence[Choice],
        num_computed: int,
        chosen: Sequence[Outcome],
        plan: RunAhead,
        since: float,
    ) -> None:
        self.state, self.trunk, self.num_done = state, tuple(trunk), num_computed
        self.deadline, self._over_at = since + plan.budget_s, since + plan.round_s
        self._max_tokens = self._longest = plan.num_speculative_tokens
        self._tokens = [choice.token for choice in trunk]
        self._parents = list(chain_parents(len(trunk)))
        self._num_bonus = sum(1 for outcome in chosen if outcome.token is None)
        self._branches = [DraftedBranch(o.num_accepted, o.token) for o in chosen if o.token is not None]
        self._growing: list[DraftedBranch] = []  # whose tokens are the last of the tree
        self.sent, self.seconds = False, 0.0

    def take_over(self, grown: Sequence[Choice]) -> None:
        """Begins with a branch behind the whole trunk that is there from the round before, computed but for its last.

        Args:
            grown: the token that follows the trunk, and what was drafted behind it.
        """
        end, first = len(self.trunk), grown[0].token
        others = [each for each in self._branches if (each.num_accepted, each.token) != (end, first)]
        nodes = list(range(end, end + len(grown) - 1))
        self._branches = [DraftedBranch(end, first, nodes, list(grown[1:])), *others]
        self._tokens += [choice.token for choice in grown[:-1]]
        self._parents += [node - 1 for node in nodes]

    def tree(self) -> Proposal:
        """All that is drafted and what is to be computed next, over `state`; what follows `num_done` is new."""
        if not self._growing:
            self._grow()
        return Proposal(self.state, tuple(self._tokens), tuple(self._parents))

    def _grow(self) -> None:
        self._growing = [each for each in self._branches if each.waits and len(each.drafted) < self._longest]
        for branch in self._growing:
            self._parents.append(branch.nodes[-1] if branch.nodes else branch.num_accepted - 1)
            self._tokens.append(branch.next_token)

    def computed(self, choices: Sequence[Choice], seconds: float) -> None:
        """Takes what the draft chose behind each token of the tree from `num_done` on."""
        first = len(self._tokens) - len(self._growing)
        for node, choice in enumerate(choices, start=self.num_done):
            if node >= first:
                branch = self._growing[node - first]
                branch.nodes.append(node)
                branch.drafted.append(choice)
            elif node == len(self.trunk) - 1:
                self._add_bonus(choice)
        self.num_done, self._growing = len(self._tokens), []
        self.seconds += seconds

    def _add_bonus(self, choice: Choice) -> None:
        following = [DraftedBranch(len(self.trunk), token) for token, _ in choice.candidates[: self._num_bonus]]
        self._branches += following

    @property
    def width(self) -> int:
        """Branches, those to come included."""
        return len(self._branches) or self._num_bonus

    @property
    def is_complete(self) -> bool:
        """Whether every branch is as long as it may be."""
        may_follow = self.num_done < len(self.trunk) and self._longest > 0  # the trunk's end has not been looked at
        return not may_follow and all(len(each.drafted) >= self._longest for each in self._branches)

    def stop_growing(self) -> None:
        """The branches stay as long as they are."""
        self._longest = 0

    def keep_free(self, next_done: float) -> None:
        """Stops growing what was sent if word of the round may come before one forward more is over."""
        if self.sent and next_done > self._over_at:
            self.stop_growing()

    def send(self, drafter: str) -> EarlyProposals | None:
        """The branches as they are; None when nothing is drafted yet. They may grow by as many tokens after that."""
        self.sent, self._longest = True, 2 * self._max_tokens
        branches = tuple(
            Branch(
                each.num_accepted,
                each.token,
                tuple(choice.token for choice in each.drafted[: self._max_tokens]),
                draft_probs_of(each.drafted[: self._max_tokens]),
            )
            for each in self._branches
            if each.drafted
        )
        if not branches:
            return None
        trunk = self.state.extend([choice.token for choice in self.trunk])
        return EarlyProposals(self.state, trunk, branches, drafter, self.seconds)

    def come_true(self, new: Sequence[int]) -> DraftedBranch | None:
        """The branch whose outcome is that `new` was committed behind `state`."""
        if not new or list(new[:-1]) != [choice.token for choice in self.trunk[: len(new) - 1]]:
            return None
        outcome = (len(new) - 1, new[-1])
        found = (each for each in self._branches if (each.num_accepted, each.token) == outcome)
        return next(found, None)


def draft_probs_of(choices: Sequence[Choice]) -> tuple[SparseProbs, ...] | None:
    """What the tokens were drawn from; None where they were not drawn."""
    sparse = tuple(choice.sparse for choice in choices if choice.sparse is not None)
    return sparse or None
