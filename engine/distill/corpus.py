"""Owns the distillation corpus: shards of target continuations on disk, written so that a killed run can go on.

A shard is one safetensors file that holds whole continuations and the target's most probable tokens at each of
their positions. A shard appears under its final name only when it is complete, so whatever is on disk is good.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

TOP_TOKENS = 16
"""Target tokens stored with their log-probabilities at every generated position."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One prompt and what the target made of it."""

    prompt_index: int
    """Index of the prompt in the seeded prompt stream."""
    kind: str
    """Class of the prompt, for example ``code``."""
    prompt: Tensor
    """Token ids of the prompt, int32 [prompt length]."""
    generated: Tensor
    """Token ids the target generated, int32 [length]; the last may be the end-of-sequence token."""
    top_ids: Tensor
    """Most probable tokens for each generated position, best first, uint16 or int32 [length, TOP_TOKENS]."""
    top_log_probs: Tensor
    """Their log-probabilities at temperature 1 over the whole vocabulary, float16 [length, TOP_TOKENS]."""


@dataclass(frozen=True)
class CorpusIdentity:
    """What must stay equal for shards to belong to one corpus; stored next to them."""

    seed: int
    """Seed of the prompt stream."""
    max_new_tokens: int
    """Longest continuation in tokens."""
    vocabulary: int
    """Vocabulary size of the target."""


@dataclass
class Corpus:
    """A folder of shards.

    Opening it with an identity other than the stored one raises ValueError: mixing corpora would repeat or skip
    prompts silently.
    """

    folder: Path
    identity: CorpusIdentity
    _shards: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = self.folder / "corpus.json"
        wanted = vars(self.identity)
        if not stamp.exists():
            stamp.write_text(json.dumps(wanted, indent=1))
        elif json.loads(stamp.read_text()) != wanted:
            raise ValueError(f"{self.folder} holds another corpus: {stamp.read_text()}; wanted {wanted}")
        self._shards = sorted(self.folder.glob("shard-*.safetensors"))

    def append(self, continuations: Sequence[Continuation]) -> None:
        """Writes one more shard."""
        path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
        arrays = {
            name: torch.cat([getattr(item, name) for item in continuations])
            for name in ("prompt", "generated", "top_ids", "top_log_probs")
        }
        arrays["prompt_lengths"] = torch.tensor([len(item.prompt) for item in continuations])
        arrays["lengths"] = torch.tensor([len(item.generated) for item in continuations])
        arrays["prompt_indexes"] = torch.tensor([item.prompt_index for item in continuations])
        temporary = path.with_suffix(".part")
        save_file(arrays, temporary, metadata={"kinds": " ".join(item.kind for item in continuations)})
        os.replace(temporary, path)
        self._shards.append(path)

    def done(self) -> tuple[set[int], int]:
        """Prompt indexes already continued, and the number of generated tokens stored."""
        indexes: set[int] = set()
        tokens = 0
        for path in self._shards:
            with safe_open(path, framework="pt") as shard:
                indexes.update(shard.get_tensor("prompt_indexes").tolist())
                tokens += int(shard.get_tensor("lengths").sum())
        return indexes, tokens

    def __iter__(self) -> Iterator[Continuation]:
        for path in self._shards:
            yield from _read_shard(path)


def _read_shard(path: Path) -> Iterator[Continuation]:
    arrays = load_file(path)
    with safe_open(path, framework="pt") as shard:
        kinds = shard.metadata()["kinds"].split(" ")
    prompt_at = at = 0
    rows = zip(
        arrays["prompt_lengths"].tolist(), arrays["lengths"].tolist(), arrays["prompt_indexes"].tolist(), kinds,
        strict=True,
    )  # fmt: skip
    for prompt_length, length, index, kind in rows:
        span = slice(at, at + length)
        yield Continuation(
            prompt_index=index,
            kind=kind,
            prompt=arrays["prompt"][prompt_at : prompt_at + prompt_length],
            generated=arrays["generated"][span],
            top_ids=arrays["top_ids"][span],
            top_log_probs=arrays["top_log_probs"][span],
        )
        prompt_at += prompt_length
        at += length
