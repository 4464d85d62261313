"""Owns the forward of one model: transformers' own definition, our attention, logits for chosen rows.

Loading lives in engine.loading. Our attention is registered with transformers under one name and finds the forward's
paged attention in a keyword argument that model code passes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.attention import MakeAttention, PagedAttention
from engine.batch import Batch
from engine.kv_cache import KVCache

ATTENTION_NAME = "outrider_paged"


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    paged: PagedAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. The mask argument is None for a name it does not know; ours is in `paged`."""
    return paged(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the KV cache and the attention need to know of a model, or of one rank's part of it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]

    def part(self, size: int) -> ModelShape:
        """Of one of `size` ranks, each with its own heads; `size` divides them."""
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=self.num_kv_heads // size)


class LanguageModel:
    """A decoder and its head.

    Args:
        decoder: transformers base model (returns last_hidden_state), attention implementation ATTENTION_NAME.
        head: hidden [n, hidden] → logits [n, head_vocab].
        shape: the model's dimensions.
        head_token_ids: int64 [head_vocab], the token each logit is for; None when logits are for ids 0, 1, ….
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: Callable[[torch.Tensor], torch.Tensor],
        shape: ModelShape,
        head_token_ids: torch.Tensor | None = None,
    ) -> None:
        self.decoder, self.head, self.shape, self.head_token_ids = decoder, head, shape, head_token_ids

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, attend: MakeAttention, head_rows: int | None) -> torch.Tensor:
        """Runs one forward.

        Args:
            batch: the rows.
            cache: read and written.
            attend: makes the forward's attention.
            head_rows: fixed number of rows the head is computed with (reproducible mode); None takes what there is.

        Returns:
            logits [len(batch.logit_rows), head_vocab] in the model's dtype.
        """
        output = self.decoder(
            batch.input_ids, position_ids=batch.positions, use_cache=False, paged=attend(cache, batch)
        )
        hidden = output.last_hidden_state[0].index_select(0, batch.logit_rows)
        if head_rows is None or not len(hidden):
            return self.head(hidden)
        return torch.cat([self._head_padded(part, head_rows) for part in hidden.split(head_rows)])

    def _head_padded(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, rows - len(hidden)))
        return self.head(padded)[: len(hidden)]
