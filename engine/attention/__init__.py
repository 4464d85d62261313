"""Paged attention behind one interface: a batch says what is read and written, backends only compute.

Owns the choice of backend, made once at start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.attention.flex import FlexAttention
from engine.attention.gather import GatherAttention
from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.settings import Backend


class PagedAttention(Protocol):
    """Attention of one forward; see GatherAttention.__call__ for shapes."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor: ...


MakeAttention = Callable[[KVCache, Batch], PagedAttention]


def choose_attention(backend: Backend, device: torch.device, num_heads: int) -> tuple[str, MakeAttention]:
    """The backend's name, and what makes its attention for one forward; "auto" is flex on CUDA, else gather."""
    if backend == "flex" or (backend == "auto" and device.type == "cuda"):
        return FlexAttention.name, FlexAttention
    return GatherAttention.name, lambda cache, batch: GatherAttention(cache, batch, num_heads)
