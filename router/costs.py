"""Owns what a round costs: times of verification, drafting and transport, fitted online from what peers report."""

from __future__ import annotations

from dataclasses import dataclass

from engine.pace import Pace
from engine.proposal import Verdict

_FORGET = 0.998  # a round; halves in 350
_TO_TARGET_S = 0.001  # from router to target, and a little to spare
_LEAST_AHEAD = 0.25  # of a verification
_WAIT_SHARE = 0.5  # of the overhead of a round; what waiting for the draft is assumed to add to it
_TICK = 1e-6  # seconds; nothing measures as free, so that speeds stay finite


class MovingAverage:
    """Exponentially weighted mean of seconds; the first sample replaces the default."""

    def __init__(self, default: float, weight: float = 0.1) -> None:
        self.value, self._weight, self.known = default, weight, False

    def add(self, sample: float) -> None:
        self.value = self.value + self._weight * (sample - self.value) if self.known else sample
        self.known = True


class Allowance:
    """What to allow for something that varies, in seconds: its moving mean, and three times its deviation.

    What comes late is of no use at all, so it is better to allow too much.
    """

    def __init__(self, weight: float = 0.02) -> None:
        self._mean, self._deviation, self._least_weight, self._count = 0.0, 0.0, weight, 0

    @property
    def known(self) -> bool:
        return self._count > 0

    def add(self, sample: float) -> None:
        """The first samples count alike, so that none of them stays for long."""
        distance = abs(sample - self._mean) if self.known else 0.0
        self._count += 1
        weight = max(self._least_weight, 1.0 / self._count)
        self._deviation += weight * (distance - self._deviation)
        self._mean += weight * (sample - self._mean)

    @property
    def value(self) -> float:
        return self._mean + 3.0 * self._deviation


@dataclass(frozen=True, slots=True)
class CostDefaults:
    """Seconds assumed before anything was measured; until then only their proportions matter.

    Attributes:
        verify_s: of a forward of the target, whatever its rows.
        draft_token_s: of each token that the draft proposes.
        overhead_s: beside its verification, of a round; if it waits for the draft, half as much again.
    """

    verify_s: float = 0.040
    draft_token_s: float = 0.003
    overhead_s: float = 0.002

    @property
    def draft_wait_s(self) -> float:
        """Of a round that waits for the draft, what is neither the device's time nor `overhead_s`."""
        return self.overhead_s * _WAIT_SHARE

    @classmethod
    def measured(cls, verify_s: float, draft_token_s: float, waiting_s: float) -> CostDefaults:
        """Those with which a round that waits for the draft takes as long as it was seen to.

        Args:
            waiting_s: of such a round, what is neither verifying nor drafting.
        """
        return cls(max(verify_s, _TICK), max(draft_token_s, _TICK), max(waiting_s / (1.0 + _WAIT_SHARE), _TICK))


class CostModel:
    """Times of one target and one draft, shared by all sessions that use them.

    A forward takes what its rows take: those of the session that asks and those of the others in the batch.

    Args:
        defaults: assumed at first.
        batch_weight: 0: each session counts with what the others do now, and takes the most for itself. 1: it counts
            with all of them doing what it does, which is best for the tokens/s of all together.
    """

    def __init__(self, defaults: CostDefaults = CostDefaults(), batch_weight: float = 1.0) -> None:
        self._defaults, self._batch_weight = defaults, batch_weight
        self._verify = Pace()
        self._own_rows, self._other_rows = MovingAverage(1.0), MovingAverage(0.0)
        self._overhead = MovingAverage(defaults.overhead_s)
        self._queue = MovingAverage(0.0)
        self._gap = MovingAverage(0.0)
        self._draft_token = MovingAverage(defaults.draft_token_s)
        self._draft_wait = MovingAverage(defaults.draft_wait_s)
        self._ahead_reserves = {False: Allowance(), True: Allowance()}  # by whether the draft was asked for a proposal
        self._hits = MovingAverage(0.0, weight=0.05)

    def saw_forward(self, verdict: Verdict) -> None:
        """One forward, of a round or of plain decoding."""
        own = 1 + verdict.num_proposed
        self._verify.saw(verdict.rows, max(verdict.forward_time_s, _TICK))
        self._own_rows.add(float(own))
        self._other_rows.add(float(max(verdict.rows - own, 0)))

    def saw_round(self, verdict: Verdict, round_s: float, draft_wait_s: float) -> None:
        """One round that was asked for: its wall time, and how much of that was spent waiting for the draft."""
        self.saw_forward(verdict)
        self._overhead.add(max(0.0, round_s - verdict.forward_time_s - verdict.queue_time_s - draft_wait_s))
        self._queue.add(verdict.queue_time_s)

    def saw_early(self, verdict: Verdict, round_s: float) -> None:
        """One round whose proposal the target had before the one before it was over."""
        self.saw_forward(verdict)
        self._gap.add(max(0.0, round_s - verdict.forward_time_s))

    def saw_ahead(self, is_hit: bool) -> None:
        """One round behind which the draft ran ahead: whether the next proposal was at the target when it was over."""
        self._hits.add(float(is_hit))

    def saw_ahead_reserve(self, reserve_s: float, *, is_asked: bool) -> None:
        """What would have had to be left of a round's expected time for its early proposals to come in time.

        Args:
            is_asked: the draft was asked for the proposal of that round, and went on when it had made it; otherwise it
                had to be told first that the round has begun.
        """
        self._ahead_reserves[is_asked].add(max(reserve_s, 0.0))

    def saw_draft(self, num_tokens: int, draft_s: float, wait_s: float) -> None:
        """One proposal: device time for its tokens, and how long the round waited for it in all."""
        if num_tokens and draft_s > 0.0:
            self._draft_token.add(draft_s / num_tokens)
        self._draft_wait.add(max(0.0, wait_s - draft_s))

    def pass_over_draft(self) -> None:
        """The draft could have been asked this round and was not: what is known of its times slowly loses its weight.

        A draft that was slow once (cold after a restart, say) would otherwise never be measured again.
        """
        self._draft_token.value *= _FORGET
        self._draft_wait.value *= _FORGET

    def next_forward_s(self, num_proposed: int) -> float:
        """What the next forward will take: `num_proposed` + 1 positions beside those the others have had of late."""
        return self._verify.seconds(1.0 + num_proposed + self._other_rows.value) or self._defaults.verify_s

    def verify_s(self, num_proposed: int) -> float:
        """Forward over `num_proposed` + 1 positions, as it counts for whoever decides: see `batch_weight`."""
        return self.verify_times(num_proposed, num_proposed)[0]

    def verify_times(self, least: int, most: int) -> list[float]:
        """The same for every number of proposed tokens from `least` to `most`."""
        others, weight = self._other_rows.value, self._batch_weight
        each = 1.0 + others * weight / self._own_rows.value  # rows that a position brings, the others' included
        besides = others * (1.0 - weight)
        times = [self._verify.seconds(each * own + besides) for own in range(least + 1, most + 2)]
        return times if self._own_rows.known else [self._defaults.verify_s] * len(times)

    def verify_alone_s(self, num_proposed: int) -> float:
        """The same without others in the batch."""
        return self._verify.seconds(1.0 + num_proposed) or self._defaults.verify_s

    @property
    def plain_s(self) -> float:
        """A token of plain decoding without a round trip."""
        return self.verify_s(0)

    @property
    def knows_draft(self) -> bool:
        """Whether the draft has been timed; before, what it costs is only assumed."""
        return self._draft_token.known

    @property
    def draft_token_s(self) -> float:
        return self._draft_token.value

    @property
    def hit_rate(self) -> float:
        """Share of rounds that need not wait for the draft."""
        return self._hits.value

    @property
    def asked_s(self) -> float:
        """Beside its verification, of a round that is asked for: it may come amid a forward for others."""
        return self._overhead.value + self._queue.value

    @property
    def gap_s(self) -> float:
        """Beside its verification, of a round whose proposal was made ahead."""
        return self._gap.value

    def drafting_s(self, num_drafted: float) -> float:
        """Waiting for the draft model, which ends chains it does not believe in after `num_drafted` tokens."""
        return self._draft_wait.value + num_drafted * self._draft_token.value

    def round_s(self, num_proposed: int) -> float:
        """A round whose proposal costs nothing to make."""
        return self.verify_s(num_proposed) + self.asked_s

    def drafted_round_s(self, num_proposed: int, num_drafted: float) -> float:
        """A round that waits for the draft model."""
        return self.round_s(num_proposed) + self.drafting_s(num_drafted)

    def early_round_s(self, num_proposed: int) -> float:
        """A round whose proposal was made ahead."""
        return self.verify_s(num_proposed) + self.gap_s

    def ahead_s(self, num_proposed: int, *, is_asked: bool) -> float:
        """What a draft that runs ahead has for it: the verification, less the way to it and to the target.

        Never next to nothing: what is not tried is not measured.
        """
        own, other = self._ahead_reserves[is_asked], self._ahead_reserves[not is_asked]
        reserve = own if own.known else other if other.known else self._draft_wait
        forward_s = self.next_forward_s(num_proposed)
        return max(forward_s - reserve.value - _TO_TARGET_S, _LEAST_AHEAD * forward_s)
