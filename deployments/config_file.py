"""Owns reading a configuration file. Every fault is one line that names the file and the field."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments.config import OutriderConfig
from deployments.yaml_file import ConfigError, explain, read_yaml

__all__ = ["CONFIGS", "ConfigError", "load_config", "parse_config"]

CONFIGS = Path(__file__).parent / "configs"


def load_config(path: str | Path) -> OutriderConfig:
    """Reads `path`: a YAML file, or the name of a bundled one such as ``demo``.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, or a value that is not allowed.
    """
    content = read_yaml(_find(Path(path)), str(path))
    return parse_config({} if content is None else content, str(path))


def parse_config(content: object, source: str) -> OutriderConfig:
    """Checks what a YAML file held; `source` names it in errors."""
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: found {type(content).__name__}, expected sections such as `target:`")
    try:
        return OutriderConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, lambda place: _section_at(place).model_fields)}") from error


def _find(path: Path) -> Path:
    bundled = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    if not path.exists() and path.parent == Path() and bundled.is_file():
        return bundled
    if not path.is_file():
        names = ", ".join(sorted(config.stem for config in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"{path}: no such file; bundled configurations are {names}")
    return path


def _section_at(place: tuple[str, ...]) -> type[BaseModel]:
    section: Any = OutriderConfig
    for part in place:
        is_named = typing.get_origin(section) is dict  # sections under names that people choose
        section = typing.get_args(section)[1] if is_named else _inside(section.model_fields[part].annotation)
    found: type[BaseModel] = section
    return found


def _inside(annotation: Any) -> Any:
    """What an optional field holds if it is given."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(choice for choice in typing.get_args(annotation) if choice is not type(None))
    return annotation
