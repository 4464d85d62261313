"""Owns the decision of every round: which drafter speculates, how far, or why none does.

`plan_round` is a pure function. It picks the option with the most expected tokens per second,

    E[tokens](K, acceptance by position) / T(K),

after the rules that switch speculation off: `request`, `temperature`, `draft_unavailable`, `context`, `acceptance`,
`load`.
What it needs to remember between rounds is in `SpeedGate`, which judges by measured time, not by acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.proposal import RunAhead
from router.acceptance import DRAFT_MODEL, DRAFTED, NGRAM, SessionAcceptance, ngram_arm
from router.costs import CostModel
from router.ngram import NgramMatch

Reason = Literal["", "request", "temperature", "acceptance", "load", "draft_unavailable", "context"]
DraftStatus = Literal["none", "ready", "busy", "unavailable"]

DRAFTERS = (DRAFT_MODEL, NGRAM)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Thresholds of policy v1.

    Attributes:
        max_temperature: at this temperature and above speculation is off.
        acceptance_floor: least chance of its first token for the draft model to be asked, whatever time says. It does
            not apply to n-grams, which cost no drafting.
        off_below: measured speed, as a multiple of plain decoding, below which speculation is switched off.
        on_above: multiple a probe must reach to switch it on again.
        min_tokens: tokens of evidence before it can be switched off.
        first_pause: tokens decoded plainly before the first probe; doubles after every failed probe.
        max_pause: longest such pause.
        probe_rounds: rounds one probe lasts.
        retry_tokens: tokens decoded plainly before asking again whether a draft has come back.
        stretch: tokens decoded plainly at a time during a pause, before looking whether a sure thing has come up.
        sure_above: expected speed, as a multiple of plain decoding, that is not passed up even during a pause.
        run_ahead: let the draft draft on while its proposal is verified.
    """

    max_temperature: float = 0.9
    acceptance_floor: float = 0.05
    off_below: float = 0.98
    on_above: float = 1.03
    min_tokens: int = 12
    first_pause: int = 24
    max_pause: int = 256
    probe_rounds: int = 2
    retry_tokens: int = 16
    stretch: int = 4
    sure_above: float = 1.1
    run_ahead: bool = True


@dataclass(frozen=True, slots=True)
class SpeculationControl:
    """What the request asked for.

    Attributes:
        enabled: speculate at all.
        max_draft_tokens: cap on K.
        drafter: one of them, or "auto".
        num_speculative_tokens: K, whatever pays; None leaves it to the policy.
        run_ahead: let the draft draft on while its proposal is verified.
    """

    enabled: bool = True
    max_draft_tokens: int | None = None
    drafter: str = "auto"
    num_speculative_tokens: int | None = None
    run_ahead: bool = True


@dataclass(frozen=True, slots=True)
class RoundView:
    """What is known when a round begins.

    Attributes:
        num_generated: tokens generated so far.
        tokens_left: tokens that max_tokens and the target's window still allow, at least 1.
        max_proposal_tokens: most draft tokens one forward of the target verifies.
        draft: whether the draft can be asked now; "none" where the request or the configuration has no use for it.
        draft_room: draft tokens that the draft's own window still has room for.
        match: what the n-gram drafter found; None also where it is not wanted.
    """

    temperature: float
    control: SpeculationControl
    num_generated: int
    tokens_left: int
    max_proposal_tokens: int
    draft: DraftStatus
    draft_room: int
    match: NgramMatch | None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What to do next.

    Attributes:
        drafter: "ngram", "draft_model", or "" for a plain round.
        num_speculative_tokens: K; 0 for a plain round.
        confidence_threshold: the draft may end its chain below this probability.
        reason: why the drafter that was asked for does not speculate now.
        plain_tokens: tokens the target decodes by itself; 1 is an ordinary round with an empty proposal.
        run_ahead: how far the draft may run ahead of this round.
        plain_otherwise: where nothing was drafted ahead for what comes of this round, the next is to be a plain one, at
            once; otherwise it waits for the draft.
    """

    drafter: str = ""
    num_speculative_tokens: int = 0
    confidence_threshold: float = 0.0
    reason: Reason = ""
    plain_tokens: int = 1
    run_ahead: RunAhead | None = None
    plain_otherwise: bool = False


class SpeedGate:
    """Off when speculating rounds measure slower than plain decoding; on again by probes at growing intervals.

    Positions are counts of generated tokens, times are seconds; both come from the caller.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tokens = self._plain_equivalent = 0.0
        self._evidence = 0
        self._pause = config.first_pause
        self._resume_at = 0
        self._probe_rounds_left = 0
        self.is_open = True

    def pause_left(self, num_generated: int) -> int:
        """Tokens to decode plainly before the next round may speculate; 0 while open or probing."""
        return 0 if self.is_open else max(0, self._resume_at - num_generated)

    def saw_round(self, num_tokens: int, round_s: float, plain_s: float, num_generated: int) -> None:
        """One round that was free to speculate: what it committed and took, and what a plain token takes.

        A round during a pause speculated on a sure thing; it says nothing about ordinary ones.
        """
        if self.pause_left(num_generated - num_tokens):
            return
        self._tokens = 0.95 * self._tokens + num_tokens
        self._plain_equivalent = 0.95 * self._plain_equivalent + round_s / plain_s
        self._evidence += num_tokens
        if self.is_open:
            if self._evidence >= self._config.min_tokens and self.speedup < self._config.off_below:
                self._close(self._config.first_pause, num_generated)
            return
        self._probe_rounds_left -= 1
        if self._probe_rounds_left <= 0:
            self._judge_probe(num_generated)

    @property
    def speedup(self) -> float:
        """Measured speed as a multiple of plain decoding."""
        return self._tokens / self._plain_equivalent if self._plain_equivalent else 1.0

    def _judge_probe(self, num_generated: int) -> None:
        if self.speedup >= self._config.on_above:
            self.is_open = True
        else:
            self._close(min(2 * self._pause, self._config.max_pause), num_generated)

    def _close(self, pause: int, num_generated: int) -> None:
        self.is_open = False
        self._pause, self._resume_at = pause, num_generated + pause
        self._probe_rounds_left = self._config.probe_rounds
        self._tokens = self._plain_equivalent = 0.0
        self._evidence = 0


@dataclass(frozen=True, slots=True)
class _Option:
    plan: RoundPlan
    tokens_per_s: float
    first_acceptance: float


def plan_round(
    view: RoundView, config: PolicyConfig, acceptance: SessionAcceptance, costs: CostModel, gate: SpeedGate
) -> RoundPlan:
    """Decides one round."""
    fixed = switched_off(view.temperature, view.control, config)
    if fixed:
        return RoundPlan(reason=fixed, plain_tokens=view.tokens_left)
    unusable = _draft_unusable(view)
    if unusable and view.control.drafter == DRAFT_MODEL:
        burst = view.tokens_left if unusable == "context" else config.retry_tokens
        return RoundPlan(reason=unusable, plain_tokens=min(burst, view.tokens_left))
    offered = _options(view, config, acceptance, costs, unusable)
    if view.control.num_speculative_tokens is not None:
        return _exactly(offered[-1].plan) if offered else RoundPlan(reason=unusable)
    options = [option for option in offered if not gate.is_open or not _under_floor(option, config)]
    best = max(options, key=lambda option: option.tokens_per_s, default=None)
    pause = gate.pause_left(view.num_generated)
    if pause and (best is None or best.tokens_per_s * costs.plain_s < config.sure_above):
        stretch = pause if view.control.drafter == DRAFT_MODEL else min(pause, config.stretch)
        return RoundPlan(reason=_why_plain(options, costs), plain_tokens=min(stretch, view.tokens_left))
    if best is None or (gate.is_open and best.tokens_per_s * costs.round_s(0) < 1.0):
        return RoundPlan(reason=unusable or (_why_plain(options, costs) if offered else ""))
    return best.plan


def _why_plain(options: list[_Option], costs: CostModel) -> Reason:
    """Whether the best of what was drafted would pay if the batch were empty."""
    drafted = (option for option in options if option.plan.drafter)
    best = max(drafted, key=lambda option: option.tokens_per_s, default=None)
    if best is None:
        return "acceptance"
    size = best.plan.num_speculative_tokens
    alone = costs.verify_alone_s(size) / costs.verify_alone_s(0)
    beside = costs.verify_s(size) / costs.verify_s(0)
    return "load" if best.tokens_per_s * costs.plain_s * beside / alone > 1.0 else "acceptance"


def _exactly(plan: RoundPlan) -> RoundPlan:
    """The plan with the same K in every round, whatever pays."""
    size, run_ahead = plan.num_speculative_tokens, plan.run_ahead
    run_ahead = run_ahead and replace(run_ahead, num_speculative_tokens=size)
    return replace(plan, confidence_threshold=0.0, run_ahead=run_ahead, plain_otherwise=False)


def switched_off(temperature: float, control: SpeculationControl, config: PolicyConfig) -> Reason:
    """Why a request never speculates, whatever happens; "" when it may."""
    if not control.enabled or control.max_draft_tokens == 0:
        return "request"
    if temperature >= config.max_temperature:
        return "temperature"
    return ""


def _draft_unusable(view: RoundView) -> Reason:
    """Why the draft model, though wanted, cannot speculate; "" also for a draft that is merely busy."""
    if view.draft == "unavailable":
        return "draft_unavailable"
    if view.draft != "none" and view.draft_room < 1:
        return "context"
    return ""


def _under_floor(option: _Option, config: PolicyConfig) -> bool:
    return option.plan.drafter != NGRAM and option.first_acceptance < config.acceptance_floor


def _options(
    view: RoundView, config: PolicyConfig, acceptance: SessionAcceptance, costs: CostModel, unusable: Reason
) -> list[_Option]:
    limit = min(view.max_proposal_tokens, view.tokens_left - 1)
    for cap in (view.control.max_draft_tokens, view.control.num_speculative_tokens):
        limit = limit if cap is None else min(limit, cap)
    options = []
    if view.match is not None:
        options += _ngram_options(view.match, limit, acceptance, costs, unusable)
    if view.draft == "ready" and not unusable:
        runs_ahead = config.run_ahead and view.control.run_ahead
        options += _draft_options(min(limit, view.draft_room), acceptance, costs, runs_ahead=runs_ahead)
    return options


def _ngram_options(
    match: NgramMatch, limit: int, acceptance: SessionAcceptance, costs: CostModel, unusable: Reason
) -> list[_Option]:
    estimate = acceptance.arm(ngram_arm(match))
    accepted = estimate.expected_lengths(min(limit, len(match.tokens)))
    return [
        _Option(
            RoundPlan(NGRAM, size, reason=unusable),
            (1.0 + accepted[size - 1]) / costs.round_s(size),
            estimate.conditional(0),
        )
        for size in range(1, len(accepted) + 1)
    ]


def _draft_options(limit: int, acceptance: SessionAcceptance, costs: CostModel, *, runs_ahead: bool) -> list[_Option]:
    """What the draft model can do: propose now, or, while a plain round goes on, for what may come of that.

    Where it runs ahead, only those rounds wait for it that nothing was drafted for, so an option is worth what the
    rounds up to the next such one bring in all, by the time they take in all.
    """
    estimate, drafted = acceptance.arm(DRAFT_MODEL), acceptance.arm(DRAFTED)
    accepted, num_drafted = estimate.expected_lengths(limit), drafted.expected_lengths(limit)
    first = estimate.conditional(0)
    run_ahead = _run_ahead(accepted, first, costs) if runs_ahead else None
    hits, hit_tokens, hit_s = 0.0, 0.0, 0.0
    if run_ahead is not None:
        hits, size = costs.hit_rate, run_ahead.num_speculative_tokens
        hit_tokens, hit_s = 1.0 + accepted[size - 1], costs.early_round_s(size)

    def speed(tokens: float, seconds: float) -> float:
        return (hits * hit_tokens + (1.0 - hits) * tokens) / (hits * hit_s + (1.0 - hits) * seconds)

    waiting = [
        speed(1.0 + accepted[size - 1], costs.drafted_round_s(size, num_drafted[size - 1]))
        for size in range(1, len(accepted) + 1)
    ]
    plain = speed(1.0, costs.round_s(0)) if run_ahead is not None else 0.0
    # A target that goes on by itself loses no time, and no place in the batch.
    plain_at_once = speed(1.0, costs.early_round_s(0)) if run_ahead is not None else 0.0
    shared = RoundPlan(run_ahead=run_ahead, plain_otherwise=plain_at_once > max(waiting, default=0.0))
    options = [_Option(shared, plain, first)] if run_ahead is not None else []
    for size, tokens_per_s in enumerate(waiting, start=1):
        threshold = _confidence_threshold(tokens_per_s, costs.draft_token_s, first)
        proposing = replace(shared, drafter=DRAFT_MODEL, num_speculative_tokens=size, confidence_threshold=threshold)
        options.append(_Option(proposing, tokens_per_s, first))
    return options


def _run_ahead(accepted: list[float], first_acceptance: float, costs: CostModel) -> RunAhead | None:
    """How far to run ahead; None where there is room for no token.

    Args:
        accepted: how many tokens of a proposal are accepted on average, for each length from 1 on.
    """
    speeds = [(1.0 + tokens) / costs.early_round_s(size) for size, tokens in enumerate(accepted, start=1)]
    if not speeds:
        return None
    size = 1 + max(range(len(speeds)), key=speeds.__getitem__)
    return RunAhead(size, costs.ahead_s(size), first_acceptance)


def _confidence_threshold(tokens_per_s: float, draft_token_s: float, first_acceptance: float) -> float:
    """The draft probability below which drafting one token more costs more than it brings.

    A further token comes to count only if the one before it was accepted (chance: its draft probability), and then
    with about `first_acceptance`; meanwhile its time could have been spent committing `tokens_per_s`.
    """
    return min(0.5, tokens_per_s * draft_token_s / max(first_acceptance, 1e-3))
