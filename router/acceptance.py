"""Owns what is known about acceptance: decayed estimates by drafter and position, and a session's exact totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from types import MappingProxyType

from router.ngram import NgramMatch

DRAFT_MODEL = "draft_model"
NGRAM = "ngram"
DRAFTED = "draft_model.drafted"  # not acceptance, but whether the draft went on to that position at all

# Conditional acceptance by position, before anything was seen; the last one holds for all further positions.
PRIORS: Mapping[str, tuple[float, ...]] = {
    DRAFT_MODEL: (0.50, 0.48, 0.46),
    DRAFTED: (1.0, 0.9),
    "ngram.weak": (0.22, 0.50, 0.65, 0.75),
    "ngram.fair": (0.55, 0.60, 0.70, 0.80),
    "ngram.good": (0.70, 0.80, 0.85),
    "ngram.copy": (0.90, 0.92, 0.94),
}
_UNKNOWN_PRIOR = (0.3,)
_CHANGE_WEIGHT = 1.0  # tokens that speak against any change
_MOST_ACCEPTANCE = 0.99
_LEAST_CHANCE = 7e-4  # of a run of rounds in which nothing was accepted; one less likely says that the text has changed


def ngram_arm(match: NgramMatch) -> str:
    """The class of a match whose members are trusted alike: by its length, and for one token by how often it agreed."""
    if match.match_length >= 4:
        return "ngram.copy"
    if match.match_length == 3:
        return "ngram.good"
    agreed = match.num_places > 1 and match.agreement > 0.6
    return "ngram.fair" if match.match_length == 2 or agreed else "ngram.weak"


class PositionEstimate:
    """P(draft token i is there and accepted | all before it were), i from 0, for one kind of proposal.

    Old evidence fades by `decay` per observation, and by `forget` per round in which the kind was passed over, so that
    one bad stretch is not held against a drafter for ever.
    """

    def __init__(self, prior: PositionEstimate | tuple[float, ...], *, decay: float, prior_weight: float) -> None:
        self._prior, self._decay, self._prior_weight = prior, decay, prior_weight
        self._trials: list[float] = []
        self._successes: list[float] = []

    def observe(self, num_asked: int, num_accepted: int) -> None:
        """One judged proposal: `num_asked` tokens were wanted of the drafter, `num_accepted` came and were right."""
        tried = min(num_asked, num_accepted + 1)
        missing = [0.0] * (tried - len(self._trials))
        self._trials += missing
        self._successes += missing
        self.forget(self._decay)
        for index in range(tried):
            self._trials[index] += 1.0
        for index in range(min(tried, num_accepted)):
            self._successes[index] += 1.0

    def forget(self, factor: float) -> None:
        self._trials = [value * factor for value in self._trials]
        self._successes = [value * factor for value in self._successes]

    def conditional(self, index: int) -> float:
        return self.conditionals(index + 1)[index]

    def conditionals(self, limit: int) -> list[float]:
        """For the first `limit` positions."""
        weight, priors = self._prior_weight, self._priors(limit)
        seen = zip(self._successes, self._trials, priors, strict=False)
        known = [(successes + weight * prior) / (trials + weight) for successes, trials, prior in seen]
        return known + priors[len(known) :]

    def expected_lengths(self, limit: int) -> list[float]:
        """For each K from 1 to `limit`: how many of K positions in a row hold on average."""
        return list(accumulate(accumulate(self.conditionals(limit), mul)))

    def _priors(self, limit: int) -> list[float]:
        prior = self._prior
        if isinstance(prior, PositionEstimate):
            return prior.conditionals(limit)
        return [*prior[:limit], *prior[-1:] * (limit - len(prior))]


class ChangingEstimate(PositionEstimate):
    """A session's estimate. Text changes its nature at any point, for all positions alike, and few rounds must do to
    see that: what is known by position is scaled by the tokens accepted of late, over those that were to be expected.
    Where nothing is accepted any more, a round tells of one position only; that it would take too long is what
    `_LEAST_CHANCE` is for.
    """

    def __init__(self, prior: PositionEstimate, *, decay: float, prior_weight: float, change_decay: float) -> None:
        super().__init__(prior, decay=decay, prior_weight=prior_weight)
        self._change_decay = change_decay
        self._accepted = self._expected = 0.0
        self._chance = 1.0  # of the rounds since one had a token accepted

    def observe(self, num_asked: int, num_accepted: int) -> None:
        tried = min(num_asked, num_accepted + 1)
        self._chance = 1.0 if num_accepted or not tried else self._chance * (1.0 - super().conditional(0))
        if self._chance < _LEAST_CHANCE:
            self._accepted, self._chance = 0.0, 1.0
        self._accepted = self._accepted * self._change_decay + min(num_accepted, num_asked)
        self._expected = self._expected * self._change_decay + sum(super().conditionals(tried))
        super().observe(num_asked, num_accepted)

    def conditionals(self, limit: int) -> list[float]:
        change = (self._accepted + _CHANGE_WEIGHT) / (self._expected + _CHANGE_WEIGHT)
        return [min(value * change, _MOST_ACCEPTANCE) for value in super().conditionals(limit)]


class AcceptancePriors:
    """What all sessions of a router have seen, by class of request and arm; a new session starts from it.

    Args:
        workloads: for each class of request the draft model's conditional acceptance by position, as it is expected
            before any request of that class was seen.
    """

    def __init__(self, workloads: Mapping[str, tuple[float, ...]] = MappingProxyType({}), decay: float = 0.998) -> None:
        self._workloads, self._decay = workloads, decay
        self._arms: dict[tuple[str, str], PositionEstimate] = {}

    def arm(self, name: str, workload: str = "") -> PositionEstimate:
        """What requests of a class have seen, over what is expected of it or else what all requests have seen."""
        if (workload, name) not in self._arms:
            prior = self._prior(name, workload)
            self._arms[workload, name] = PositionEstimate(prior, decay=self._decay, prior_weight=8.0)
        return self._arms[workload, name]

    def _prior(self, name: str, workload: str) -> PositionEstimate | tuple[float, ...]:
        if not workload:
            return PRIORS.get(name, _UNKNOWN_PRIOR)
        expected = self._workloads.get(workload) if name == DRAFT_MODEL else None
        return self.arm(name) if expected is None else expected


class SessionAcceptance:
    """One session's estimates, by arm ("draft_model", "ngram.copy", …), on top of the shared priors.

    Args:
        workload: the class of the request; "" if it named none. What it sees counts for all requests too.
    """

    def __init__(
        self,
        priors: AcceptancePriors,
        workload: str = "",
        *,
        decay: float = 0.97,
        change_decay: float = 0.77,
        forget: float = 0.99,
    ) -> None:
        self._priors, self._workload, self._forget = priors, workload, forget
        self._decay, self._change_decay = decay, change_decay
        self._arms: dict[str, PositionEstimate] = {}

    def arm(self, name: str) -> PositionEstimate:
        if name not in self._arms:
            prior = self._priors.arm(name, self._workload)
            self._arms[name] = ChangingEstimate(
                prior, decay=self._decay, prior_weight=4.0, change_decay=self._change_decay
            )
        return self._arms[name]

    def observe(self, name: str, num_asked: int, num_accepted: int) -> None:
        for estimate in (self.arm(name), *self._shared(name)):
            estimate.observe(num_asked, num_accepted)

    def pass_over(self, name: str) -> None:
        """The arm could have proposed this round and was not asked."""
        self.arm(name).forget(self._forget)
        for estimate in self._shared(name):
            estimate.forget(0.5 + 0.5 * self._forget)

    def _shared(self, name: str) -> list[PositionEstimate]:
        return [self._priors.arm(name, workload) for workload in {"", self._workload}]


@dataclass(slots=True)
class DrafterTotals:
    """Rounds a drafter was judged in, tokens it drafted, tokens of those accepted."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class SpeculationTotals:
    """Exact counts of one request, as its final message reports them.

    Attributes:
        rounds: target forwards after the prompt.
        decoded_tokens: tokens these forwards committed.
        drafted_per_position: judged draft tokens by position in the chain.
        accepted_per_position: accepted ones.
        drafters: totals by drafter.
        rounds_ahead: rounds behind which a draft ran ahead.
        early_hits: those after which the target had the next proposal already.
        wasted_draft_tokens: drafted ahead, for outcomes that did not come true.
        dropped: proposals not judged, by why: "late", "stale", "malformed", or what the target said.
        switched_off_reason: why the latest round did not use what was asked for; "" when it did.
    """

    rounds: int = 0
    decoded_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterTotals] = field(default_factory=dict)
    rounds_ahead: int = 0
    early_hits: int = 0
    wasted_draft_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    switched_off_reason: str = ""

    def count_round(self, num_tokens: int) -> None:
        self.rounds += 1
        self.decoded_tokens += num_tokens

    def count_proposal(self, drafter: str, num_proposed: int, num_accepted: int) -> None:
        totals = self.drafters.setdefault(drafter, DrafterTotals())
        totals.rounds += 1
        totals.draft_tokens += num_proposed
        totals.accepted_tokens += num_accepted
        missing = num_proposed - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for index in range(num_proposed):
            self.drafted_per_position[index] += 1
            self.accepted_per_position[index] += int(index < num_accepted)

    def count_ahead(self, is_hit: bool) -> None:
        self.rounds_ahead += 1
        self.early_hits += int(is_hit)

    def count_dropped(self, why: str) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + 1

    @property
    def draft_tokens(self) -> int:
        return sum(totals.draft_tokens for totals in self.drafters.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(totals.accepted_tokens for totals in self.drafters.values())

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def early_hit_rate(self) -> float:
        """Of the rounds behind which a draft ran ahead; 0 when none did."""
        return self.early_hits / self.rounds_ahead if self.rounds_ahead else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the recovered or bonus token included; 0 before the first round."""
        return self.decoded_tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_num_speculative_tokens(self) -> float:
        """Draft tokens per round that had any."""
        rounds = sum(totals.rounds for totals in self.drafters.values())
        return self.draft_tokens / rounds if rounds else 0.0
