"""What a forward is made of: kinds, budgets, proposals whole or not at all, and determinism."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.planner import Demand, Kind, RowBudget, RowShapes, StepPlan, plan_step
from engine.proposal import Proposal, State
from engine.sequence import Sequence

SHAPES = RowBudget(256, RowShapes(prompt_rows=16, generated_rows=8))
FREE = RowBudget(32, pad_to=4)


def sequence(length: int, num_prompt: int, computed: int) -> Sequence:
    return Sequence(list(range(length)), num_prompt, computed)


def plan(demands: list[Demand], budget: RowBudget, last: Kind = Kind.GENERATED) -> StepPlan | None:
    pool = BlockPool(200, 4)
    for demand in demands:
        assert demand.sequence.reserve(pool, demand.sequence.num_computed)
    return plan_step(demands, budget, pool, last_kind=last, preempt=lambda _: False)


def chain(length: int, tokens: int) -> Proposal:
    return Proposal.chain(State(length), [3] * tokens)


def test_kinds_never_share_a_forward_and_take_turns():
    demands = [Demand(1, sequence(20, 20, 0)), Demand(2, sequence(9, 5, 8), chain(9, 3))]
    first = plan(copy.deepcopy(demands), SHAPES, last=Kind.GENERATED)
    assert (first.kind, [s.key for s in first.spans], first.rows) == (Kind.PROMPT, [1], 16)
    second = plan(copy.deepcopy(demands), SHAPES, last=Kind.PROMPT)
    assert (second.kind, [s.key for s in second.spans], second.rows) == (Kind.GENERATED, [2], 8)


def test_a_proposal_goes_in_whole_or_waits():
    demands = [Demand(k, sequence(9, 5, 8), chain(9, 4)) for k in (1, 2)] + [Demand(3, sequence(9, 5, 8))]
    planned = plan(demands, SHAPES)
    assert [(s.key, s.num_rows) for s in planned.spans] == [(1, 5), (3, 1)]


def test_catching_up_leaves_the_last_token_for_the_forward_that_judges():
    planned = plan([Demand(1, sequence(12, 5, 8), chain(12, 6))], SHAPES)
    (span,) = planned.spans
    assert (span.num_rows, span.completes, span.num_logits) == (3, False, 0)


def test_a_resumed_sequence_stops_at_the_end_of_its_prompt():
    planned = plan([Demand(1, sequence(12, 5, 0))], SHAPES)
    (span,) = planned.spans
    assert (planned.kind, span.num_rows, span.completes) == (Kind.PROMPT, 5, False)


def test_without_shapes_kinds_mix_and_rows_are_padded():
    planned = plan([Demand(1, sequence(20, 20, 0)), Demand(2, sequence(9, 5, 8))], FREE)
    assert (planned.kind, [s.num_rows for s in planned.spans], planned.rows) == (Kind.MIXED, [20, 1], 24)


def test_only_the_first_span_preempts():
    pool = BlockPool(4, 4)
    victim = sequence(12, 12, 0)
    assert victim.reserve(pool, 12)
    asked: list[Sequence] = []

    def preempt(needy: Sequence) -> bool:
        asked.append(needy)
        if not victim.block_table:
            return False
        victim.release(pool)
        return True

    first, second = sequence(8, 8, 0), sequence(8, 8, 0)
    planned = plan_step([Demand(1, first), Demand(2, second)], FREE, pool, last_kind=Kind.MIXED, preempt=preempt)
    assert [s.key for s in planned.spans] == [1]
    assert asked == [first]


def test_nobody_waiting_is_no_plan():
    assert plan([], SHAPES) is None


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 7)), min_size=1, max_size=8),
    st.sampled_from([SHAPES, FREE]),
)
def test_every_plan_keeps_its_promises(raw, budget):
    demands = []
    for key, (prompt, generated, drafts) in enumerate(raw):
        length = prompt + generated
        demands.append(Demand(key, sequence(length, prompt, (key * 7) % length), chain(length, drafts)))
    planned = plan(copy.deepcopy(demands), budget)
    assert planned is not None
    assert planned == plan(copy.deepcopy(demands), budget)
    rows = sum(s.num_rows for s in planned.spans)
    assert 0 < rows <= budget.limit(planned.kind)
    assert rows <= planned.rows
    for span in planned.spans:
        assert len(span.row_tokens) == span.num_rows > 0
        assert len(span.sequence.block_table) * 4 >= span.start + span.num_rows
        if planned.kind is Kind.PROMPT:
            assert span.start + span.num_catch_up <= span.sequence.num_prompt
        if planned.kind is Kind.GENERATED:
            assert span.start >= span.sequence.num_prompt
        if span.completes:
            assert span.start + span.num_catch_up == len(span.sequence.tokens)
