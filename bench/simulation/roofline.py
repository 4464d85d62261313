"""Owns how long a forward takes on a device that is only described: the roofline of its memory and its arithmetic.

    max(bytes / bandwidth, operations / peak) + launches + communication

(Williams, Waterman and Patterson 2009, "Roofline"). Each rank of a group reads its part of the weights, and of the keys
and values of every session in the batch once, however many rows the session has: that is what verification lives on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.emulation import DeviceTimes
from bench.simulation.assumptions import Assumptions
from bench.simulation.hardware import Gpu
from bench.simulation.models import DTYPE, Model
from engine.errors import InvalidArgument
from engine.sizes import DTYPE_BYTES, SIZE_FIELD

_ALLREDUCES = 2  # a layer: behind attention and behind the MLP (Shoeybi et al. 2019, arXiv 1909.08053)


class Device(Protocol):
    """Whatever a forward takes time on."""

    def seconds(self, num_sessions: float, rows_each: float) -> float:
        """Of one forward of `num_sessions` sessions with so many rows each; both may be means."""
        ...


@dataclass(frozen=True, slots=True)
class ProfiledDevice:
    """A device whose times were measured, or were assumed for an emulation.

    Attributes:
        context: tokens a session has.
    """

    times: DeviceTimes
    context: int

    def seconds(self, num_sessions: float, rows_each: float) -> float:
        """As Device.seconds."""
        return self.times.seconds(num_sessions, rows_each, self.context)


@dataclass(frozen=True, slots=True)
class Forward:
    """Where the seconds of one forward go. `memory_s` and `compute_s` overlap, the others do not."""

    memory_s: float
    compute_s: float
    launch_s: float
    communication_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s) + self.launch_s + self.communication_s

    @property
    def bound(self) -> str:
        """Which of the two roofs it lies under."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


@dataclass(frozen=True, slots=True)
class RooflineDevice:
    """A model on `tp_size` equal GPUs.

    Attributes:
        context: tokens a session has.
    """

    model: Model
    gpu: Gpu
    tp_size: int
    context: int
    assumptions: Assumptions

    def __post_init__(self) -> None:
        self.model.sizes.check_divides(self.tp_size)
        if self.tp_size > 1 and not self.gpu.link:
            raise InvalidArgument(
                SIZE_FIELD, self.tp_size, f"1 on {self.gpu.name}: MIG instances do not reach each other"
            )

    def forward(self, num_sessions: float, rows_each: float) -> Forward:
        """One forward, taken apart."""
        assumed, gpu, ranks = self.assumptions, self.gpu, self.tp_size
        rows = num_sessions * rows_each
        moved = self.model.num_multiplied * DTYPE_BYTES[DTYPE] + num_sessions * self.context * self.model.kv_token_bytes
        return Forward(
            memory_s=moved / ranks / (gpu.bandwidth * assumed.bandwidth_share),
            compute_s=self._operations(rows) / ranks / (gpu.flops * assumed.compute_share),
            launch_s=assumed.forward_s + self.model.sizes.num_layers * assumed.layer_s,
            communication_s=self._communication_s(rows),
        )

    def seconds(self, num_sessions: float, rows_each: float) -> float:
        """As Device.seconds."""
        return self.forward(num_sessions, rows_each).seconds

    def _operations(self, rows: float) -> float:
        """Multiplications and additions: of every weight, and of every key and value a row sees."""
        sizes = self.model.sizes
        attended = 2 * self.context * sizes.num_layers * sizes.num_heads * sizes.head_dim
        return 2.0 * rows * (self.model.num_multiplied + attended)

    def _communication_s(self, rows: float) -> float:
        """All-reduces of one row of features for each row; a ring moves 2 (N - 1) / N of the bytes over each link."""
        if self.tp_size == 1:
            return 0.0
        sizes = self.model.sizes
        moved = rows * sizes.hidden_size * DTYPE_BYTES[DTYPE] * 2 * (self.tp_size - 1) / self.tp_size
        return _ALLREDUCES * sizes.num_layers * (self.assumptions.allreduce_s + moved / self.gpu.link)
