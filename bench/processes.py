"""Owns telling the processes of a running system apart: target, draft, router, and everything else of this process."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

KINDS = ("target", "draft", "router")
REST = "Ray and the rest"


def descendants() -> Iterator[tuple[str, psutil.Process]]:
    """This process's descendants, each with its kind. One that has ended meanwhile is left out."""
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        yield next((kind for kind in KINDS if f":{kind.capitalize()}" in title), REST), process


def cpu_seconds() -> dict[str, float]:
    """CPU time of this process's descendants since they started, by kind."""
    totals = dict.fromkeys((*KINDS, REST), 0.0)
    for kind, process in descendants():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended between the listing and the question
        totals[kind] += times.user + times.system
    return totals
