"""Owns the decision of every round: which drafter speculates, how far, or why none does.

`plan_round` is a pure function. It picks the option with the most expected tokens per second,

    E[tokens](K, acceptance by position) / T(K),

after the rules that switch speculation off: `request`, `temperature`, `draft_unavailable`, `context`, `acceptance`,
`load`.
What it needs to remember between rounds is in router.speed_gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.proposal import RunAhead
from router.acceptance import DRAFT_MODEL, DRAFTED, NGRAM, SessionAcceptance, ngram_arm
from router.costs import CostModel
from router.ngram import NgramMatch
from router.speed_gate import PolicyConfig, SpeedGate

Reason = Literal["", "request", "temperature", "acceptance", "load", "draft_unavailable", "context"]
DraftStatus = Literal["none", "ready", "busy", "unavailable"]

DRAFTERS = (DRAFT_MODEL, NGRAM)
_GLANCE = (
    2  # plain tokens at a time where each may be the last: one under way, and one behind it while that is looked at
)


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
        run_ahead: how far the draft may run ahead of this round; how long is for router.running_ahead to say.
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
        return offered[-1].plan if offered else RoundPlan(reason=unusable)
    options = [option for option in offered if not gate.is_open or not _under_floor(option, config)]
    best = max(options, key=lambda option: option.tokens_per_s, default=None)
    pause = gate.pause_left(view.num_generated)
    if pause and (best is None or best.tokens_per_s * costs.plain_s < config.sure_above):
        stretch = pause if view.control.drafter == DRAFT_MODEL else min(pause, config.stretch)
        return RoundPlan(reason=_why_plain(options, costs), plain_tokens=min(stretch, view.tokens_left))
    is_untried = best is not None and best.plan.drafter == DRAFT_MODEL and not costs.knows_draft
    if best is None or (gate.is_open and not is_untried and best.tokens_per_s * costs.plain_s < config.try_above):
        reason = unusable or (_why_plain(options, costs) if offered else "")
        return RoundPlan(reason=reason, plain_tokens=min(_GLANCE, view.tokens_left))
    return best.plan


def _why_plain(options: list[_Option], costs: CostModel) -> Reason:
    """`load` where the best of what could be drafted would pay if the batch were empty, and does not in this one."""
    drafted = (option for option in options if option.plan.drafter)
    best = max(drafted, key=lambda option: option.tokens_per_s, default=None)
    if best is None:
        return "acceptance"
    size = best.plan.num_speculative_tokens
    alone = costs.verify_alone_s(size) / costs.verify_alone_s(0)
    beside = costs.verify_s(size) / costs.verify_s(0)
    speedup = best.tokens_per_s * costs.plain_s
    return "load" if speedup <= 1.0 < speedup * beside / alone else "acceptance"


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
    is_fixed = view.control.num_speculative_tokens is not None
    options = []
    if view.match is not None:
        options += _ngram_options(view.match, limit, acceptance, costs, unusable, is_fixed=is_fixed)
    if view.draft == "ready" and not unusable:
        run_ahead = config.run_ahead and view.control.run_ahead
        rounds = _DraftRounds(min(limit, view.draft_room), acceptance, costs, is_fixed, run_ahead)
        options += rounds.options()
    return options


def _ngram_options(
    match: NgramMatch,
    limit: int,
    acceptance: SessionAcceptance,
    costs: CostModel,
    unusable: Reason,
    *,
    is_fixed: bool,
) -> list[_Option]:
    """As many of the match's tokens as pay best, or as were asked for."""
    accepted = acceptance.arm(ngram_arm(match)).expected_lengths(min(limit, len(match.tokens)))
    if not accepted:
        return []
    verify_s, asked_s = costs.verify_times(1, len(accepted)), costs.asked_s
    speeds = [(1.0 + tokens) / (seconds + asked_s) for tokens, seconds in zip(accepted, verify_s, strict=True)]
    size, speed = _best(speeds, is_fixed)
    return [_Option(RoundPlan(NGRAM, size, reason=unusable), speed, accepted[0])]


def _best(speeds: Sequence[float], is_fixed: bool) -> tuple[int, float]:
    """The K with most tokens per second, or the largest, and its speed; `speeds` are those of K from 1."""
    index = len(speeds) - 1 if is_fixed else max(range(len(speeds)), key=speeds.__getitem__)
    return index + 1, speeds[index]


class _DraftRounds:
    """What the draft model can do: propose now, or, while a plain round goes on, for what may come of that.

    Where it runs ahead, only those rounds wait for it that nothing was drafted for, so an option is worth what the
    rounds up to the next such one bring in all, by the time they take in all.
    """

    def __init__(
        self, limit: int, acceptance: SessionAcceptance, costs: CostModel, is_fixed: bool, run_ahead: bool
    ) -> None:
        self._costs, self._is_fixed = costs, is_fixed
        self._accepted = acceptance.arm(DRAFT_MODEL).expected_lengths(limit)
        self._num_drafted = acceptance.arm(DRAFTED).expected_lengths(limit)
        self._verify_s = costs.verify_times(0, limit)
        self._num_ahead = 0  # draft tokens that pay best where they are made ahead; 0 where nothing is
        self._misses = 1.0
        self._hit_tokens = self._hit_s = 0.0  # those of all rounds taken together
        if run_ahead and self._accepted:
            self._run_ahead()

    def options(self) -> list[_Option]:
        """Proposing with the K that pays best, or was asked for, last; before it a plain round, if one can be run
        ahead of.
        """
        if not self._accepted:
            return []
        costs, first, verify_s, asked_s = self._costs, self._accepted[0], self._verify_s, self._costs.asked_s
        waiting = [
            self._speed(1.0 + accepted, seconds + asked_s + costs.drafting_s(drafted))
            for accepted, drafted, seconds in zip(self._accepted, self._num_drafted, verify_s[1:], strict=True)
        ]
        size, speed = _best(waiting, self._is_fixed)
        # A draft that was never asked is asked first: nothing else tells what it costs.
        has_time = costs.draft_token_s <= costs.ahead_s(0, is_asked=False)
        may_go_plainly = self._num_ahead > 0 and not self._is_fixed and costs.knows_draft and has_time
        # A target that goes on by itself loses no time, and no place in the batch.
        at_once = self._speed(1.0, verify_s[0] + costs.gap_s) if may_go_plainly else 0.0
        plain_otherwise = at_once > speed
        threshold = 0.0 if self._is_fixed else _confidence_threshold(speed, costs.draft_token_s, first)
        ahead = RunAhead(self._num_ahead, first) if self._num_ahead else None
        proposing = RoundPlan(DRAFT_MODEL, size, threshold, run_ahead=ahead, plain_otherwise=plain_otherwise)
        options = [_Option(proposing, speed, first)]
        if may_go_plainly:
            plain = RoundPlan(run_ahead=ahead, plain_otherwise=plain_otherwise)
            options.insert(0, _Option(plain, max(self._speed(1.0, verify_s[0] + asked_s), at_once), first))
        return options

    def _run_ahead(self) -> None:
        """How far to run ahead, and what comes of it."""
        gap_s, hits = self._costs.gap_s, self._costs.hit_rate
        times = [seconds + gap_s for seconds in self._verify_s[1:]]
        speeds = [(1.0 + tokens) / seconds for tokens, seconds in zip(self._accepted, times, strict=True)]
        self._num_ahead, _ = _best(speeds, self._is_fixed)
        self._misses = 1.0 - hits
        self._hit_tokens = hits * (1.0 + self._accepted[self._num_ahead - 1])
        self._hit_s = hits * times[self._num_ahead - 1]

    def _speed(self, tokens: float, seconds: float) -> float:
        """Tokens per second with a round of so many tokens and seconds wherever none was drafted ahead."""
        return (self._hit_tokens + self._misses * tokens) / (self._hit_s + self._misses * seconds)


def _confidence_threshold(tokens_per_s: float, draft_token_s: float, first_acceptance: float) -> float:
    """The draft probability below which drafting one token more costs more than it brings.

    A further token comes to count only if the one before it was accepted (chance: its draft probability), and then
    with about `first_acceptance`; meanwhile its time could have been spent committing `tokens_per_s`.
    """
    return min(0.5, tokens_per_s * draft_token_s / max(first_acceptance, 1e-3))
