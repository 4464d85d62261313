"""Owns what all files that people write have in common: strict YAML, sections, and faults that are one line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import OutriderError


class ConfigError(OutriderError):
    """A configuration file cannot be used. The message is one line."""


class Section(BaseModel):
    """A section of a file: unknown keys are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


def read_yaml(file: Path, source: str) -> object:
    """What `file` holds; `source` names it in errors. Raises ConfigError."""
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from error


def explain(error: ValidationError, known_at: Callable[[tuple[str, ...]], Iterable[str]]) -> str:
    """The first fault in words, and how many more there are; `known_at` says which keys a section has."""
    # A key that is unknown is often the one that is missing, misspelt.
    first, *others = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    more = f" (and {len(others)} more)" if others else ""
    return f"{_explain(first, known_at)}{more}"


def _explain(error: Any, known_at: Callable[[tuple[str, ...]], Iterable[str]]) -> str:
    place = tuple(str(part) for part in error["loc"])
    where, reason = ".".join(place), str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{_nearest(place[-1], list(known_at(place[:-1])))}"
    reason = reason[:1].lower() + reason[1:]
    if not where:
        return reason
    found = "" if error["type"] in ("value_error", "missing") else f", found {error['input']!r}"
    return f"{where}: {reason}{found}"


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
