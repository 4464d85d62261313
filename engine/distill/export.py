"""Owns the draft folder: what is written into it, and reading it back.

``config.json`` is a Llama configuration with one more key, ``outrider_draft``; ``model.safetensors`` holds, in
bfloat16, ``layers.{i}.…`` and ``norm.weight`` under LlamaModel's names, ``output_map`` [hidden, hidden], and
``draft_to_target`` int32 [head vocabulary]. The embedding is the target's and is not stored. The draft's logits are
``(norm(hidden) @ output_map.T) @ embedding[draft_to_target].T``; row r stands for target token
``draft_to_target[r]``.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.distill.model import DraftModel
from engine.distill.target import load_target_config, load_target_embedding

FORMAT = 1
"""Version of the folder's layout."""


def write_draft(draft: DraftModel, folder: Path) -> None:
    """Writes weights and configuration into ``folder``, which exists."""
    tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in draft.named_parameters()}
    tensors["draft_to_target"] = draft.draft_to_target.to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    described = draft.config.to_diff_dict()
    described.update(model_type="llama", architectures=["LlamaModel"], dtype="bfloat16", tie_word_embeddings=True)
    described.pop("_name_or_path", None)
    described.pop("_model_name_or_path", None)
    described["outrider_draft"] = {
        "format": FORMAT,
        "shared_embedding": True,
        "head_vocabulary": len(draft.draft_to_target),
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def read_draft(folder: Path, target: Path, compute_type: torch.dtype = torch.bfloat16) -> DraftModel:
    """Loads a draft folder together with the embedding of its ``target`` folder.

    Raises ValueError where the folder is no draft of this format or does not belong to that target.
    """
    described = json.loads((folder / "config.json").read_text())
    marker = described.pop("outrider_draft", None)
    if not marker or marker.get("format") != FORMAT or not marker.get("shared_embedding"):
        raise ValueError(f"{folder} is no draft folder of format {FORMAT}: outrider_draft is {marker}")
    config = LlamaConfig(**described)
    theirs = load_target_config(target)
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(theirs, name):
            raise ValueError(f"{folder}: {name} {getattr(config, name)}, but the target's is {getattr(theirs, name)}")
    tensors = load_file(folder / "model.safetensors")
    draft_to_target = tensors["draft_to_target"]
    if len(draft_to_target) != marker["head_vocabulary"]:
        raise ValueError(f"{folder}: {len(draft_to_target)} head rows, config.json says {marker['head_vocabulary']}")
    draft = DraftModel(config, load_target_embedding(target), draft_to_target, compute_type)
    draft.load_state_dict({name: value.float() for name, value in tensors.items()})
    return draft


def put_in_place(finished: Path, folder: Path) -> None:
    """Replaces ``folder`` by the ``finished`` one, a sibling on the same disk; a reader never sees half a draft."""
    previous = folder.with_name(folder.name + ".previous")
    if previous.exists():
        shutil.rmtree(previous)
    if folder.exists():
        os.rename(folder, previous)
    os.rename(finished, folder)
    if previous.exists():
        shutil.rmtree(previous)
