"""Owns how a distillation run reports: a small protocol, a rich progress bar and a silent stand-in."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressReport(Protocol):
    """Where stages report how far they are."""

    def begin(self, stage: str, total: float) -> None:
        """Starts ``stage``, which is done when ``total`` units have been reported."""

    def reach(self, stage: str, done: float, note: str = "") -> None:
        """Says that ``done`` units of ``stage`` are finished; ``note`` is one short line of current numbers."""

    def say(self, text: str) -> None:
        """Reports one line that should stay visible."""


class SilentProgress:
    """Reports nothing."""

    def begin(self, stage: str, total: float) -> None:
        """Ignores the stage."""

    def reach(self, stage: str, done: float, note: str = "") -> None:
        """Ignores the step."""

    def say(self, text: str) -> None:
        """Ignores the line."""


class RichProgress:
    """Progress bars with elapsed time and time left; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=console or Console(stderr=True), speed_estimate_period=120,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RichProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, stage: str, total: float) -> None:
        """Adds a bar for ``stage``, or restarts the one it has."""
        if stage in self._tasks:
            self._progress.reset(self._tasks[stage], total=int(total))
        else:
            self._tasks[stage] = self._progress.add_task(stage, total=int(total), note="")

    def reach(self, stage: str, done: float, note: str = "") -> None:
        """Moves the bar of ``stage``."""
        self._progress.update(self._tasks[stage], completed=int(done), note=note)

    def say(self, text: str) -> None:
        """Prints ``text`` above the bars."""
        self._progress.console.print(text, highlight=False)
