"""Owns the draft model while it is trained: its layers, its reduced head and how it starts from the target.

Sequences are packed: all of a batch lie one after the other in one row dimension, only attention looks at them one
by one. The last layer computes queries, output map and MLP only where a prediction is wanted; for the prompt it
stops at keys and values, which makes a prompt token several times cheaper than a predicted one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from engine.distill.target import head_size, key_value_heads, rotary_table, rotate


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences behind each other, and at which of their rows the next token is to be predicted.

    In every sequence the predicted rows are its last ones.
    """

    tokens: Tensor
    """Token ids of all sequences, int64 [rows]."""
    lengths: list[int]
    """Length of each sequence; they sum to rows."""
    predicted: list[int]
    """Number of predicted rows of each sequence, at its end."""

    def positions(self) -> Tensor:
        """Position of every row within its sequence, int64 [rows]."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def predicted_rows(self) -> Tensor:
        """Rows at which a prediction is wanted, int64 [sum of ``predicted``]."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        spans = zip(ends, self.predicted, strict=True)
        return torch.cat([torch.arange(end - count, end) for end, count in spans])


class Linear(nn.Module):
    """A linear map with a float32 weight [out, in] that multiplies in ``compute_type``."""

    def __init__(self, inputs: int, outputs: int, compute_type: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self._compute_type = compute_type

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out] in the compute type."""
        return F.linear(x.to(self._compute_type), self.weight.to(self._compute_type))


class Norm(nn.Module):
    """RMS norm over the last dimension with a float32 scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Float32 [rows, size] → float32 [rows, size]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.weight


class Attention(nn.Module):
    """Grouped-query attention over packed sequences; parameter names are Llama's."""

    def __init__(self, config: LlamaConfig, compute_type: torch.dtype) -> None:
        super().__init__()
        self._head_dim = head_size(config)
        self._group = config.num_attention_heads // key_value_heads(config)
        wide, narrow = config.num_attention_heads * self._head_dim, key_value_heads(config) * self._head_dim
        self.q_proj = Linear(config.hidden_size, wide, compute_type)
        self.k_proj = Linear(config.hidden_size, narrow, compute_type)
        self.v_proj = Linear(config.hidden_size, narrow, compute_type)
        self.o_proj = Linear(wide, config.hidden_size, compute_type)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: Packed, rows: Tensor | None) -> Tensor:
        """Attends from ``rows`` (all when None) to everything before them: [rows, hidden] of those rows."""
        cos, sin = rope
        keys = rotate(self.k_proj(hidden).unflatten(-1, (-1, self._head_dim)), cos, sin)
        values = self.v_proj(hidden).unflatten(-1, (-1, self._head_dim))
        if rows is not None:
            hidden, cos, sin = hidden[rows], cos[rows], sin[rows]
        queries = rotate(self.q_proj(hidden).unflatten(-1, (-1, self._head_dim)), cos, sin)
        counts = batch.lengths if rows is None else batch.predicted
        attended = [
            self._attend(*heads)
            for heads in zip(queries.split(counts), keys.split(batch.lengths), values.split(batch.lengths), strict=True)
        ]
        out: Tensor = self.o_proj(torch.cat(attended))
        return out

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One sequence: the queries [count, heads, head_dim] belong to the last of the keys' positions."""
        count, length = len(queries), len(keys)
        keys = keys.repeat_interleave(self._group, dim=1).transpose(0, 1)[None]
        values = values.repeat_interleave(self._group, dim=1).transpose(0, 1)[None]
        queries = queries.transpose(0, 1)[None]
        if count == length:
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended[0].transpose(0, 1).flatten(1)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: LlamaConfig, compute_type: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, compute_type)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, compute_type)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, compute_type)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer; parameter names are Llama's, the residual stream is float32."""

    def __init__(self, config: LlamaConfig, compute_type: torch.dtype) -> None:
        super().__init__()
        eps = float(config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, eps)
        self.self_attn = Attention(config, compute_type)
        self.post_attention_layernorm = Norm(config.hidden_size, eps)
        self.mlp = Mlp(config, compute_type)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: Packed, rows: Tensor | None) -> Tensor:
        """[rows, hidden] → [rows, hidden], for ``rows`` only unless it is None."""
        attended = self.self_attn(self.input_layernorm(hidden), rope, batch, rows)
        hidden = (hidden if rows is None else hidden[rows]) + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DraftModel(nn.Module):
    """A few Llama layers between the target's frozen embedding and a reduced, mapped copy of it.

    ``config`` describes the draft (its ``num_hidden_layers`` counts draft layers); ``embedding`` is the target's
    [vocabulary, hidden]; ``draft_to_target`` int [head vocabulary] lists the target ids of the head's rows.
    """

    embedding: Tensor
    draft_to_target: Tensor
    head: Tensor

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, draft_to_target: Tensor, compute_type: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_type = compute_type
        self.layers = nn.ModuleList(DraftLayer(config, compute_type) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, float(config.rms_norm_eps))
        self.output_map = nn.Parameter(torch.eye(config.hidden_size))
        self.register_buffer("embedding", embedding.to(compute_type), persistent=False)
        self.register_buffer("draft_to_target", draft_to_target.to(torch.int64))
        self.register_buffer("head", self.embedding[self.draft_to_target], persistent=False)
        self._tables = rotary_table(config, config.max_position_embeddings, compute_type)

    def final_hidden(self, batch: Packed) -> Tensor:
        """Normed hidden states of the predicted rows, float32 [predicted rows, hidden]."""
        positions = batch.positions()
        rope = (self._tables[0][positions], self._tables[1][positions])
        rows = batch.predicted_rows()
        hidden = self.embedding[batch.tokens].float()
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rope, batch, rows if index == last else None)
        out: Tensor = self.norm(hidden)
        return out

    def features(self, batch: Packed) -> Tensor:
        """What the head's rows are multiplied with: ``final_hidden @ output_map.T`` in the compute type."""
        return F.linear(self.final_hidden(batch).to(self.compute_type), self.output_map.to(self.compute_type))

    def greedy(self, batch: Packed) -> Tensor:
        """The draft's most probable next token at every predicted row, as target ids, int64."""
        with torch.inference_mode():
            logits = F.linear(self.features(batch), self.head)
            return self.draft_to_target[logits.argmax(-1)]


def draft_config(target: LlamaConfig, layers: int) -> LlamaConfig:
    """The target's configuration with ``layers`` layers."""
    described = target.to_dict()
    described.update(num_hidden_layers=layers, architectures=["LlamaModel"])
    described.pop("_name_or_path", None)
    return LlamaConfig(**described)


def start_from_target(draft: DraftModel, target_weights: dict[str, Tensor], layers: tuple[int, ...]) -> None:
    """Copies the target's ``layers`` and final norm into the draft."""
    state = {"norm.weight": target_weights["model.norm.weight"]}
    for own, theirs in enumerate(layers):
        prefix = f"model.layers.{theirs}."
        for name, value in target_weights.items():
            if name.startswith(prefix):
                state[f"layers.{own}.{name.removeprefix(prefix)}"] = value
    expected = {name for name, _ in draft.named_parameters()} - {"output_map"}
    if set(state) != expected:
        raise ValueError(f"the target's layers {layers} do not fit the draft: {sorted(expected ^ set(state))[:4]}")
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name in state:
                parameter.copy_(state[name])


def fit_output_map(draft_hidden: Tensor, target_hidden: Tensor, ridge: float = 1e-3) -> Tensor:
    """Least-squares ``output_map`` with ``draft_hidden @ output_map.T ≈ target_hidden``.

    Both are float32 [rows, hidden]; ``ridge`` is relative to the mean square of the draft's hidden states.
    """
    gram = draft_hidden.T @ draft_hidden
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    solution: Tensor = torch.linalg.solve(gram, draft_hidden.T @ target_hidden)
    return solution.T.contiguous()
