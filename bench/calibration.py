"""Owns what is made of measurements of a pair: lines of its devices, acceptance by position, a profile of both.

Pure: from numbers to the `emulation` section of a profile, to the workload file, and to what the simulator expects of
the same requests.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from bench.comparison import EVERY_KIND, Sample
from bench.counts import Counts
from bench.emulation import DeviceTimes, Emulation
from bench.modes import PLAIN, SYNC, family, fixed_k
from bench.simulation.assumptions import Assumptions
from bench.simulation.roofline import ProfiledDevice
from bench.simulation.scenario import Setup
from bench.simulation.speedup import tokens_per_round, waiting
from router.acceptance import DRAFT_MODEL

LEAST_TRIALS = 20
"""A position that was tried less often has no number of its own: that of the position before it holds on."""
NUM_RANKED = 4
"""Tokens at each position among which the target's choice is looked for where it is not the draft's first."""

_DIGITS = 4
_REWEIGHTED, _EXACT = 30, 1e-4  # turns, and the relative error below which a forward lies on the line


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward took, as a median of some.

    Attributes:
        num_sessions: in it.
        rows_each: of each session.
        context: tokens of each session before them.
        seconds: of the device.
        queue_s: that a proposal waited for it, where one did.
    """

    num_sessions: int
    rows_each: int
    context: float
    seconds: float
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where the draft had the target's tokens: `first`, else `ranked` among the first few, of `total`."""

    first: int = 0
    ranked: int = 0
    total: int = 0

    def seen(self, rank: int | None, num_ranked: int) -> Ranks:
        """One token more, by its rank from 0; None where the draft did not have it at all."""
        is_ranked = rank is not None and 0 < rank < num_ranked
        return Ranks(self.first + (rank == 0), self.ranked + is_ranked, self.total + 1)

    @property
    def recall(self) -> float:
        """Chance that the target's token is among the draft's first few where it is not the first; 0 if never seen."""
        others = self.total - self.first
        return self.ranked / others if others else 0.0


@dataclass(frozen=True, slots=True)
class Timed:
    """Forwards of generated rows, and of prompts, of one device."""

    generated: tuple[Forward, ...]
    prompts: tuple[Forward, ...]


@dataclass(frozen=True, slots=True)
class Devices:
    """Target and draft; `draft_wait_s` is what of a proposal of middle length is not in the draft's forwards."""

    target: Timed
    draft: Timed
    draft_wait_s: float


def fit_times(timed: Timed) -> DeviceTimes:
    """The line nearest to the forwards: a step, a share for each further row, seconds for each token of context.

    Least absolute relative errors, so that a forward that something else held up does not bend it. Neither of the
    latter two may be negative: of the lines with one or both left out, the nearest that keeps to it is taken.
    """
    rows = [[1.0, f.num_sessions * f.rows_each - 1.0, f.num_sessions * f.context] for f in timed.generated]
    relative = np.array(rows) / np.array([[f.seconds] for f in timed.generated])
    lines = []
    for kept in ((0, *rest) for size in range(3) for rest in combinations((1, 2), size)):
        line = np.zeros(3)
        line[list(kept)] = _nearest(relative[:, kept])
        if (line >= 0.0).all():
            lines.append(line)
    step_s, row_s, context_s = min(lines, key=lambda line: float(np.abs(relative @ line - 1.0).sum()))
    left = [(f.seconds - step_s - f.context * context_s) / max(f.rows_each - 1, 1) for f in timed.prompts]
    prompt_row_s = max(statistics.median(left), 0.0)
    return DeviceTimes(
        step_s=_rounded(step_s),
        row_share=_rounded(min(row_s / step_s, 1.0)),
        prompt_row_share=_rounded(min(prompt_row_s / step_s, 1.0)),
        context_token_s=_rounded(context_s),
    )


def _nearest(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What brings `relative` times it nearest to 1 in absolute terms, by least squares reweighted again and again."""
    weights, found = np.ones(len(relative)), np.zeros(relative.shape[1])
    for _ in range(_REWEIGHTED):
        found = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)[0].astype(np.float64)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(relative @ found - 1.0), _EXACT))
    return found


def worst_miss(times: DeviceTimes, forwards: Iterable[Forward]) -> float:
    """How far the line is off at most, as a share of what was measured."""
    return max(
        abs(ProfiledDevice(times, round(f.context)).seconds(f.num_sessions, f.rows_each) / f.seconds - 1.0)
        for f in forwards
    )


def by_position(counts: Counts) -> tuple[float, ...]:
    """Chance for each draft token that it is accepted if those before it were, as far as was tried often enough.

    Proposals differ in length, at the end of a reply above all, so each position is compared within those that have it.
    """
    rates: list[float] = []
    reached = 1.0
    for accepted, drafted in zip(counts.accepted_per_position, counts.drafted_per_position, strict=True):
        tried = reached * drafted
        if tried < LEAST_TRIALS:
            break
        rates.append(round(min(accepted / tried, 1.0), _DIGITS))
        reached = accepted / drafted
    return tuple(rates)


def constant_acceptance(rates: Sequence[float], num_speculative_tokens: int) -> float:
    """The one acceptance at every position that brings as many tokens a round at this K."""
    wanted = tokens_per_round(rates, num_speculative_tokens)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round((middle,), num_speculative_tokens) < wanted else (low, middle)
    return (low + high) / 2


def acceptance_of(samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    """By class and over all, from the longest fixed K; a class that was not tried often enough has none."""
    longest = max((fixed_k(sample.mode) or 0 for sample in samples if family(sample.mode) == SYNC), default=0)
    mine = [sample for sample in samples if sample.mode == f"{SYNC}:{longest}"]
    found = {}
    for kind in [*dict.fromkeys(sample.kind for sample in mine), EVERY_KIND]:
        counts = Counts.total(sample.counts for sample in mine if kind in (sample.kind, EVERY_KIND))
        if rates := by_position(counts):
            found[kind] = rates
    return found


@dataclass(frozen=True, slots=True)
class Check:
    """One K, as it was measured on the prompts, and as the simulator has it from the calibration.

    Attributes:
        tokens_per_s: measured.
        measured: as a multiple of plain decoding.
        simulated: the same.
    """

    num_speculative_tokens: int
    tokens_per_s: float
    measured: float
    simulated: float

    @property
    def miss(self) -> float:
        """How far the simulator is off, as a share of what was measured."""
        return self.simulated / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that was measured of a pair on some prompts.

    Attributes:
        target, draft: times of their devices.
        acceptance: by class, and under ``all`` over all of them, by position.
        ranks: of the target's tokens under the draft.
        wait_s: of a round that waits for the draft, what is neither drafting nor verifying, besides `gap_s`.
        gap_s: between two plain forwards.
        hit_rate: of running ahead; None where no round ran ahead.
        context: mean tokens of a session.
        max_draft_tokens: largest K measured.
    """

    target: DeviceTimes
    draft: DeviceTimes
    acceptance: Mapping[str, tuple[float, ...]]
    ranks: Ranks
    wait_s: float
    gap_s: float
    hit_rate: float | None
    context: int
    max_draft_tokens: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance by position over all prompts; an acceptance of 0 where nothing was drafted often enough."""
        return self.acceptance.get(EVERY_KIND, (0.0,))

    @property
    def emulation(self) -> Emulation:
        """The section of a profile. An emulated draft knows no positions, so it has their constant equivalent."""
        return Emulation(
            target=self.target,
            draft=self.draft,
            alpha=_rounded(constant_acceptance(self.rates, self.max_draft_tokens)),
            recall=_rounded(self.ranks.recall),
            num_ranked=NUM_RANKED,
        )

    @property
    def assumptions(self) -> dict[str, float]:
        """What a profile has no place for, by the simulator's names."""
        return {"wait_s": _rounded(self.wait_s), "gap_s": _rounded(self.gap_s)}

    def setup(self) -> Setup:
        """What the simulator has of it."""
        assumed = Assumptions(recall=self.ranks.recall, num_ranked=NUM_RANKED, **self.assumptions)
        target, draft = ProfiledDevice(self.target, self.context), ProfiledDevice(self.draft, self.context)
        return Setup(target, draft, assumed, self.max_draft_tokens, self.hit_rate)

    def checks(self, samples: Sequence[Sample]) -> list[Check]:
        """The simulator against what was measured, for every fixed K that waits for the draft."""
        plain, load, found = _speed(samples, PLAIN), self.setup().load(1), []
        for mode in dict.fromkeys(sample.mode for sample in samples):
            size = fixed_k(mode)
            if family(mode) == SYNC and size is not None and plain:
                speed = _speed(samples, mode)
                found.append(Check(size, speed, speed / plain, waiting(load, self.rates, size).speedup))
        return found


def calibrate(devices: Devices, samples: Sequence[Sample], ranks: Ranks, context: float) -> Calibration:
    """Puts it all together.

    Args:
        devices: as they were timed.
        samples: of every prompt, plainly, under each fixed K that waits for the draft, and running ahead.
        ranks: of the tokens of the plain outputs.
        context: mean tokens of a session while it decodes.
    """
    target, draft = fit_times(devices.target), fit_times(devices.draft)
    router_s = statistics.fmean(sample.router_ms for sample in samples if family(sample.mode) == SYNC) / 1e3
    queue_s = statistics.median([f.queue_s for f in devices.target.generated if f.queue_s > 0.0] or [0.0])
    plain_s = statistics.median(s.decode_s / s.decoded for s in samples if s.mode == PLAIN and s.decoded)
    gap_s = max(plain_s - ProfiledDevice(target, round(context)).seconds(1, 1), 0.0)
    ahead = Counts.total(sample.counts for sample in samples if sample.mode == DRAFT_MODEL)
    return Calibration(
        target=target,
        draft=draft,
        acceptance=acceptance_of(samples),
        ranks=ranks,
        wait_s=max(router_s + queue_s - gap_s, 0.0) + devices.draft_wait_s,
        gap_s=gap_s,
        hit_rate=ahead.hit_rate if ahead.rounds_ahead else None,
        context=round(context),
        max_draft_tokens=max(fixed_k(s.mode) or 0 for s in samples),
    )


def _speed(samples: Sequence[Sample], mode: str) -> float:
    """Tokens/s of one session; 0 where nothing was decoded."""
    mine = [sample for sample in samples if sample.mode == mode]
    seconds = sum(sample.decode_s for sample in mine)
    return sum(sample.decoded for sample in mine) / seconds if seconds else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
