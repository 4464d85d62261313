"""Readings over a run: ten of them, every request made once, and what a child process holds is seen."""

from __future__ import annotations

import subprocess
import sys

from bench.memory import measure, resident_bytes
from bench.processes import REST


def test_every_request_is_made_once_and_read_ten_times():
    asked: list[int] = []
    readings = list(measure(asked.append, requests=40, concurrency=4))
    assert sorted(asked) == list(range(40))
    assert [reading.requests for reading in readings] == list(range(0, 41, 4))


def test_memory_of_children_is_counted():
    before = resident_bytes()[REST]
    program = "held = bytearray(64 * 2**20); print(len(held), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = resident_bytes()[REST] - before
        child.communicate("\n")
    assert grown > 64 * 2**20
