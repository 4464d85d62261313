"""Owns what vendors publish of GPUs. Figures are peaks of data sheets; what is reached of them is an assumption.

Memory is counted as 10^9 bytes a GB, the least it can mean. FLOPs are dense bf16 with float32 accumulation; data sheets
that give the figure "with sparsity" are halved. The link is that between GPUs of one server, one direction of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.simulation.names import pick

_NVLINK_4, _NVLINK_3 = 450e9, 300e9  # 900 and 600 GB/s in both directions: data sheets of the SXM modules
_PCIE_5, _PCIE_4 = 64e9, 32e9  # x16, 128 and 64 GB/s in both directions


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG slice of it.

    Attributes:
        memory_bytes: of its own memory.
        bandwidth: bytes per second of that memory.
        flops: dense bf16 floating-point operations per second.
        link: bytes per second to a peer, one direction; 0 where there is no peer to share a model with.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    link: float

    def slices(self, multiprocessors: int, *profiles: tuple[str, int, int]) -> tuple[Gpu, ...]:
        """Its MIG instances. They cannot reach each other directly, so a model cannot be spread over them.

        Args:
            multiprocessors: of the whole GPU.
            profiles: name, multiprocessors and eighths of the memory of each.
        """
        return tuple(
            Gpu(
                f"{self.name}-{name}",
                self.memory_bytes * eighths / 8,
                self.bandwidth * eighths / 8,
                self.flops * its / multiprocessors,
                0.0,
            )
            for name, its, eighths in profiles
        )


# NVIDIA H100 data sheet: SXM 80 GB, 3.35 TB/s, 1,979 TFLOPS bf16 with sparsity.
_H100 = Gpu("h100-80gb", 80e9, 3.35e12, 989.5e12, _NVLINK_4)
# NVIDIA A100 data sheet: 312 TFLOPS bf16; 80 GB SXM 2,039 GB/s, 40 GB 1,555 GB/s.
_A100_80 = Gpu("a100-80gb", 80e9, 2.039e12, 312e12, _NVLINK_3)
_A100_40 = Gpu("a100-40gb", 40e9, 1.555e12, 312e12, _NVLINK_3)

_ALL = (
    _H100,
    # NVIDIA H100 data sheet, PCIe column (2022): 80 GB, 2 TB/s, 1,513 TFLOPS bf16 with sparsity.
    Gpu("h100-pcie-80gb", 80e9, 2.0e12, 756.5e12, _PCIE_5),
    # NVIDIA H200 data sheet: SXM 141 GB, 4.8 TB/s, 1,979 TFLOPS bf16 with sparsity.
    Gpu("h200-141gb", 141e9, 4.8e12, 989.5e12, _NVLINK_4),
    _A100_80,
    # NVIDIA A100 data sheet, PCIe column: 80 GB, 1,935 GB/s.
    Gpu("a100-pcie-80gb", 80e9, 1.935e12, 312e12, _PCIE_4),
    _A100_40,
    # NVIDIA L40S data sheet: 48 GB, 864 GB/s, 362.05 TFLOPS bf16 (733 with sparsity), PCIe 4 x16.
    Gpu("l40s", 48e9, 0.864e12, 362.05e12, _PCIE_4),
    # NVIDIA L4 data sheet: 24 GB, 300 GB/s, 242 TFLOPS bf16 with sparsity.
    Gpu("l4", 24e9, 0.3e12, 121e12, _PCIE_4),
    # NVIDIA A10 data sheet: 24 GB, 600 GB/s, 125 TFLOPS bf16 (250 with sparsity).
    Gpu("a10", 24e9, 0.6e12, 125e12, _PCIE_4),
    # NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 24 GB, 1,008 GB/s, 165.2 TFLOPS bf16 (330.4).
    Gpu("rtx-4090", 24e9, 1.008e12, 165.2e12, _PCIE_4),
    # Memory: NVIDIA, Multi-Instance GPU User Guide, "Supported MIG Profiles". Multiprocessors: the column SM of
    # `nvidia-smi mig -lgip` on each. Of an H100, three slices have more than three times the 16 of one.
    *_A100_40.slices(108, ("1g.5gb", 14, 1), ("2g.10gb", 28, 2), ("3g.20gb", 42, 4), ("4g.20gb", 56, 4)),
    *_A100_80.slices(108, ("1g.10gb", 14, 1), ("2g.20gb", 28, 2), ("3g.40gb", 42, 4), ("4g.40gb", 56, 4)),
    *_H100.slices(132, ("1g.10gb", 16, 1), ("2g.20gb", 32, 2), ("3g.40gb", 60, 4), ("4g.40gb", 64, 4)),
)

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ALL}


def pick_gpu(name: str, field: str) -> Gpu:
    """By name; `field` is what asked for it. Raises InvalidArgument, which lists those there are."""
    return pick(name, GPUS, field)
