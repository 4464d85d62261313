"""Owns files that are read again when they change, while whoever uses them runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from deployments.yaml_file import ConfigError

LOOK_EVERY_S = 1.0
"""Seconds for which a file is taken to be what it was."""

_log = logging.getLogger(__name__)

ContentT = TypeVar("ContentT")


class WatchedFile(Generic[ContentT]):
    """What a file holds. A change that cannot be read is logged, and what was there before goes on counting: a slip
    while editing locks nobody out.

    Args:
        path: the file, or a link to it: Kubernetes swaps a link when a Secret changes.
        read: raises ConfigError.
        clock: seconds, monotonic.

    Raises:
        ConfigError: it cannot be read the first time.
    """

    def __init__(self, path: str, read: Callable[[Path], ContentT], clock: Callable[[], float]) -> None:
        self._path, self._read, self._clock = Path(path), read, clock
        self._signature, self._looked_at = self._look(), clock()
        self._content = read(self._path)

    def content(self) -> ContentT:
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._read_if_changed()
        return self._content

    def _read_if_changed(self) -> None:
        signature = self._look()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._content = self._read(self._path)
            _log.warning("%s has changed and was read again", self._path)
        except ConfigError as error:
            _log.error("what %s held before still counts: %s", self._path, error)

    def _look(self) -> tuple[int, int, int] | None:
        """Differs when the file does; None when it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
