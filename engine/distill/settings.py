"""Owns the settings of one distillation run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """Everything `outrider train draft` can be told; paths, sizes and budgets of one run."""

    target: Path
    """Hugging Face folder of the target: a Llama model with tied embeddings, with its tokenizer."""
    output: Path
    """Folder the finished draft is put into; replaced as a whole when a better draft is ready."""
    work: Path
    """Folder for corpus shards and checkpoints; a run that was stopped goes on from here."""
    held_out: Path | None = None
    """JSON lines with ``id``, ``class``, ``messages`` and ``max_tokens`` on which acceptance is measured; they
    never reach the corpus. Without them the card carries no acceptance."""
    tokens: int = 1_000_000
    """Generated tokens the corpus should reach."""
    generation_minutes: float = 60.0
    """Generation ends after this many minutes even if the corpus is smaller."""
    max_new_tokens: int = 144
    """Longest continuation of one prompt, in tokens."""
    rows: int = 64
    """Continuations generated together."""
    seed: int = 1
    """Seed of the prompts, of sampling and of the order of training."""
    layers: tuple[int, ...] = (0, 1)
    """Target layers the draft starts from, one draft layer for each."""
    head_vocabulary: int = 8192
    """Tokens the draft can propose: the commonest of the corpus and those that code and JSON are spelt with."""
    training_minutes: float = 60.0
    """Length of training; the learning rate falls to zero over it."""
    batch_tokens: int = 2048
    """Generated tokens per optimiser step."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    hard_share: float = 0.5
    """Share of the loss that asks for the target's best token alone; the rest asks for its distribution."""
    evaluate_seconds: float = 120.0
    """Time between two points of the curves."""
    checkpoint_seconds: float = 180.0
    """Time between two checkpoints."""
    target_name: str = ""
    """Name of the target in the card; the name of its folder when empty."""
    notes: str = ""
    """A paragraph for the card about what was particular to this run."""
    threads: int = 1
    """CPU threads."""
    draft_tokens: tuple[int, ...] = (3, 5)
    """Chain lengths at which acceptance is reported."""
