"""Owns what a person at a terminal sees besides results: progress and one-line errors, both on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Shows a spinner with `what` while the block runs, then one line with the seconds it took."""
    start = time.monotonic()
    if not err.is_terminal:
        err.print(f"… {what}", markup=False)
    with err.status(what):
        yield
    err.print(f"[green]✓[/] {what} [dim]({time.monotonic() - start:.1f} s)[/]")


def fail(error: BaseException | str) -> None:
    """Prints `error` as one line; never a traceback."""
    text = " ".join(str(error).split()) or type(error).__name__
    err.print("[bold red]error:[/] ", end="")
    err.print(text, markup=False, soft_wrap=True)
