"""Owns the translation of a StepPlan into tensors: ids, positions, slots, and which keys each row may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.blocks import SCRATCH_BLOCK
from engine.planner import RowBudget, Span, StepPlan

KEY_MULTIPLE = 64  # key counts are padded to it; in reproducible mode it is part of a row's fixed shape


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
    """One forward's inputs. All row tensors have plan.rows entries, padding last.

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


def build_batch(plan: StepPlan, budget: RowBudget, block_size: int, device: torch.device) -> Batch:
    """Tensors for `plan`; pure, O(rows × keys)."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    groups: list[RowGroup] = []
    fixed_rows = plan.rows if budget.shapes else None
    for span in plan.spans:
        first_row = len(ids)
        ids += span.row_tokens
        positions += _positions(span)
        slots += [_slot(span.sequence.block_table, span.start + i, block_size) for i in range(span.num_rows)]
        logit_rows += range(first_row + span.num_rows - span.num_logits, first_row + span.num_rows)
        groups += _row_groups(span, first_row, fixed_rows, block_size)
    padding = plan.rows - len(ids)
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


def _slot(table: list[int], index: int, block_size: int) -> int:
    return table[index // block_size] * block_size + index % block_size


def _positions(span: Span) -> list[int]:
    """Rotary positions: committed rows at their index, a draft token one past its parent."""
    positions = list(range(span.start, span.start + span.num_catch_up))
    depth: list[int] = []
    for parent in span.proposal.parents if span.proposal else ():
        depth.append(depth[parent] + 1 if parent >= 0 else 1)
    return positions + [positions[-1] + d for d in depth]


def _row_groups(span: Span, first_row: int, fixed_rows: int | None, block_size: int) -> Iterator[RowGroup]:
    """One group per span; in reproducible mode one per padded key count, which must depend on the row alone.

    A CPU attention kernel sums over keys in an order that depends on their number (measured: 23 of 300 trials differ
    in the last bit when 64 more masked keys follow), so a row always sees round_up(own index + 1, KEY_MULTIPLE) keys.
    """
    last = span.start + span.num_rows
    table = torch.tensor(span.sequence.block_table + [SCRATCH_BLOCK] * (KEY_MULTIPLE // block_size + 1))
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


def _visible(span: Span, members: list[int], index: torch.Tensor) -> torch.Tensor:
    """bool [len(members), num_keys]: causal for committed rows and chains; a tree's node sees its ancestors only."""
    own = torch.tensor([span.start + i for i in members])
    visible = index[None, :] <= own[:, None]
    if span.proposal is None or span.proposal.is_chain:
        return visible
    base = span.start + span.num_catch_up
    for row, i in enumerate(members):
        node = i - span.num_catch_up
        if node < 0:
            continue
        visible[row] = index < base
        while node >= 0:
            visible[row, base + node] = True
            node = span.proposal.parents[node]
    return visible
