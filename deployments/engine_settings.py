"""Owns the way from configuration to engine settings: sizes in blocks, devices, folders. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployments.config import Engine, OutriderConfig, Target
from deployments.config_file import ConfigError
from deployments.models import resolve_model
from deployments.pairs import check_pair, read_config
from engine.planner import RowShapes
from engine.settings import DraftSettings, EngineSettings
from router.tokenizer import Tokenizer

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def target_settings(config: OutriderConfig) -> EngineSettings:
    """Settings of the target engine. Raises ModelNotFound, ConfigError."""
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
    block_bytes = kv_bytes_per_token(read_config(folder), _BYTES[engine.dtype]) * cache.block_size / ranks
    blocks = int(cache.memory_gib * 2**30 // block_bytes)
    if blocks < 2:
        section = "target" if isinstance(engine, Target) else "draft"
        raise ConfigError(
            f"{section}.kv_cache.memory_gib: {cache.memory_gib} GiB is less than the two blocks that are the least; "
            f"one block of {cache.block_size} tokens of {engine.model} takes {block_bytes / 2**30:.4f} GiB"
        )
    return blocks


def kv_bytes_per_token(config: dict[str, Any], bytes_per_number: int) -> int:
    """Bytes of keys and values that one token takes in all layers of a model with this config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    per_token: int = 2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_number
    return per_token
