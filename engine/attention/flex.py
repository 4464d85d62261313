"""Owns the FlexAttention backend: attends to KV where it lies, by a block mask over slots. For CUDA, trees included.

The whole pool is one long key sequence; a row sees the slots of its own session that the batch lists for it, and kernel
blocks that no row sees are skipped (PyTorch FlexAttention, arXiv 2412.05496). Nothing is gathered or copied.
"""

from __future__ import annotations

from functools import cache as once

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from engine.batch import Batch
from engine.kv_cache import KVCache

MASK_BLOCK = 128  # rows and slots per block of the mask, the kernel's own tile


@once
def _compiled() -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(flex_attention, dynamic=True)  # type: ignore[assignment]
    return compiled


class FlexAttention:
    """Attention of one forward over paged KV, one kernel for all sessions.

    Args:
        cache: the pool.
        batch: the rows and what they may see.
    """

    name = "flex"

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self._cache, self._batch = cache, batch
        visible = _visible_slots(cache, batch)
        self._mask = create_block_mask(
            lambda _b, _h, row, slot: visible[row, slot],
            B=None,
            H=None,
            Q_LEN=visible.shape[0],
            KV_LEN=visible.shape[1],
            device=str(visible.device),
            BLOCK_SIZE=MASK_BLOCK,
        )

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """As GatherAttention.__call__; rows of padding hold finite values that nobody reads."""
        self._cache.write(layer, self._batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys = self._cache.keys[layer].transpose(0, 1)[None]
        values = self._cache.values[layer].transpose(0, 1)[None]
        attend = _compiled() if query.is_cuda else flex_attention
        output: torch.Tensor = attend(
            query, keys, values, block_mask=self._mask, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
        )
        return output.transpose(1, 2)


def _visible_slots(cache: KVCache, batch: Batch) -> torch.Tensor:
    """bool [rows, num_slots]. Padding rows see one scratch slot, because a row that sees nothing is undefined."""
    rows, num_slots = len(batch.write_slots), len(cache.keys[0])
    visible = torch.zeros((rows, num_slots), dtype=torch.bool, device=batch.write_slots.device)
    visible[:, 0] = True
    for group in batch.groups:
        visible[group.begin : group.end, 0] = False
        # Scratch slots repeat among the padding keys, always invisible there: a maximum keeps what a real key said.
        part = visible[group.begin : group.end].to(torch.uint8)
        index = group.key_slots.expand(group.end - group.begin, -1)
        seen = group.visible[: group.end - group.begin].to(torch.uint8)
        visible[group.begin : group.end] = part.scatter_reduce(1, index, seen, "amax").bool()
    return visible
