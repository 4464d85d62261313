"""Owns running a frozen Llama target in large CPU batches: prefill, batched decoding and hidden states.

Distillation needs the target's own continuations by the hundred thousand tokens, which is a throughput problem,
not a latency one: every row of the batch is at its own position, rows are refilled as soon as they finish, and
weights are packed once for oneDNN. It stays apart from the serving engine because it needs neither paging nor
scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from engine.linear import PackedLinear, packing_pays

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Keys and values of one sequence, per layer, [kv_heads, length, head_dim] each."""

KEY_BLOCK = 32
"""Key positions by which the cache of :class:`TargetBatch` grows and shrinks."""


def packed_linear(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """A linear map [rows, in] -> [rows, out] whose weight [out, in] is packed once where oneDNN can do so.

    ``rows`` is the row count the packing is optimised for; other row counts work as well.
    """
    return PackedLinear(weight, None, rows) if packing_pays(weight) else lambda x: F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's RMS norm over the last dimension, computed in float32 and returned in the type of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def head_size(config: LlamaConfig) -> int:
    """Size of one attention head."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


def key_value_heads(config: LlamaConfig) -> int:
    """Number of key-value heads."""
    return config.num_key_value_heads or config.num_attention_heads


def rotary_table(config: LlamaConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the plain rotary embedding, as transformers' Llama uses it."""
    rope = config.rope_parameters
    if rope is None or rope.get("rope_type", "default") != "default":
        raise ValueError(f"only the default rotary embedding can be distilled, not {rope}")
    head_dim = head_size(config)
    base: Any = rope["rope_theta"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angle = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / float(base) ** exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads ``x`` [rows, heads, head_dim] by the angles of their rows, ``cos``/``sin`` [rows, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class TargetLayer:
    """One decoder layer with fused, packed projections."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, rows: int) -> None:
        def take(name: str) -> Tensor:
            return weights[f"{prefix}.{name}.weight"]

        attention = [take(f"self_attn.{name}_proj") for name in "qkv"]
        self.qkv = packed_linear(torch.cat(attention), rows)
        self.out = packed_linear(take("self_attn.o_proj"), rows)
        self.gate_up = packed_linear(torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")]), rows)
        self.down = packed_linear(take("mlp.down_proj"), rows)
        self.input_norm = take("input_layernorm")
        self.mlp_norm = take("post_attention_layernorm")


class TargetModel:
    """The target's weights and its per-layer arithmetic on flat rows; it holds no keys or values.

    ``folder`` is a Hugging Face folder of a Llama model with tied embeddings; ``rows`` is the batch its linear
    maps are packed for; ``dtype`` replaces the type the weights are stored in.
    """

    def __init__(self, folder: Path, rows: int = 64, dtype: torch.dtype | None = None) -> None:
        self.config = load_target_config(folder)
        weights = load_target_weights(folder)
        dtype = dtype or weights["model.embed_tokens.weight"].dtype
        weights = {name: value.to(dtype) for name, value in weights.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.final_norm = weights["model.norm.weight"]
        self.head = packed_linear(self.embedding, rows)
        self.layers = [
            TargetLayer(weights, f"model.layers.{index}", rows) for index in range(self.config.num_hidden_layers)
        ]
        self.cos, self.sin = rotary_table(self.config, self.config.max_position_embeddings, dtype)
        self.eps = float(self.config.rms_norm_eps)

    def heads(self, layer: TargetLayer, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [rows, heads, head_dim], rotated keys and values [rows, kv_heads, head_dim]."""
        kv_heads = key_value_heads(self.config)
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, self.eps)).view(len(hidden), -1, head_size(self.config))
        queries, keys, values = qkv.split([self.config.num_attention_heads, kv_heads, kv_heads], dim=1)
        cos, sin = self.cos[positions], self.sin[positions]
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def finish_layer(self, layer: TargetLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output map, residuals and MLP: ``hidden`` [rows, hidden] and ``attended`` [rows, heads * head_dim]."""
        hidden = hidden + layer.out(attended)
        gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, self.eps)).chunk(2, dim=-1)
        return hidden + layer.down(F.silu(gate) * up)

    def read(self, tokens: Sequence[int], known: KeysAndValues | None = None) -> tuple[Tensor, KeysAndValues]:
        """Runs one whole sequence: final normed hidden states and per layer its keys and values.

        Keys and values are [kv_heads, length, head_dim] each. ``known`` holds those of a leading part, which is
        then not computed again: hidden states [length - known length, hidden] are those of the rest.
        """
        start = known[0][0].shape[1] if known else 0
        hidden = self.embedding[torch.tensor(list(tokens[start:]))]
        positions = torch.arange(start, len(tokens))
        causal = torch.arange(len(tokens))[None, :] <= positions[:, None]
        kept = []
        for index, layer in enumerate(self.layers):
            queries, keys, values = self.heads(layer, hidden, positions)
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
            if known:
                keys = torch.cat((known[index][0], keys), dim=1)
                values = torch.cat((known[index][1], values), dim=1)
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=causal, enable_gqa=True
            )
            hidden = self.finish_layer(layer, hidden, attended[0].transpose(0, 1).flatten(1))
            kept.append((keys, values))
        return rms_norm(hidden, self.final_norm, self.eps), kept


class TargetBatch:
    """Keys and values of up to ``rows`` sequences that decode together, each at its own length."""

    def __init__(self, model: TargetModel, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.lengths = [0] * rows
        config = model.config
        self._kv_heads = key_value_heads(config)
        self._shape = (rows * self._kv_heads, head_size(config))
        self._group = config.num_attention_heads // self._kv_heads
        self._capacity = 0
        self._last_tokens: Sequence[int] = ()
        self._last_kept: KeysAndValues = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def admit(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Reads ``tokens`` into ``row`` and returns the next token's logits [vocabulary].

        What ``tokens`` shares with the sequence admitted before, such as a system message, is not computed again.
        """
        shared = min(common_prefix(self._last_tokens, tokens), len(tokens) - 1)
        known = [(keys[:, :shared], values[:, :shared]) for keys, values in self._last_kept] if shared else None
        final, kept = self.model.read(tokens, known)
        self._last_tokens, self._last_kept = tokens, kept
        self._fit(max(len(tokens), *self.lengths))
        place = slice(row * self._kv_heads, (row + 1) * self._kv_heads)
        for index, (keys, values) in enumerate(kept):
            self._keys[index][place, : len(tokens)] = keys
            self._values[index][place, : len(tokens)] = values
        self.lengths[row] = len(tokens)
        return self.model.head(final[-1:])[0]

    def release(self, row: int) -> None:
        """Forgets the sequence in ``row``; the row still takes part in forwards, at length 0."""
        self.lengths[row] = 0

    def decode(self, tokens: Tensor) -> Tensor:
        """Appends one token to every row and returns the logits [rows, vocabulary] that follow."""
        self._fit(max(self.lengths) + 1)
        positions = torch.tensor(self.lengths)
        model = self.model
        slots = torch.arange(self.rows * self._kv_heads)
        at = positions.repeat_interleave(self._kv_heads)
        hidden = model.embedding[tokens]
        hidden_keys = torch.arange(self._capacity)[None, None, :] > at[:, None, None]
        mask = torch.zeros(hidden_keys.shape, dtype=hidden.dtype).masked_fill_(hidden_keys, float("-inf"))
        scale = head_size(model.config) ** -0.5
        for index, layer in enumerate(model.layers):
            queries, keys, values = model.heads(layer, hidden, positions)
            self._keys[index][slots, at] = keys.flatten(0, 1)
            self._values[index][slots, at] = values.flatten(0, 1)
            grouped = (queries * scale).view(len(slots), self._group, -1)
            scores = torch.bmm(grouped, self._keys[index].transpose(1, 2)) + mask
            attended = torch.bmm(scores.softmax(-1), self._values[index]).view(self.rows, -1)
            hidden = model.finish_layer(layer, hidden, attended)
        self.lengths = [length + 1 if length else 0 for length in self.lengths]
        return model.head(rms_norm(hidden, model.final_norm, model.eps))

    def _fit(self, length: int) -> None:
        """Resizes the cache to the next multiple of ``KEY_BLOCK`` that holds ``length`` keys."""
        capacity = -(-length // KEY_BLOCK) * KEY_BLOCK
        if capacity == self._capacity:
            return
        slots, head_dim = self._shape
        kept = min(capacity, self._capacity)
        for store in (self._keys, self._values):
            for index in range(len(self.model.layers)):
                resized = torch.zeros(slots, capacity, head_dim, dtype=self.model.embedding.dtype)
                if kept:
                    resized[:, :kept] = store[index][:, :kept]
                if self._capacity:
                    store[index] = resized
                else:
                    store.append(resized)
        self._capacity = capacity


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens two sequences share."""
    for at, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return at
    return min(len(first), len(second))


def load_target_config(folder: Path) -> LlamaConfig:
    """Reads the target's configuration; raises ValueError where the draft format could not describe it."""
    config = LlamaConfig.from_pretrained(folder)
    if config.model_type != "llama" or not config.tie_word_embeddings:
        raise ValueError(f"{folder}: the target must be a Llama model with tied embeddings")
    if config.attention_bias or config.mlp_bias:
        raise ValueError(f"{folder}: targets with biases in their linear maps cannot be distilled")
    return config


def load_target_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of the target by their Hugging Face names, from every safetensors file of the folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return weights


def load_target_embedding(folder: Path) -> Tensor:
    """The target's frozen, tied embedding [vocabulary, hidden] in the type it is stored in."""
    return load_target_weights(folder)["model.embed_tokens.weight"]
