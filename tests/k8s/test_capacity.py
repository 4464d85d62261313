"""The GPU overlays fit the GPUs they are for, and the documentation's capacity table is what the memory plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import Engine, Target
from engine.memory import RankMemory, plan_memory
from engine.settings import EngineSettings
from engine.sizes import ModelSizes, read_model_config
from tests.k8s.manifests import K8S
from tests.k8s.published_models import make_folder
from tests.k8s.test_serve_config import configuration

GIB = 2**30
# What a driver reports of a card, less about half a GiB for the CUDA context.
GPUS = {"llama-3-70b": (79.0 - 0.5, 22.0 - 0.5), "qwen2.5-72b": (39.4 - 0.5, 9.6 - 0.5)}


def plan(engine: Engine, available_gib: float, folder: Path) -> tuple[RankMemory, int]:
    """The fullest rank, and the tokens that its KV pool holds."""
    make_folder(engine.model, folder)
    ranks = engine.tensor_parallel_size if isinstance(engine, Target) else 1
    block_bytes = ModelSizes.of(read_model_config(folder)).kv_block_bytes(
        engine.kv_cache.block_size, engine.dtype, ranks
    )
    assert engine.kv_cache.memory_gib is not None
    blocks = int(engine.kv_cache.memory_gib * GIB // block_bytes)
    settings = EngineSettings(
        model_path=folder,
        model_name=engine.model,
        device="cuda",
        dtype=engine.dtype,
        threads=1,
        num_blocks=blocks,
        block_size=engine.kv_cache.block_size,
        max_sessions=engine.max_sessions,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        shapes=None,
        max_context_length=engine.max_context_length,
        vocab_size=1,
        tokenizer="",
        seed=0,
        attention="flex",
    )
    planned = plan_memory(settings, ranks, int(available_gib * GIB))
    return min(planned, key=lambda rank: rank.free), blocks * engine.kv_cache.block_size


@pytest.mark.parametrize("overlay", sorted(GPUS))
def test_target_and_draft_fit_their_gpus(overlay: str, tmp_path: Path) -> None:
    config, (target_gib, draft_gib) = configuration(overlay), GPUS[overlay]
    target, target_tokens = plan(config.target, target_gib, tmp_path / "target")
    draft, draft_tokens = plan(config.draft, draft_gib, tmp_path / "draft")
    assert draft_tokens >= target_tokens, "a session that fits the target fits its draft"
    table = (K8S.parent / "docs/operations.md").read_text(encoding="utf-8")
    for name, rank, tokens in ((config.target.model, target, target_tokens), (config.draft.model, draft, draft_tokens)):
        sizes = (rank.weights, rank.kv_blocks, rank.activations, rank.free)
        cells = [name.removeprefix("/models/"), *(f"{size / GIB:.1f}" for size in sizes), f"{tokens:,}"]
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {cells[0]} "))
        assert [cell.strip() for cell in row.split("|")[3:8]] == cells[1:], cells
