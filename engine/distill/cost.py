"""Owns measuring what one draft token costs beside one step of the target, on this processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distill.model import DraftModel
from engine.distill.target import packed_linear

REPEATS = 15


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of all linear maps of one forward, which is nearly all of it at these sizes."""

    rows: int
    """Rows that go through together."""
    draft_seconds: float
    """All linear maps of the draft, head and output map included."""
    target_seconds: float
    """All linear maps of the target, head included."""

    @property
    def share(self) -> float:
        """Draft time as a share of target time."""
        return self.draft_seconds / self.target_seconds


def linear_cost(draft: DraftModel, target_weights: dict[str, Tensor], rows: int = 4) -> LinearCost:
    """Best of several passes, weights bfloat16 and packed, projections of equal input fused as a server fuses them."""
    own = {name: parameter.detach().to(torch.bfloat16) for name, parameter in draft.named_parameters()}
    theirs = {name.removeprefix("model."): value.to(torch.bfloat16) for name, value in target_weights.items()}
    layers = range(len(draft.layers))
    draft_maps = [*_fused(own, layers), own["output_map"], draft.head.to(torch.bfloat16)]
    count = 1 + max(int(name.split(".")[1]) for name in theirs if name.startswith("layers."))
    target_maps = [*_fused(theirs, range(count)), theirs["embed_tokens.weight"]]
    return LinearCost(rows, _time(draft_maps, rows), _time(target_maps, rows))


def _fused(weights: dict[str, Tensor], layers: Iterable[int]) -> list[Tensor]:
    maps = []
    for layer in layers:
        group = {name: weights[f"layers.{layer}.{name}.weight"] for name in _PROJECTIONS}
        maps.append(torch.cat([group[f"self_attn.{name}_proj"] for name in "qkv"]))
        maps.append(group["self_attn.o_proj"])
        maps.append(torch.cat([group["mlp.gate_proj"], group["mlp.up_proj"]]))
        maps.append(group["mlp.down_proj"])
    return maps


_PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@torch.inference_mode()
def _time(weights: list[Tensor], rows: int) -> float:
    maps: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (packed_linear(weight, rows), torch.randn(rows, weight.shape[1]).to(weight.dtype)) for weight in weights
    ]
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        for apply, rows_in in maps:
            apply(rows_in)
        best = min(best, time.perf_counter() - started)
    return best
