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
        assert demand.sequence.reserve(pool, len(demand.sequence.tokens))
    return plan_step(demands, budget, pool, {d.key: d.sequence for d in demands}, last_kind=last)


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


def test_whoever_needs_a_block_takes_it_from_the_last_in_rank():
    pool = BlockPool(7, 4)
    ranking = {key: sequence(length, 4, length - 1) for key, length in ((1, 8), (2, 8), (3, 8))}
    for each in ranking.values():
        assert each.reserve(pool, 8)  # the pool is full, and each fills its blocks
    demands = [Demand(2, ranking[2], chain(8, 2)), Demand(1, ranking[1], chain(8, 2)), Demand(3, ranking[3])]
    planned = plan_step(demands, FREE, pool, ranking, last_kind=Kind.MIXED)
    assert [s.key for s in planned.spans] == [2, 1]  # 3 gave its two blocks, one to each
    assert (ranking[3].block_table, ranking[3].num_computed) == ([], 0)


def test_the_last_in_rank_waits_for_blocks():
    pool = BlockPool(5, 4)
    ranking = {key: sequence(8, 4, 7) for key in (1, 2)}
    for each in ranking.values():
        assert each.reserve(pool, 8)
    assert plan_step([Demand(2, ranking[2], chain(8, 2))], FREE, pool, ranking, last_kind=Kind.MIXED) is None
    assert len(ranking[1].block_table) == len(ranking[2].block_table) == 2


def test_only_the_first_span_takes_blocks_from_others():
    """The others might take them from a sequence that is in the plan."""
    pool = BlockPool(5, 4)
    ranking = {key: sequence(8, 4, 7) for key in (1, 2)}
    for each in ranking.values():
        assert each.reserve(pool, 8)
    demands = [Demand(2, ranking[2]), Demand(1, ranking[1], chain(8, 2))]
    assert [s.key for s in plan_step(demands, FREE, pool, ranking, last_kind=Kind.MIXED).spans] == [2]
    assert [s.key for s in plan_step(demands[1:], FREE, pool, ranking, last_kind=Kind.MIXED).spans] == [1]
    assert ranking[2].block_table == []


def test_nobody_starts_before_one_that_ranks_higher():
    """It leaves each that runs a block to grow into, and a small one must not pass a large one for ever."""
    pool = BlockPool(8, 4)
    ranking = {1: sequence(8, 8, 0), 2: sequence(20, 20, 0), 3: sequence(4, 4, 0)}
    assert ranking[1].start(pool)
    demands = [Demand(key, ranking[key]) for key in (3, 2)]
    assert plan_step(demands, FREE, pool, ranking, last_kind=Kind.MIXED) is None
    ranking[1].release(pool)
    assert [s.key for s in plan_step(demands, FREE, pool, ranking, last_kind=Kind.MIXED).spans] == [3, 2]


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
