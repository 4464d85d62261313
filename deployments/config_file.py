"""Owns reading a configuration file. Every fault is one line that names the file and the field."""

from __future__ import annotations

import difflib
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deployments.config import OutriderConfig
from engine.errors import OutriderError

CONFIGS = Path(__file__).parent / "configs"


class ConfigError(OutriderError):
    """A configuration file cannot be used. The message is one line."""


def load_config(path: str | Path) -> OutriderConfig:
    """Reads `path`: a YAML file, or the name of a bundled one such as ``demo``.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, or a value that is not allowed.
    """
    file = _find(Path(path))
    try:
        with file.open(encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return parse_config({} if content is None else content, str(path))


def parse_config(content: object, source: str) -> OutriderConfig:
    """Checks what a YAML file held; `source` names it in errors."""
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: found {type(content).__name__}, expected sections such as `target:`")
    try:
        return OutriderConfig.model_validate(content)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"{source}: {_explain(first)}{more}") from error


def _find(path: Path) -> Path:
    bundled = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    if not path.exists() and path.parent == Path() and bundled.is_file():
        return bundled
    if not path.is_file():
        names = ", ".join(sorted(config.stem for config in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"{path}: no such file; bundled configurations are {names}")
    return path


def _explain(error: Any) -> str:
    place = tuple(str(part) for part in error["loc"])
    where, reason = ".".join(place), str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{_nearest(place)}"
    reason = reason[:1].lower() + reason[1:]
    if not where:
        return reason
    return f"{where}: {reason}" if error["type"] == "value_error" else f"{where}: {reason}, found {error['input']!r}"


def _nearest(place: tuple[str, ...]) -> str:
    known = _section_at(place[:-1]).model_fields
    close = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}"


def _section_at(place: tuple[str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = OutriderConfig
    for part in place:
        section = _model_of(section.model_fields[part].annotation)
    return section


def _model_of(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(choice for choice in typing.get_args(annotation) if choice is not type(None))
    model: type[BaseModel] = annotation
    return model


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
