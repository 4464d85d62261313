"""Owns the KV tensors of one engine. Which slot belongs to whom is engine.blocks' business."""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of every layer.

    Shapes: per layer one `keys` and one `values` tensor [num_slots, num_kv_heads, head_dim]; slot s is block
    s // block_size, offset s % block_size. Zero-filled, because masked slots are still multiplied (by zero).
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [rows, num_kv_heads, head_dim] at `slots` [rows]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies slots [n] to slots [n] in all layers, as if all at once: the two may overlap."""
        for each in (*self.keys, *self.values):
            each.index_copy_(0, destinations, each.index_select(0, sources))
