"""Owns the settings an engine is built from: frozen, checked by deployments.config before they get here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.planner import RowShapes

Backend = Literal["auto", "gather_sdpa", "flex"]
Dtype = Literal["bfloat16", "float32", "float16"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What target and draft engines share.

    Attributes:
        model_path: a Hugging Face folder, or a distilled draft's folder.
        model_name: how the model is called in answers and metrics.
        device: a torch device string.
        dtype: of weights and KV.
        threads: intra-op CPU threads of the process.
        num_blocks: KV blocks, the scratch block included.
        block_size: tokens per block.
        max_sessions: most open sessions; more are refused as overload.
        max_num_batched_tokens: most rows of one forward outside reproducible mode.
        shapes: the fixed row counts of reproducible mode; None switches it off.
        max_context_length: most tokens of one session; None takes the model's own limit.
        vocab_size: ids the tokenizer knows; ids past it are never drawn. None takes the model's.
        tokenizer: fingerprint of the vocabulary.
        seed: of the generator that unseeded requests draw from.
        attention: the backend; "auto" takes flex on CUDA and gather_sdpa elsewhere.
    """

    model_path: Path
    model_name: str = ""
    device: str = "cpu"
    dtype: Dtype = "bfloat16"
    threads: int = 1
    num_blocks: int = 1024
    block_size: int = 16
    max_sessions: int = 64
    max_num_batched_tokens: int = 256
    shapes: RowShapes | None = None
    max_context_length: int | None = None
    vocab_size: int | None = None
    tokenizer: str = ""
    seed: int = 0
    attention: Backend = "auto"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """A draft engine: the common settings, and how much of a distribution travels.

    Attributes:
        engine: the common settings.
        target_path: folder of the target, whose embedding a distilled draft shares.
        top_probs: tokens a sampling draft truncates its distribution to (and sends).
    """

    engine: EngineSettings
    target_path: Path | None = None
    top_probs: int = 32
