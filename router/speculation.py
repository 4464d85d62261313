"""Owns one request's speculation: plans each round, has its proposal made, and learns from the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, State, Verdict
from router.acceptance import (
    DRAFT_MODEL,
    DRAFTED,
    NGRAM,
    SessionAcceptance,
    SpeculationTotals,
    ngram_arm,
)
from router.draft_link import DraftLink
from router.ngram import NgramDrafter
from router.policy import RoundPlan, RoundView, plan_round, switched_off
from router.requests import SessionRequest
from router.rounds import Round, annotate, record_of
from router.running_ahead import RunningAhead
from router.shared import Shared
from router.speed_gate import SpeedGate
from rpc.tracing import WorkSpan, begin_work, traceparent_of

_MIN_PATIENCE_S = 0.02  # a draft gets at least so long, however fast the target


class Speculator:
    """Everything of a session that is not needed to decode plainly.

    Args:
        request: a draft samples as it asks.
        shared: what all sessions of the router share.
        propose_early: gives the target proposals for what may come of the round under way.
    """

    def __init__(
        self, request: SessionRequest, shared: Shared, propose_early: Callable[[EarlyProposals], None]
    ) -> None:
        control = request.control
        if not shared.config.drafters:
            control = replace(control, enabled=False)  # nothing to speculate with: decode without round trips
        self._sampling, self._control, self._shared, self._span = request.sampling, control, shared, request.span
        self._traceparent = traceparent_of(request.span)
        self._off = switched_off(request.sampling.temperature, control, shared.config.policy)
        self._acceptance = SessionAcceptance(shared.priors, request.workload)
        self._gate = SpeedGate(shared.config.policy)
        self._ngram = NgramDrafter(shared.config.ngram) if self._wants(NGRAM) else None
        self._draft: DraftLink | None = None
        self._ahead = RunningAhead(shared.costs, shared.clock, propose_early)
        self._max_proposal = 0
        self._then: RoundPlan | None = (
            None  # what the target does behind the round under way, if it has been told already
        )
        self._num_prompt, self._workload = len(request.prompt), request.workload
        self._num_stale = 0  # counted so far
        self.totals = SpeculationTotals()
        self.saw_tokens(request.prompt + request.resumed)

    def target_opened(self, info: EngineInfo, tokens: Sequence[int]) -> None:
        """Prepares the draft while the target computes `tokens`. When a target was lost it is prepared already."""
        self._ahead.forget()
        self._then = None
        self._max_proposal = min(info.max_proposal_tokens, self._shared.config.max_draft_tokens)
        if self._draft is None and self._wants(DRAFT_MODEL):
            self._draft = DraftLink(
                self._shared.peers.drafts,
                self._sampling,
                self.totals,
                self._shared.clock,
                self._shared.config.draft_link,
                self._ahead.arrived,
            )
            self._draft.warm_up(tokens, info.vocab_size, self._traceparent)

    def saw_tokens(self, tokens: Sequence[int]) -> None:
        """Tokens of the true sequence, each once."""
        if self._ngram is not None:
            self._ngram.extend(tokens)

    async def propose(self, state: State, tokens: Sequence[int], tokens_left: int) -> Round:
        """Plans the next round and has its proposal made.

        Args:
            state: the committed state.
            tokens: prompt and committed tokens.
            tokens_left: tokens that may still be generated, at least 1.
        """
        began = self._shared.clock()
        if self._then is not None:
            plan, self._then = self._then, None
            return Round(plan, Proposal(state), began, is_early=True, span=self._round_span(plan, state))
        view = self._view(state, tokens, tokens_left)
        plan, match = self._plan(view), view.match
        if (early := self._ahead.next_proposal) is not None:
            return self._go_on(early, plan, began, tokens)
        self._pass_over(view, plan)
        round_ = Round(plan, Proposal(state), began, span=self._round_span(plan, state))
        if plan.drafter == NGRAM and match is not None:
            round_.proposal = Proposal.chain(state, match.tokens[: plan.num_speculative_tokens], drafter=NGRAM)
            round_.arm = ngram_arm(match)
        elif plan.drafter == DRAFT_MODEL:
            await self._ask_draft(round_, tokens)
        elif plan.run_ahead is not None:
            self._tell_draft(round_.proposal, plan, tokens)
        return round_

    def prolong(self, round_: Round, state: State, tokens: Sequence[int], tokens_left: int) -> int:
        """How many tokens more the target is to decode by itself, while it is at the last of a plain stretch.

        A target that stops between two stretches waits for a round trip, and in a batch for the forward of the others,
        which have gone on. 0: the next round is to be another than plain, or there is no room for it.
        """
        if tokens_left < 2:
            return 0
        view = self._view(state, tokens, tokens_left)
        plan = self._plan(replace(view, num_generated=view.num_generated + 1, tokens_left=tokens_left - 1))
        if plan.run_ahead is not None:  # the token under way is as good a round to run ahead of as any
            self._tell_draft(Proposal(state), plan, tokens)
        if plan.drafter or plan.run_ahead is not None:
            return 0
        more = max(plan.plain_tokens - 1, 1)  # the one that is under way is among the plan's, unless there is no other
        if self._gate.is_open:
            self._pass_over(view, plan)
        round_.plan = replace(plan, plain_tokens=round_.plan.plain_tokens + more)
        if round_.span is not None:
            round_.span.set_attributes({"outrider.plain_tokens": round_.plan.plain_tokens})
        return more

    def _plan(self, view: RoundView) -> RoundPlan:
        shared = self._shared
        return plan_round(view, shared.config.policy, self._acceptance, shared.costs, self._gate)

    def _tell_draft(self, proposal: Proposal, plan: RoundPlan, tokens: Sequence[int]) -> None:
        """The draft is asked for nothing but what may come of verifying `proposal`."""
        assert self._draft is not None
        told = self._ahead.begin(proposal, plan.run_ahead, is_asked=False, plain_otherwise=plan.plain_otherwise)
        self._draft.went_on(proposal.base, tokens, told)

    def _go_on(self, early: Proposal, plan: RoundPlan, began: float, tokens: Sequence[int]) -> Round:
        """A round that the target has begun by itself. What the policy would rather do now, it may do in the next."""
        self._then = plan if plan.plain_tokens > 1 else None
        drafter = DRAFT_MODEL if early.tokens else ""
        plan = RoundPlan(drafter, len(early.tokens), run_ahead=plan.run_ahead, plain_otherwise=plan.plain_otherwise)
        span = self._round_span(plan, early.base)
        self._tell_draft(early, plan, tokens)
        return Round(plan, early, began, arm=DRAFT_MODEL, is_early=True, then=self._then, span=span)

    def learn(self, round_: Round, verdict: Verdict, state: State) -> float:
        """Counts a verdict, which led to `state`, and lets the policy see how the round went; returns the seconds the
        router itself took.
        """
        plan, now = round_.plan, self._shared.clock()
        round_s, round_.began = now - round_.began, now
        self.totals.count_round(len(verdict.tokens))
        round_.is_switch = self._note_switch(plan, verdict.base.length - self._num_prompt)
        if verdict.dropped:
            self.totals.count_dropped("refused")
        if verdict.num_proposed:
            self.totals.count_proposal(plan.drafter, verdict.num_proposed, verdict.num_accepted)
            # A sequence that ended says nothing about the draft tokens behind its end.
            asked = verdict.num_accepted if verdict.finish_reason else plan.num_speculative_tokens
            self._acceptance.observe(round_.arm, asked, verdict.num_accepted)
            if round_.arm == DRAFT_MODEL and not round_.is_early:
                self._acceptance.observe(DRAFTED, plan.num_speculative_tokens, verdict.num_proposed)
        self._learn_times(round_, verdict, round_s)
        self._learn_ahead(round_, verdict, state)
        round_.workload = self._workload
        self._learn_stale(round_)
        record = record_of(round_, verdict, round_s)
        self._shared.observer.round_finished(record)
        annotate(round_, record)
        return round_s - verdict.forward_time_s - verdict.queue_time_s - round_.draft_wait_s

    async def close(self) -> None:
        """Frees the draft's side."""
        self._ahead.forget()
        if self._draft is not None:
            await self._draft.close()

    async def _ask_draft(self, round_: Round, tokens: Sequence[int]) -> None:
        """A draft has as long as a verification takes, and what it should take itself; then the round goes on.

        What it should take is not known before its first answer.
        """
        assert self._draft is not None
        costs, size = self._shared.costs, round_.plan.num_speculative_tokens
        verify_s = max(_MIN_PATIENCE_S, costs.next_forward_s(size))
        patience_s = verify_s + (min(size * costs.draft_token_s, verify_s) if costs.knows_draft else verify_s)
        base, plan = round_.proposal.base, round_.plan
        if plan.run_ahead is not None:
            plan = replace(plan, run_ahead=self._ahead.timed(plan.run_ahead, size, is_asked=True))
        answer = await self._draft.propose(base, tokens, plan, patience_s, round_.traceparent)
        round_.draft_wait_s, round_.dropped, round_.arm = answer.wait_s, answer.dropped, DRAFT_MODEL
        if answer.proposal is not None:
            round_.proposal = answer.proposal
            self._ahead.begin(answer.proposal, plan.run_ahead, is_asked=True, plain_otherwise=plan.plain_otherwise)
            costs.saw_draft(len(answer.proposal.tokens), answer.proposal.draft_time_s, answer.wait_s)

    def _learn_ahead(self, round_: Round, verdict: Verdict, state: State) -> None:
        is_hit = self._ahead.end(verdict, state)
        round_.num_wasted = self._ahead.num_wasted - self.totals.wasted_draft_tokens
        self.totals.wasted_draft_tokens = self._ahead.num_wasted
        if is_hit is not None and verdict.finish_reason is None:
            round_.is_hit = is_hit
            self.totals.count_ahead(is_hit)
            self._shared.costs.saw_ahead(is_hit)

    def _note_switch(self, plan: RoundPlan, num_generated: int) -> bool:
        """Tells the trace when speculation goes off, on, or stays off for another reason."""
        before, self.totals.switched_off_reason = self.totals.switched_off_reason, plan.reason
        if plan.reason != before and self._span is not None:
            found: dict[str, str | int] = {
                "outrider.reason": plan.reason,
                "outrider.reason_before": before,
                "outrider.num_generated": num_generated,
                "outrider.drafter": plan.drafter,
                "outrider.num_speculative_tokens": plan.num_speculative_tokens,
            }
            self._span.add_event("outrider.speculation", found)
        return plan.reason != before

    def _learn_stale(self, round_: Round) -> None:
        num_stale = self.totals.dropped.get("stale", 0)
        round_.num_stale, self._num_stale = num_stale - self._num_stale, num_stale

    def _learn_times(self, round_: Round, verdict: Verdict, round_s: float) -> None:
        costs = self._shared.costs
        num_generated = verdict.base.length + len(verdict.tokens) - self._num_prompt
        if round_.is_stretch:
            costs.saw_forward(verdict)
            if not self._off:
                self._gate.saw_plain(num_generated)
            return
        if round_.is_early:
            costs.saw_early(verdict, round_s)
        else:
            costs.saw_round(verdict, round_s, round_.draft_wait_s)
        if not self._off:
            self._gate.saw_round(len(verdict.tokens), round_s, costs.plain_s, num_generated)

    def _view(self, state: State, tokens: Sequence[int], tokens_left: int) -> RoundView:
        limit = min(self._max_proposal, tokens_left - 1)
        match = self._ngram.lookup(limit) if self._ngram is not None else None
        return RoundView(
            temperature=self._sampling.temperature,
            control=self._control,
            num_generated=len(tokens) - self._num_prompt,
            tokens_left=tokens_left,
            max_proposal_tokens=self._max_proposal,
            draft="none" if self._draft is None else self._draft.status(state, tokens, self._traceparent),
            draft_room=0 if self._draft is None else self._draft.room(len(tokens)),
            match=match,
        )

    def _pass_over(self, view: RoundView, plan: RoundPlan) -> None:
        if view.draft == "ready" and plan.drafter != DRAFT_MODEL:
            self._acceptance.pass_over(DRAFT_MODEL)
            self._shared.costs.pass_over_draft()
        if view.match is not None and plan.drafter != NGRAM:
            self._acceptance.pass_over(ngram_arm(view.match))

    def _wants(self, drafter: str) -> bool:
        asked = self._control.drafter in ("auto", drafter)
        return not self._off and asked and drafter in self._shared.config.drafters

    def _round_span(self, plan: RoundPlan, state: State) -> WorkSpan | None:
        if not self._traceparent:
            return None
        attributes: dict[str, str | int | float] = {
            "outrider.base_length": state.length,
            "outrider.drafter": plan.drafter,
            "outrider.num_speculative_tokens": plan.num_speculative_tokens,
            "outrider.plain_tokens": plan.plain_tokens,
            "outrider.reason": plan.reason,
        }
        return begin_work("outrider.round", self._traceparent, attributes)
