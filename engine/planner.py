"""Owns the choice of rows for the next forward, and of who has blocks. Torch-free and deterministic.

Reproducible mode (docs/design.md §6): a forward has one of two fixed row counts, one for prompt positions, one for
generated positions; the two kinds never share a forward. Otherwise kinds mix freely up to a row budget.

Blocks go by rank, so that more sessions than the pool holds cannot take blocks from each other for ever: a sequence
starts with blocks for all its tokens or waits, none starts before one ahead of it, and whoever needs more takes them
from those behind it. The first in rank therefore always gets on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.proposal import Proposal
from engine.sequence import Sequence


class Kind(enum.Enum):
    """Which positions a forward computes."""

    PROMPT = "prompt"
    GENERATED = "generated"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class RowShapes:
    """Fixed row counts of reproducible mode: rows of a forward over prompt and over generated positions."""

    prompt_rows: int = 64
    generated_rows: int = 8


@dataclass(frozen=True, slots=True)
class RowBudget:
    """Most rows of one forward: two fixed counts, or one budget for any mix, padded to a multiple of `pad_to`."""

    max_rows: int
    shapes: RowShapes | None = None
    pad_to: int = 1

    @property
    def max_proposal_tokens(self) -> int:
        """Most draft tokens one session can have verified in one forward."""
        return (self.shapes.generated_rows if self.shapes else self.max_rows) - 1

    def limit(self, kind: Kind) -> int:
        if self.shapes is None:
            return self.max_rows
        return self.shapes.prompt_rows if kind is Kind.PROMPT else self.shapes.generated_rows

    def padded(self, kind: Kind, rows: int) -> int:
        return self.limit(kind) if self.shapes else -(-rows // self.pad_to) * self.pad_to

    def kind_of(self, sequence: Sequence) -> Kind:
        if self.shapes is None:
            return Kind.MIXED
        return Kind.PROMPT if sequence.num_computed < sequence.num_prompt else Kind.GENERATED


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one session in a forward: committed tokens from `start` on, then the proposal's.

    Attributes:
        key: the session's id.
        sequence: whose KV is written.
        start: slot of the first row: its position in the sequence, or in the tree that follows it.
        num_catch_up: rows of committed tokens.
        proposal: computed in this forward; None when only catching up, or nothing is proposed.
        completes: the last committed token is among the rows or before them, so its logits (and the proposal's) are
            wanted.
        num_done: tokens of the proposal that were computed before, the first ones; None where they come behind the
            last committed token in one forward.
    """

    key: int
    sequence: Sequence
    start: int
    num_catch_up: int
    proposal: Proposal | None
    completes: bool
    num_done: int | None = None

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.proposal.tokens[self.num_done or 0 :] if self.proposal else ()

    @property
    def num_rows(self) -> int:
        return self.num_catch_up + len(self.draft_tokens)

    @property
    def row_tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_catch_up] + list(self.draft_tokens)

    @property
    def num_logits(self) -> int:
        return min(self.num_catch_up, 1) + len(self.draft_tokens) if self.completes else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward computes. `rows` includes padding."""

    kind: Kind
    spans: tuple[Span, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A session that wants rows.

    Attributes:
        proposal: to be computed once all committed tokens are.
        num_done: of its tokens, computed by earlier forwards, as are all committed tokens: then the rows run ahead,
            and take what room and blocks are left over. None otherwise.
    """

    key: int
    sequence: Sequence
    proposal: Proposal | None = None
    num_done: int | None = None


def plan_step(
    demands: Iterable[Demand],
    budget: RowBudget,
    pool: BlockPool,
    ranking: Mapping[int, Sequence],
    *,
    last_kind: Kind,
) -> StepPlan | None:
    """Fills one forward, demands in the order given.

    Args:
        demands: who wants rows; the caller rotates the order for fairness.
        ranking: every open session's sequence, the first to have blocks first.
        last_kind: kind of the forward before; when both kinds wait they alternate.

    Returns:
        The plan, or None when nobody wants rows, or whoever does has to wait for blocks.
    """
    asking = {demand.key: demand for demand in demands}
    _start(asking, pool, ranking)
    waiting = [demand for demand in asking.values() if demand.sequence.block_table]
    kinds = {budget.kind_of(demand.sequence) for demand in waiting}
    for kind in sorted(kinds, key=lambda k: (k is last_kind, k is Kind.PROMPT)):
        spans: list[Span] = []
        room = budget.limit(kind)
        for demand in waiting:
            if room == 0:
                break
            if not demand.sequence.block_table or budget.kind_of(demand.sequence) is not kind:
                continue
            span = _fit(demand, kind, room)
            # Only the first span takes blocks from others, who might be in the plan already.
            if span is not None and _reserve(span, pool, {} if spans or demand.num_done is not None else ranking):
                spans.append(span)
                room -= span.num_rows
        if spans:
            return StepPlan(kind, tuple(spans), budget.padded(kind, sum(s.num_rows for s in spans)))
    return None


def _start(asking: Mapping[int, Demand], pool: BlockPool, ranking: Mapping[int, Sequence]) -> None:
    """Gives blocks to those that ask and have none, and leaves each running sequence one to grow into."""
    running = sum(1 for sequence in ranking.values() if sequence.block_table)
    for key, sequence in ranking.items():
        if key not in asking or sequence.block_table:
            continue
        while not sequence.start(pool, keep_free=running):
            if not _preempt_behind(key, ranking, pool):
                return
            running -= 1
        running += 1


def _fit(demand: Demand, kind: Kind, room: int) -> Span | None:
    """The rows of one demand that fit in `room`. A proposal goes in whole or waits for the next forward."""
    sequence = demand.sequence
    if demand.num_done is not None and demand.proposal is not None:
        begin = demand.proposal.base.length + demand.num_done
        span = Span(demand.key, sequence, begin, 0, demand.proposal, completes=True, num_done=demand.num_done)
        return span if span.num_rows <= room else None
    start = sequence.num_computed
    end = sequence.num_prompt if kind is Kind.PROMPT else len(sequence.tokens)
    catch_up = end - start
    if end < len(sequence.tokens) or catch_up > room:
        return Span(demand.key, sequence, start, min(catch_up, room), None, completes=False)
    draft_rows = len(demand.proposal.tokens) if demand.proposal else 0
    if catch_up + draft_rows <= room:
        return Span(demand.key, sequence, start, catch_up, demand.proposal, completes=True)
    if catch_up > 1:
        return Span(demand.key, sequence, start, catch_up - 1, None, completes=False)
    return None


def _reserve(span: Span, pool: BlockPool, ranking: Mapping[int, Sequence]) -> bool:
    """Blocks for the span's rows, if need be those of sequences behind it in `ranking`."""
    while not span.sequence.reserve(pool, span.start + span.num_rows):
        if not _preempt_behind(span.key, ranking, pool):
            return False
    return True


def _preempt_behind(key: int, ranking: Mapping[int, Sequence], pool: BlockPool) -> bool:
    """Takes the blocks of the last in rank that has any; False when that is not behind `key`. Its tokens stay."""
    for other, sequence in reversed(list(ranking.items())):
        if other == key:
            return False
        if sequence.block_table:
            sequence.release(pool)
            return True
    return False
