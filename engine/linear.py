"""Owns linear layers whose weights are packed once for oneDNN.

torch's bf16 `linear` on CPU packs the weight on every call, which costs as much as the product itself for the few rows
of decoding (measured: all linears of a 135M model, 8 rows: 38 ms unpacked, 19 ms packed). Only bf16 on CPU is packed.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W packed for about `rows` rows; exact for any number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16 [..., in_features] → bf16 [..., out_features]."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def packing_pays(weight: torch.Tensor) -> bool:
    """Whether oneDNN is there and the weight is one it packs."""
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and torch._C._has_mkldnn


def pack_linears(module: nn.Module, rows: int) -> None:
    """Replaces every nn.Linear below `module` by a packed one, in place; the unpacked weights are let go."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and packing_pays(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias, rows))
        else:
            pack_linears(child, rows)
