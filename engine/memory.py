"""Owns the memory plan of a target before anything of it is loaded: weights, KV blocks, activations, for each rank.

Sizes come from the headers of the safetensors files and from config.json alone. torch and transformers are imported
only where they are asked something, so that a command line can plan too.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidArgument, ModelNotFound
from engine.planner import RowShapes
from engine.settings import EngineSettings
from engine.sizes import DTYPE_BYTES, SIZE_FIELD, ModelSizes, read_model_config

_BLOCKS_FIELD = "target.kv_cache.num_blocks"
_JUDGED_BYTES = 8  # distributions are judged in float64
_LEAST_BLOCKS = 2  # one is scratch
_CUT_BY_OUTPUTS = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"})
_CUT_BY_INPUTS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"})
_MODEL_WIDE = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank's device. `free` is what is left of `available`; below zero it is what is missing."""

    rank: int
    available: int
    weights: int
    kv_blocks: int
    activations: int

    @property
    def free(self) -> int:
        return self.available - self.weights - self.kv_blocks - self.activations


def plan_memory(settings: EngineSettings, tp_size: int, available: int) -> tuple[RankMemory, ...]:
    """The memory of each rank.

    Args:
        settings: of the target.
        tp_size: ranks it is spread over.
        available: bytes that each rank's device has for it.

    Raises:
        ModelNotFound: the folder holds no config.json or no safetensors files.
        InvalidArgument: the model cannot be cut so, or it does not fit; the message says what would.
    """
    model = _Model.read(settings.model_path)
    model.sizes.check_divides(tp_size)
    ranks = model.plan(settings, tp_size, available)
    if min(rank.free for rank in ranks) < 0:
        raise _too_little(model, settings, ranks)
    return ranks


def available_bytes(device: str) -> int:
    """Bytes free on `device` now: of the GPU, or of the machine's memory."""
    if device.startswith("cuda"):
        import torch

        free: int = torch.cuda.mem_get_info(torch.device(device))[0]
        return free
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024


@dataclass(frozen=True, slots=True)
class _Model:
    """A model folder, as far as its headers tell.

    Attributes:
        tensors: shape by name.
        plan_of: style by module name, digits replaced by `*`, as transformers' plan has it.
        is_tied: the head is the embedding.
    """

    sizes: ModelSizes
    tensors: Mapping[str, tuple[int, ...]]
    plan_of: Mapping[str, str]
    is_tied: bool

    @classmethod
    def read(cls, folder: Path) -> _Model:
        config = read_model_config(folder)
        plan = {**_MODEL_WIDE, **(config.get_text_config().base_model_tp_plan or {})}
        is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
        return cls(ModelSizes.of(config), dict(_tensors(folder)), plan, is_tied)

    def plan(self, settings: EngineSettings, tp_size: int, available: int) -> tuple[RankMemory, ...]:
        weights, blocks = self._weights(settings, tp_size), settings.num_blocks
        kv_blocks = blocks * self.sizes.kv_block_bytes(settings.block_size, settings.dtype, tp_size)
        return tuple(
            RankMemory(
                rank, available, weights, kv_blocks, self._activations(settings, tp_size, blocks, judges=rank == 0)
            )
            for rank in range(tp_size)
        )

    def blocks_that_fit(self, settings: EngineSettings, tp_size: int, available: int) -> int:
        left = available - self._weights(settings, tp_size)
        block_bytes = self.sizes.kv_block_bytes(settings.block_size, settings.dtype, tp_size)

        def needed(blocks: int) -> int:  # grows with the blocks, and attention with the context they allow
            return blocks * block_bytes + self._activations(settings, tp_size, blocks, judges=True)

        return max(bisect_right(range(max(left, 0) // block_bytes + 1), left, key=needed) - 1, 0)

    def _weights(self, settings: EngineSettings, tp_size: int) -> int:
        numbers = sum(math.prod(shape) // self._ways(name, shape, tp_size) for name, shape in self.tensors.items())
        if self.is_tied and settings.device == "cpu" and settings.dtype == "bfloat16":
            numbers += self.sizes.vocab_size * self.sizes.hidden_size // tp_size  # packed for oneDNN, beside the table
        return numbers * DTYPE_BYTES[settings.dtype]

    def _ways(self, name: str, shape: tuple[int, ...], tp_size: int) -> int:
        """Into how many parts a tensor is cut."""
        module = re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0])
        style = next((s for known, s in self.plan_of.items() if f".{module}".endswith(f".{known}")), "")
        if style in _CUT_BY_OUTPUTS or (style in _CUT_BY_INPUTS and len(shape) > 1):
            return tp_size
        return 1

    def _activations(self, settings: EngineSettings, tp_size: int, num_blocks: int, *, judges: bool) -> int:
        """What one forward of most rows holds at once; an estimate from above for the dense decoders we know.

        Residual stream and the wider of attention and MLP; logits whole on every rank; for attention one layer's
        gathered keys and values and a mask of rows × keys; on the rank that judges a row's distributions.
        """
        sizes, shapes = self.sizes, settings.shapes
        rows = max(shapes.prompt_rows, shapes.generated_rows) if shapes else settings.max_num_batched_tokens
        number = DTYPE_BYTES[settings.dtype]
        keys = min(num_blocks * settings.block_size, settings.max_context_length or sizes.max_context_length)
        heads = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        stream = rows * (4 * sizes.hidden_size + max(3 * sizes.intermediate_size, 2 * heads) // tp_size)
        group = sizes.num_heads // sizes.num_kv_heads
        attention = 2 * keys * (sizes.num_kv_heads // tp_size) * sizes.head_dim + 2 * rows * group * keys
        logits = 2 * min(rows, _logit_rows(shapes, rows)) * sizes.vocab_size
        judging = 4 * sizes.vocab_size * _JUDGED_BYTES if judges else 0
        return number * (stream + attention + logits) + judging


def _logit_rows(shapes: RowShapes | None, rows: int) -> int:
    return shapes.generated_rows if shapes else rows


def _tensors(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a folder, from the files' headers: 8 bytes of length, then JSON."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for name in files:
        if not (folder / name).is_file():
            raise ModelNotFound(f"{folder / name}: no such file; the weights must be safetensors files")
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        yield from ((tensor, tuple(facts["shape"])) for tensor, facts in header.items())


def _too_little(model: _Model, settings: EngineSettings, ranks: tuple[RankMemory, ...]) -> InvalidArgument:
    """Says by how much memory is short, and which block count, context or size would do."""
    tp_size, first = len(ranks), ranks[0]
    missing = (
        f"{settings.num_blocks} blocks, {_size(-first.free)} more than the {_size(first.available)} of each device"
    )
    blocks = model.blocks_that_fit(settings, tp_size, first.available)
    ways = []
    if blocks >= _LEAST_BLOCKS:
        context = min((blocks - 1) * settings.block_size, model.sizes.max_context_length)
        ways.append(f"at most {blocks} blocks (a context of {context} tokens)")
    larger = _sizes_that_fit(model, settings, tp_size, first.available)
    if larger:
        ways.append(f"{SIZE_FIELD} of {larger[0]}")
    beside = f"beside {_size(first.weights)} of weights and {_size(first.activations)} of activations"
    found = f"{settings.num_blocks} blocks, {missing}"
    return InvalidArgument(_BLOCKS_FIELD, found, f"{' or '.join(ways) or 'nothing on such devices'}, {beside}")


def _sizes_that_fit(model: _Model, settings: EngineSettings, tp_size: int, available: int) -> list[int]:
    """Larger sizes that the model can be cut into and with which all the blocks fit."""
    fit = []
    for size in range(tp_size + 1, model.sizes.num_kv_heads + 1):
        try:
            model.sizes.check_divides(size)
        except InvalidArgument:
            continue
        if model.blocks_that_fit(settings, size, available) >= settings.num_blocks:
            fit.append(size)
    return fit


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
