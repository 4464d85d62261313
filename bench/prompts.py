"""Owns reading prompt files: JSON lines with id, class, and a prompt or chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        id: names it in reports.
        kind: its class, e.g. ``code``; results are grouped by it.
        messages: for the chat template; None where `text` is given.
        text: raw prompt.
        sampling: fields of the request's sampling parameters that the line sets, e.g. max_tokens.
    """

    id: str
    kind: str
    messages: Sequence[Mapping[str, str]] | None
    text: str | None
    sampling: Mapping[str, Any]


_SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


def read_prompts(path: Path) -> list[Prompt]:
    """Raises InvalidArgument naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("prompts", str(path), f"a readable file ({error})") from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidArgument("prompts", str(path), "at least one line")
    return prompts


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts of each class, in their order; None keeps all."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if limit is None or seen[prompt.kind] <= limit:
            kept.append(prompt)
    return kept


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(where, line[:40], "a JSON object") from error
    if not isinstance(entry, dict) or ("messages" in entry) == ("prompt" in entry):
        raise InvalidArgument(where, line[:40], "an object with either `messages` or `prompt`")
    return Prompt(
        id=str(entry.get("id", where)),
        kind=str(entry.get("class", "all")),
        messages=entry.get("messages"),
        text=entry.get("prompt"),
        sampling={name: entry[name] for name in _SAMPLING if name in entry},
    )
