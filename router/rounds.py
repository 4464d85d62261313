"""Owns a round under way, and what is told of it when it is over."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.proposal import Proposal, Verdict
from router.events import RoundRecord
from router.policy import RoundPlan
from rpc.tracing import WorkSpan


@dataclass(slots=True)
class Round:
    """A round under way.

    Attributes:
        proposal: what the target is to judge; empty in a plain round.
        began: when planning began; for the later tokens of a plain stretch, when the token before was committed.
        arm: the kind of proposal whose acceptance this round tells.
        is_early: the target knew what to do before the round began, and needs not be asked.
        then: the plain stretch that is to follow at once, where the router knows that already.
        is_hit: whether it had the next one when this round was over; None where no draft ran ahead for it.
        num_wasted: draft tokens that were drafted ahead and that this round has made useless.
        told: what its span tells of it.
    """

    plan: RoundPlan
    proposal: Proposal
    began: float
    arm: str = ""
    draft_wait_s: float = 0.0
    dropped: str = ""
    is_early: bool = False
    then: RoundPlan | None = None
    is_hit: bool | None = None
    num_wasted: int = 0
    num_stale: int = 0
    is_switch: bool = False
    workload: str = ""
    span: WorkSpan | None = None
    told: RoundRecord | None = None

    @property
    def traceparent(self) -> str:
        """Under which the work for it is traced; "" where it is not."""
        return "" if self.span is None else self.span.traceparent

    @property
    def is_stretch(self) -> bool:
        return self.plan.plain_tokens > 1


def record_of(round_: Round, verdict: Verdict, round_s: float) -> RoundRecord:
    return RoundRecord(
        drafter=round_.plan.drafter if verdict.num_proposed else "",
        num_proposed=verdict.num_proposed,
        num_accepted=verdict.num_accepted,
        num_tokens=len(verdict.tokens),
        reason=round_.plan.reason,
        dropped=round_.dropped or ("refused" if verdict.dropped else ""),
        round_s=round_s,
        forward_s=verdict.forward_time_s,
        draft_wait_s=round_.draft_wait_s,
        is_early=round_.is_early,
        is_hit=round_.is_hit,
        num_wasted=round_.num_wasted,
        queue_s=verdict.queue_time_s,
        num_stale=round_.num_stale,
        is_switch=round_.is_switch,
        workload=round_.workload,
    )


def annotate(round_: Round, record: RoundRecord) -> None:
    """Puts what a verdict has come to on the round's span; of a stretch, what its tokens so far come to together."""
    if round_.span is None:
        return
    if round_.told is not None:
        record = replace(
            record,
            num_tokens=round_.told.num_tokens + record.num_tokens,
            forward_s=round_.told.forward_s + record.forward_s,
            queue_s=round_.told.queue_s + record.queue_s,
            num_wasted=round_.told.num_wasted + record.num_wasted,
            num_stale=round_.told.num_stale + record.num_stale,
        )
    round_.told = record
    found: dict[str, str | int | float] = {
        "outrider.num_proposed": record.num_proposed,
        "outrider.num_accepted": record.num_accepted,
        "outrider.num_tokens": record.num_tokens,
        "outrider.rollback_depth": record.num_proposed - record.num_accepted,
        "outrider.dropped": record.dropped,
        "outrider.forward_ms": 1e3 * record.forward_s,
        "outrider.queue_ms": 1e3 * record.queue_s,
        "outrider.draft_wait_ms": 1e3 * record.draft_wait_s,
        "outrider.early": record.is_early,
        "outrider.num_wasted": record.num_wasted,
        "outrider.num_stale": record.num_stale,
    }
    told = {name: value for name, value in found.items() if value}  # what is 0, false or "" need not be sent
    if record.is_hit is not None:
        told["outrider.early_hit"] = record.is_hit
    round_.span.set_attributes(told)
