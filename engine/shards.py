"""Owns a rank's part of a tensor-parallel model's layers.

transformers cuts the weights by its plan while it reads them, so that a rank reads its own part only; it then runs each
layer through DTensor. Here those layers become plain ones over the same local weights: no wrapper at run time, packed
linears where they pay, and sums over ranks that reproducible mode can rely on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from engine.errors import InvalidArgument
from engine.parallel import TensorParallel

_log = logging.getLogger(__name__)

SIZE_FIELD = "target.tensor_parallel_size"
_INERT = frozenset({"replicate", "replicated_with_grad_allreduce"})  # styles that do nothing in a forward

SumRanks = Callable[[torch.Tensor], torch.Tensor]


class RowShard(nn.Module):
    """A linear of which each rank holds some input features: the ranks' products are summed, then the bias added."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sum_ranks: SumRanks) -> None:
        super().__init__()
        self.product, self._sum_ranks = plain_linear(weight, None), sum_ranks
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features / size] → [..., out_features]."""
        total = self._sum_ranks(self.product(x))
        return total if self.bias is None else total + self.bias


class GatheredColumnShard(nn.Module):
    """A linear of which each rank holds some output features, all of which are wanted everywhere (the head)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parallel: TensorParallel) -> None:
        super().__init__()
        self.product, self._parallel = plain_linear(weight, bias), parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] → [rows, out_features]."""
        part: torch.Tensor = self.product(x)
        if not part.numel():
            return part.new_empty((*part.shape[:-1], part.shape[-1] * self._parallel.size))
        return self._parallel.gather(part).movedim(0, -2).flatten(-2)


class VocabularyShard(nn.Module):
    """An embedding of which each rank holds some tokens. The sum is exact: all ranks but one add zero."""

    def __init__(self, weight: torch.Tensor, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first, self._sum_ranks = parallel.rank * len(weight), parallel.sum

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] → [..., hidden]."""
        local = ids - self._first
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._sum_ranks(found.masked_fill(elsewhere[..., None], 0.0))


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """An nn.Linear over tensors that exist already."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def use_local_layers(model: Any, parallel: TensorParallel, *, reproducible: bool) -> None:
    """Replaces the layers that transformers has cut by plain ones over this rank's weights, in place.

    Layers of other styles (experts, say) stay as transformers wraps them.

    Args:
        model: a transformers model loaded with a DistributedConfig.
        parallel: the group it was loaded in.
        reproducible: whether a row's result must not depend on where in the batch it stands.

    Raises:
        InvalidArgument: a weight that should be cut is whole on every rank, or a style forbids reproducible mode.
    """
    sum_ranks = parallel.ordered_sum if reproducible else parallel.sum
    for name, module in list(model.named_modules()):
        style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in _INERT:
            continue
        local = _local_layer(name, module, style, parallel, sum_ranks)
        if local is not None:
            model.set_submodule(name, local)
            continue
        if reproducible:
            raise InvalidArgument(SIZE_FIELD, parallel.size, f"1 in reproducible mode for a model with {style} layers")
        _log.info("%s stays as transformers runs it (%s)", name, style)


def _local_layer(
    name: str, module: nn.Module, style: str, parallel: TensorParallel, sum_ranks: SumRanks
) -> nn.Module | None:
    """The plain layer in place of one that transformers has cut; None for a style or a class unknown here."""
    if type(module) is nn.Embedding and style == "embedding_rowwise":
        return VocabularyShard(_part(name, module.weight, parallel.size), parallel)
    if type(module) is not nn.Linear:
        return None
    weight = _part(name, module.weight, parallel.size)
    bias = None if module.bias is None else _local(module.bias)  # cut as the outputs are: whole in a row shard
    match style:
        case "colwise":
            return plain_linear(weight, bias)
        case "colwise_gather_output" | "colwise_rep":
            return GatheredColumnShard(weight, bias, parallel)
        case "rowwise":
            return RowShard(weight, bias, sum_ranks)
    return None


def _part(name: str, weight: torch.Tensor, size: int) -> torch.Tensor:
    """This rank's part of `weight`, which must be one: a model that is whole on every rank would work, and waste."""
    part = _local(weight)
    if part.numel() * size != weight.numel():
        raise InvalidArgument(SIZE_FIELD, size, f"1: {name} of this model was not cut into {size} parts")
    return part


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
