"""Owns the way from configuration to engine settings: sizes in blocks, devices, folders. Torch-free at import."""

from __future__ import annotations

from pathlib import Path

from deployments.config import Engine, OutriderConfig, Target
from deployments.config_file import ConfigError
from deployments.models import resolve_model
from deployments.pairs import check_pair
from engine.planner import RowShapes
from engine.settings import DraftSettings, EngineSettings
from engine.sizes import ModelSizes, read_model_config
from router.tokenizer import Tokenizer


def target_settings(config: OutriderConfig) -> EngineSettings:
    """Settings of the target engine. Raises ModelNotFound, ConfigError; InvalidArgument if it cannot be cut so."""
    folder = resolve_model(config.target.model)
    return _settings(config.target, folder, Tokenizer(folder))


def draft_settings(config: OutriderConfig) -> DraftSettings:
    """Settings of the draft engine. Raises ModelNotFound, PairMismatch, ConfigError."""
    target, folder = resolve_model(config.target.model), resolve_model(config.draft.model)
    check_pair(folder, target)
    engine = _settings(config.draft, folder, Tokenizer(target))
    return DraftSettings(engine=engine, target_path=target, top_probs=config.draft.top_probs)


def _settings(engine: Engine, folder: Path, tokenizer: Tokenizer) -> EngineSettings:
    shapes = engine.reproducible
    return EngineSettings(
        model_path=folder,
        model_name=engine.model,
        device=_device(engine),
        dtype=engine.dtype,
        threads=engine.threads,
        num_blocks=_num_blocks(engine, folder),
        block_size=engine.kv_cache.block_size,
        max_sessions=engine.max_sessions,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        shapes=RowShapes(shapes.prompt_rows, shapes.generated_rows) if shapes.enabled else None,
        max_context_length=engine.max_context_length,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint(),
        seed=engine.seed,
        attention=engine.attention,
    )


def _device(engine: Engine) -> str:
    if engine.device != "auto":
        return engine.device
    return "cuda" if engine.ray_actor_options.get("num_gpus") else "cpu"


def _num_blocks(engine: Engine, folder: Path) -> int:
    cache = engine.kv_cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    assert cache.memory_gib is not None  # KVCache's own rule: exactly one of the two
    ranks = engine.tensor_parallel_size if isinstance(engine, Target) else 1
    sizes = ModelSizes.of(read_model_config(folder))
    sizes.check_divides(ranks)
    block_bytes = sizes.kv_block_bytes(cache.block_size, engine.dtype, ranks)
    blocks = int(cache.memory_gib * 2**30 // block_bytes)
    if blocks < 2:
        section = "target" if isinstance(engine, Target) else "draft"
        raise ConfigError(
            f"{section}.kv_cache.memory_gib: {cache.memory_gib} GiB is less than the two blocks that are the least; "
            f"one block of {cache.block_size} tokens of {engine.model} takes {block_bytes / 2**30:.4f} GiB"
        )
    return blocks
