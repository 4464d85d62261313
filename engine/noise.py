"""Owns the shared randomness of seeded requests: Gumbel noise as a pure function of seed, position and id.

Draft and target add the same noise to their own log probabilities and take the argmax (the Gumbel-max trick).
Their choices then mostly coincide, and the target's depends on nothing but the seed and its own distribution.
A position is the absolute index of the token in the sequence, prompt included, so that a sequence resumed
elsewhere meets the noise it would have met.

The bits come from splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")
in wrapping 64-bit integer arithmetic, the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# A uniform is an odd multiple of 2**-53: exact in float64, neither 0 nor 1, so both logarithms are finite.
_UNIFORM_BITS = 52


def gumbel(seed: int, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for the tokens `ids` at one position of one request.

    Args:
        seed: any 64-bit integer, signed or not.
        position: absolute index of the token that is being chosen.
        ids: int64 [n]; the whole vocabulary or any part of it, in any order.

    Returns:
        float64 [n] on the device of `ids`.
    """
    return gumbel_rows([seed], [position], ids.unsqueeze(0)).squeeze(0)


def gumbel_rows(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """`gumbel` for one request per row: ids int64 [rows, n] → float64 [rows, n]."""
    streams = [_signed(_stream(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    starts = torch.tensor(streams, dtype=torch.int64, device=ids.device).unsqueeze(-1)
    bits = _mixed(starts + (ids + 1) * _signed(_STEP))
    uniforms = (_shifted(bits, 64 - _UNIFORM_BITS).to(torch.float64) + 0.5) * 2.0**-_UNIFORM_BITS
    return uniforms.log_().neg_().log_().neg_()


def _stream(seed: int, position: int) -> int:
    """Where the splitmix64 sequence of this seed and position starts; its output i belongs to token id i."""
    return _mixed_int(_mixed_int(seed + _STEP) ^ _mixed_int(position + 2 * _STEP))


def _mixed_int(value: int) -> int:
    value &= _MASK
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _mixed(values: Tensor) -> Tensor:
    for shift, factor in _MIX:
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, _LAST_SHIFT)


def _shifted(values: Tensor, shift: int) -> Tensor:
    """Logical right shift; int64 shifts copy the sign bit, which is masked away."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value
