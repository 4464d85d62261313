"""Owns the choice of rows for the next forward. Torch-free, deterministic, changes nothing but block tables.

Reproducible mode (docs/design.md §6): a forward has one of two fixed row counts, one for prompt positions, one for
generated positions; the two kinds never share a forward. Otherwise kinds mix freely up to a row budget.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
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
        start: position of the first row.
        num_catch_up: rows of committed tokens.
        proposal: verified in this forward; None when only catching up, or nothing is proposed.
        completes: the last committed token is among the rows, so its logits (and the proposal's) are wanted.
    """

    key: int
    sequence: Sequence
    start: int
    num_catch_up: int
    proposal: Proposal | None
    completes: bool

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.proposal.tokens if self.proposal else ()

    @property
    def num_rows(self) -> int:
        return self.num_catch_up + len(self.draft_tokens)

    @property
    def row_tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.num_catch_up] + list(self.draft_tokens)

    @property
    def num_logits(self) -> int:
        return 1 + len(self.draft_tokens) if self.completes else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward computes. `rows` includes padding."""

    kind: Kind
    spans: tuple[Span, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A session that wants rows: `proposal` (maybe None) is to be judged once all committed tokens are computed."""

    key: int
    sequence: Sequence
    proposal: Proposal | None = None


def plan_step(
    demands: Iterable[Demand],
    budget: RowBudget,
    pool: BlockPool,
    *,
    last_kind: Kind,
    preempt: Callable[[Sequence], bool],
) -> StepPlan | None:
    """Fills one forward, demands in the order given.

    Args:
        demands: who wants rows; the caller rotates the order for fairness.
        last_kind: kind of the forward before; when both kinds wait they alternate.
        preempt: frees the blocks of some other session than the given one; False when none has any.

    Returns:
        The plan, or None when nobody wants rows (or none can have blocks).
    """
    waiting = list(demands)
    kinds = {budget.kind_of(demand.sequence) for demand in waiting}
    for kind in sorted(kinds, key=lambda k: (k is last_kind, k is Kind.PROMPT)):
        spans: list[Span] = []
        room = budget.limit(kind)
        for demand in waiting:
            if room == 0:
                break
            if budget.kind_of(demand.sequence) is not kind:
                continue
            span = _fit(demand, kind, room)
            if span is not None and _reserve(span, pool, preempt, alone=not spans):
                spans.append(span)
                room -= span.num_rows
        if spans:
            return StepPlan(kind, tuple(spans), budget.padded(kind, sum(s.num_rows for s in spans)))
    return None


def _fit(demand: Demand, kind: Kind, room: int) -> Span | None:
    """The rows of one demand that fit in `room`. A proposal goes in whole or waits for the next forward."""
    sequence = demand.sequence
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


def _reserve(span: Span, pool: BlockPool, preempt: Callable[[Sequence], bool], *, alone: bool) -> bool:
    """Blocks for the span's rows; the first span of a plan may preempt others for them."""
    num_tokens = span.start + span.num_rows
    while not span.sequence.reserve(pool, num_tokens):
        if not alone or not preempt(span.sequence):
            return False
    return True
