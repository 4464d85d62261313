"""Owns the gather + SDPA backend: collect each group's keys by slot, attend under a mask. The oracle everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.batch import Batch, RowGroup
from engine.kv_cache import KVCache


class GatherAttention:
    """Attention of one forward over paged KV.

    Args:
        cache: the pool.
        batch: the rows and what they may see.
        num_heads: query heads.

    Grouped-query heads are folded into the query rows (num_kv_heads heads × group·rows queries): keys are read once per
    group instead of once per query head, which halves the time of torch's CPU kernel at 8 rows.
    """

    name = "gather_sdpa"

    def __init__(self, cache: KVCache, batch: Batch, num_heads: int) -> None:
        self._cache, self._batch = cache, batch
        self._group = num_heads // cache.num_kv_heads
        self._biases = [self._bias(group, cache.dtype) for group in batch.groups]

    def _bias(self, group: RowGroup, dtype: torch.dtype) -> torch.Tensor:
        bias = torch.zeros(group.visible.shape, dtype=dtype, device=group.visible.device)
        return bias.masked_fill_(~group.visible, float("-inf")).repeat(self._group, 1)[None, None]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Writes this forward's keys and values, then attends.

        Args:
            layer: index of the layer.
            query: [1, num_heads, rows, head_dim], after rotary embedding.
            key, value: [1, num_kv_heads, rows, head_dim].
            scaling: factor on the scores.

        Returns:
            [1, rows, num_heads, head_dim]; rows of padding are zero.
        """
        self._cache.write(layer, self._batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        output = torch.zeros_like(query)
        for group, bias in zip(self._batch.groups, self._biases, strict=True):
            output[0, :, group.begin : group.end] = self._attend(layer, query[0], group, bias, scaling)
        return output.transpose(1, 2)

    def _attend(
        self, layer: int, query: torch.Tensor, group: RowGroup, bias: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        num_heads, _, head_dim = query.shape
        rows = query[:, group.begin : group.end]
        missing = group.padded_rows - rows.shape[1]
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
        keys = self._cache.keys[layer].index_select(0, group.key_slots).transpose(0, 1)
        values = self._cache.values[layer].index_select(0, group.key_slots).transpose(0, 1)
        folded = rows.reshape(1, num_heads // self._group, self._group * group.padded_rows, head_dim)
        out = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=bias, scale=scaling)
        return out.view(num_heads, group.padded_rows, head_dim)[:, : group.end - group.begin]
