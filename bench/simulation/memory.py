"""Owns the memory plan before there is anything to load: weights and KV blocks of a model on GPUs that are only named.

`engine.memory` plans from a model folder and to the byte; this has sizes and a share of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.hardware import Gpu
from bench.simulation.models import DTYPE, Model
from engine.errors import InvalidArgument

BLOCK_SIZE = 16  # tokens; the engines' default
_SCRATCH_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one GPU of a group, in bytes; all have the same.

    Attributes:
        usable: of the GPU's memory, what weights and KV may take.
        kv_token: keys and values of one token.
        num_blocks: KV blocks for all sessions, the scratch block included.
        kv_blocks: what they take.
        most_sessions: that fit with this context.
        longest_context: that fits with so many sessions; 0 where not even the weights fit.
        fitting_sizes: tensor_parallel_size with which all of it fits.
    """

    model: str
    gpu: str
    num_gpus: int
    usable: float
    weights: float
    kv_token: int
    num_blocks: int
    kv_blocks: int
    most_sessions: int
    longest_context: int
    fitting_sizes: tuple[int, ...]

    @property
    def headroom(self) -> float:
        """What is left; below zero it is what is missing."""
        return self.usable - self.weights - self.kv_blocks

    @property
    def fits(self) -> bool:
        return self.headroom >= 0.0

    def advice(self) -> str:
        """What would fit instead; "" where it does."""
        if self.fits:
            return ""
        ways = []
        if self.most_sessions:
            ways.append(f"{self.most_sessions} sessions of this context")
        if self.longest_context:
            ways.append(f"a context of {self.longest_context} tokens")
        if self.fitting_sizes:
            ways.append(f"{self.fitting_sizes[0]} such GPUs")
        return " or ".join(ways) or "no number of such GPUs"


def plan_gpu(model: Model, gpu: Gpu, num_gpus: int, demand: tuple[int, int], memory_share: float) -> MemoryPlan:
    """The plan of one GPU.

    Args:
        model: what is loaded.
        gpu: what it is loaded on.
        num_gpus: the tensor_parallel_size.
        demand: sessions, and tokens of each with what is proposed to it.
        memory_share: of the GPU's memory, what weights and KV may take.

    Raises:
        InvalidArgument: the model cannot be cut so.
    """
    model.sizes.check_divides(num_gpus)
    usable = gpu.memory_bytes * memory_share
    sessions, context = demand
    num_blocks, block = _blocks(sessions, context), model.sizes.kv_block_bytes(BLOCK_SIZE, DTYPE, num_gpus)
    left = int((usable - model.weight_bytes / num_gpus) // block) - _SCRATCH_BLOCKS
    return MemoryPlan(
        model=model.name,
        gpu=gpu.name,
        num_gpus=num_gpus,
        usable=usable,
        weights=model.weight_bytes / num_gpus,
        kv_token=model.sizes.kv_block_bytes(1, DTYPE, num_gpus),
        num_blocks=num_blocks,
        kv_blocks=num_blocks * block,
        most_sessions=max(left // _per_session(context), 0),
        longest_context=max(left // sessions, 0) * BLOCK_SIZE,
        fitting_sizes=_sizes(model, gpu, lambda size: _fits(model, usable, size, num_blocks)),
    )


def _per_session(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def _blocks(sessions: int, context: int) -> int:
    return sessions * _per_session(context) + _SCRATCH_BLOCKS


def _fits(model: Model, usable: float, size: int, num_blocks: int) -> bool:
    needed = model.weight_bytes / size + num_blocks * model.sizes.kv_block_bytes(BLOCK_SIZE, DTYPE, size)
    return needed <= usable


def _sizes(model: Model, gpu: Gpu, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """Sizes that the model can be cut into, and the GPU allows, for which `fits`."""
    largest = model.sizes.num_kv_heads if gpu.link else 1
    return tuple(size for size in range(1, largest + 1) if _divides(model, size) and fits(size))


def _divides(model: Model, size: int) -> bool:
    try:
        model.sizes.check_divides(size)
    except InvalidArgument:
        return False
    return True
