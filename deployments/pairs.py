"""Owns the question whether a draft and a target speak the same vocabulary (docs/design.md §7)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelNotFound, PairMismatch
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and a target that can be used together.

    Attributes:
        tokenizer_folder: whose tokenizer both use: the target's.
        vocab_size: ids the tokenizer knows; embeddings may be padded past it, on either side differently.
        fingerprint: of the vocabulary.
        target_rows: rows of the target's embedding.
        draft_rows: rows of the draft's.
    """

    tokenizer_folder: Path
    vocab_size: int
    fingerprint: str
    target_rows: int
    draft_rows: int


def check_pair(draft: Path, target: Path) -> Pair:
    """Compares two model folders.

    Raises:
        PairMismatch: naming the first token id or special token in which they differ.
        ModelNotFound: a file is missing or unreadable.
    """
    theirs = Tokenizer(target)
    draft_config, target_config = read_config(draft), read_config(target)
    if is_distilled(draft_config):
        _check_distilled(draft, draft_config, target, target_config)
    else:
        _compare(draft.name, Tokenizer(draft), target.name, theirs)
    pair = Pair(
        tokenizer_folder=target,
        vocab_size=theirs.vocab_size,
        fingerprint=theirs.fingerprint(),
        target_rows=int(target_config["vocab_size"]),
        draft_rows=int(draft_config["vocab_size"]),
    )
    for name, rows in ((target.name, pair.target_rows), (draft.name, pair.draft_rows)):
        if rows < pair.vocab_size:
            raise PairMismatch(f"{name}: its embedding has {rows} rows, but the tokenizer knows {pair.vocab_size} ids")
    return pair


def is_distilled(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a draft made by `outrider train draft`, which borrows the target's tokenizer."""
    return "outrider_draft" in config


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises ModelNotFound."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
        raise ModelNotFound(f"{path}: not a model configuration, it has no vocab_size")
    return config


def _check_distilled(draft: Path, draft_config: dict[str, Any], target: Path, target_config: dict[str, Any]) -> None:
    for key in ("vocab_size", "hidden_size"):
        if draft_config[key] != target_config[key]:
            raise PairMismatch(
                f"{draft.name} shares the embedding of the target it was distilled from, whose {key} is "
                f"{draft_config[key]}; that of {target.name} is {target_config[key]}"
            )


def _compare(draft_name: str, draft: Tokenizer, target_name: str, target: Tokenizer) -> None:
    for token_id in range(max(draft.vocab_size, target.vocab_size)):
        mine, theirs = draft.token(token_id), target.token(token_id)
        if mine != theirs:
            raise PairMismatch(
                f"token id {token_id} is {_name(mine)} in {draft_name} but {_name(theirs)} in {target_name}"
            )
    differing = sorted(draft.special_ids ^ target.special_ids)
    if differing:
        where = draft_name if differing[0] in draft.special_ids else target_name
        raise PairMismatch(f"token id {differing[0]} ({_name(target.token(differing[0]))}) is special in {where} only")


def _name(token: str | None) -> str:
    return "no token" if token is None else repr(token)
