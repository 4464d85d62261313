"""Owns what a round costs: times of verification, drafting and transport, fitted online from what peers report."""

from __future__ import annotations

from dataclasses import dataclass

_FORGET = 0.998  # a round; halves in 350
_TICK = 1e-6  # seconds; nothing measures as free, so that speeds stay finite


class MovingAverage:
    """Exponentially weighted mean of seconds; the first sample replaces the default."""

    def __init__(self, default: float, weight: float = 0.1) -> None:
        self.value, self._weight, self.known = default, weight, False

    def add(self, sample: float) -> None:
        sample = max(sample, _TICK)
        self.value = self.value + self._weight * (sample - self.value) if self.known else sample
        self.known = True


@dataclass(frozen=True, slots=True)
class CostDefaults:
    """Seconds assumed before anything was measured; only their proportions matter."""

    verify_s: float = 0.040
    draft_token_s: float = 0.003
    overhead_s: float = 0.002


class CostModel:
    """Times of one target and one draft, shared by all sessions that use them."""

    def __init__(self, defaults: CostDefaults = CostDefaults()) -> None:
        self._defaults = defaults
        self._verify: dict[int, MovingAverage] = {}
        self._plain = MovingAverage(defaults.verify_s)
        self._overhead = MovingAverage(defaults.overhead_s)
        self._draft_token = MovingAverage(defaults.draft_token_s)
        self._draft_wait = MovingAverage(defaults.overhead_s / 2)

    def saw_verify(self, num_proposed: int, forward_s: float, round_s: float, draft_wait_s: float) -> None:
        """One round: its forward, its wall time, and how much of that was spent waiting for the draft."""
        self._verify.setdefault(num_proposed, MovingAverage(self._defaults.verify_s)).add(forward_s)
        self._overhead.add(max(0.0, round_s - forward_s - draft_wait_s))

    def saw_plain(self, interval_s: float) -> None:
        """One token of the target running by itself: the time since its token before."""
        self._plain.add(interval_s)

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

    def verify_s(self, num_proposed: int) -> float:
        """Forward over `num_proposed` + 1 positions; of the nearest known size when that size was never seen."""
        if not self._verify:
            return self._plain.value
        nearest = min(self._verify, key=lambda known: (abs(known - num_proposed), known))
        return self._verify[nearest].value

    @property
    def plain_s(self) -> float:
        """A token of plain decoding without a round trip."""
        return self._plain.value if self._plain.known else self.verify_s(0)

    @property
    def draft_token_s(self) -> float:
        return self._draft_token.value

    def round_s(self, num_proposed: int) -> float:
        """A round whose proposal costs nothing to make."""
        return self.verify_s(num_proposed) + self._overhead.value

    def drafted_round_s(self, num_proposed: int, num_drafted: float) -> float:
        """A round that waits for the draft model, which ends chains it does not believe in after `num_drafted`."""
        return self.round_s(num_proposed) + self._draft_wait.value + num_drafted * self._draft_token.value
