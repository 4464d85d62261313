"""Owns the translation of a StepPlan into tensors: ids, positions, slots, and which keys each row may see.

In between stands StepRows: all that a forward needs of a plan, as integers, so that other ranks can be told it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch

from engine.blocks import SCRATCH_BLOCK
from engine.planner import Span, StepPlan
from engine.proposal import chain_parents

KEY_MULTIPLE = 64  # key counts are padded to it; in reproducible mode it is part of a row's fixed shape
_INT_BYTES = 4  # of a packed integer, which is an int32


@dataclass(frozen=True, slots=True)
class SpanRows:
    """The rows of one session.

    Attributes:
        tokens: committed tokens, then the proposal's; of a proposal that earlier forwards began, only the rest.
        start: slot of the first; those of the others follow.
        parents: of all the proposal's tokens. The last of them has the last slot.
        num_logits: how many of the last rows' logits are wanted.
        block_table: the session's blocks.
        trace: the session's, for whoever makes spans; no forward depends on it.
    """

    tokens: Sequence[int]
    start: int
    parents: tuple[int, ...]
    num_logits: int
    block_table: Sequence[int]
    trace: str = ""

    @classmethod
    def of(cls, span: Span) -> SpanRows:
        parents = span.proposal.parents if span.proposal else ()
        sequence = span.sequence
        return cls(span.row_tokens, span.start, parents, span.num_logits, sequence.block_table, sequence.trace)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def base(self) -> int:
        """Slot of the proposal's first token: as many tokens are committed."""
        return self.start + len(self.tokens) - len(self.parents)

    def packed(self) -> list[int]:
        counts = [len(self.tokens), len(self.parents), len(self.block_table), len(self.trace)]
        text = _packed_text(self.trace) if self.trace else ()
        return [*counts, self.start, self.num_logits, *self.tokens, *self.parents, *self.block_table, *text]

    @classmethod
    def unpacked(cls, values: Iterator[int]) -> SpanRows:
        num_tokens, num_parents, num_blocks, num_characters, start, num_logits = islice(values, 6)
        tokens, parents = list(islice(values, num_tokens)), tuple(islice(values, num_parents))
        blocks = list(islice(values, num_blocks))
        return cls(tokens, start, parents, num_logits, blocks, _unpacked_text(values, num_characters))


def _packed_text(text: str) -> tuple[int, ...]:
    """Four characters an integer, all of them ASCII, so that none is negative."""
    num_ints = -(-len(text) // _INT_BYTES)
    return struct.unpack(f"<{num_ints}i", text.encode("ascii").ljust(num_ints * _INT_BYTES, b"\0"))


def _unpacked_text(values: Iterator[int], num_characters: int) -> str:
    num_ints = -(-num_characters // _INT_BYTES)
    return struct.pack(f"<{num_ints}i", *islice(values, num_ints))[:num_characters].decode("ascii")


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward; `rows` counts padding too. Equal values make equal batches, on whichever rank."""

    spans: tuple[SpanRows, ...]
    rows: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepRows:
        return cls(tuple(SpanRows.of(span) for span in plan.spans), plan.rows)

    def packed(self) -> list[int]:
        return [self.rows, len(self.spans), *(value for span in self.spans for value in span.packed())]

    @classmethod
    def unpacked(cls, packed: Sequence[int]) -> StepRows:
        values = iter(packed)
        rows, num_spans = islice(values, 2)
        return cls(tuple(SpanRows.unpacked(values) for _ in range(num_spans)), rows)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one session that attend together.

    Attributes:
        begin, end: the rows, in the batch.
        padded_rows: query rows the attention is computed with.
        key_slots: int64 [num_keys], where the keys lie; padding points into the scratch block.
        visible: bool [padded_rows, num_keys]; padding rows see everything (any finite result will do).
    """

    begin: int
    end: int
    padded_rows: int
    key_slots: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward's inputs. All row tensors have as many entries as the step has rows, padding last.

    Attributes:
        input_ids, positions: int64 [1, rows].
        write_slots: int64 [rows], where each row's key and value go.
        groups: which rows attend to what.
        logit_rows: int64 [n], rows whose logits are wanted, span by span.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    groups: tuple[RowGroup, ...]
    logit_rows: torch.Tensor


def build_batch(step: StepRows, block_size: int, device: torch.device, *, fixed: bool) -> Batch:
    """Tensors for `step`; pure, O(rows × keys). `fixed` asks for the attention shapes of reproducible mode."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    groups: list[RowGroup] = []
    fixed_rows = step.rows if fixed else None
    for span in step.spans:
        first_row = len(ids)
        ids += span.tokens
        positions += _positions(span)
        slots += [_slot(span.block_table, span.start + i, block_size) for i in range(span.num_rows)]
        logit_rows += range(first_row + span.num_rows - span.num_logits, first_row + span.num_rows)
        groups += _row_groups(span, first_row, fixed_rows, block_size)
    padding = step.rows - len(ids)
    scratch = SCRATCH_BLOCK * block_size
    return Batch(
        input_ids=torch.tensor([ids + [0] * padding], device=device),
        positions=torch.tensor([positions + [0] * padding], device=device),
        write_slots=torch.tensor(slots + [scratch] * padding, device=device),
        groups=tuple(group_to(group, device) for group in groups),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def group_to(group: RowGroup, device: torch.device) -> RowGroup:
    return RowGroup(group.begin, group.end, group.padded_rows, group.key_slots.to(device), group.visible.to(device))


def _slot(table: Sequence[int], index: int, block_size: int) -> int:
    return table[index // block_size] * block_size + index % block_size


def _positions(span: SpanRows) -> list[int]:
    """Rotary positions: committed rows at their index, a draft token one past its parent."""
    depth: list[int] = []
    for parent in span.parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 1)
    drafted = [span.base - 1 + d for d in depth[max(span.start - span.base, 0) :]]
    return [*range(span.start, span.base), *drafted]


def _row_groups(span: SpanRows, first_row: int, fixed_rows: int | None, block_size: int) -> Iterator[RowGroup]:
    """One group per span; in reproducible mode one per padded key count, which must depend on the row alone.

    A CPU attention kernel sums over keys in an order that depends on their number (measured: 23 of 300 trials differ
    in the last bit when 64 more masked keys follow), so a row always sees round_up(own index + 1, KEY_MULTIPLE) keys.
    """
    last = span.start + span.num_rows
    table = torch.tensor([*span.block_table, *[SCRATCH_BLOCK] * (KEY_MULTIPLE // block_size + 1)])
    for num_keys, rows in groupby(
        range(span.num_rows), key=lambda i: _round_up(span.start + i + 1) if fixed_rows else _round_up(last)
    ):
        members = list(rows)
        index = torch.arange(num_keys)
        key_slots = table[(index // block_size).clamp(max=len(table) - 1)] * block_size + index % block_size
        padded = fixed_rows or len(members)
        visible = torch.ones((padded, num_keys), dtype=torch.bool)
        visible[: len(members)] = _visible(span, members, index)
        yield RowGroup(first_row + members[0], first_row + members[-1] + 1, padded, key_slots, visible)


def _round_up(count: int) -> int:
    return -(-count // KEY_MULTIPLE) * KEY_MULTIPLE


def _visible(span: SpanRows, members: list[int], index: torch.Tensor) -> torch.Tensor:
    """bool [len(members), num_keys]: causal for committed rows and chains; a tree's node sees its ancestors only."""
    own = torch.tensor([span.start + i for i in members])
    visible = index[None, :] <= own[:, None]
    if span.parents == chain_parents(len(span.parents)):
        return visible
    for row, i in enumerate(members):
        node = span.start + i - span.base
        if node < 0:
            continue
        visible[row] = index < span.base
        while node >= 0:
            visible[row, span.base + node] = True
            node = span.parents[node]
    return visible
