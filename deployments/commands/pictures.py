"""Owns what an option that draws takes: a PNG, refused before the work begins if it could not be written after it."""

from __future__ import annotations

from pathlib import Path

import typer


def png(path: Path | None) -> Path | None:
    """The path itself; for `callback` of the option. Raises BadParameter."""
    if path is not None and (path.suffix.lower() != ".png" or not path.parent.is_dir()):
        raise typer.BadParameter(f"found {path}, allowed is a .png file in a folder that exists")
    return path
