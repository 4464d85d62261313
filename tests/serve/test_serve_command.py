"""`outrider serve` as a shell runs it: up, answering, and gone without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.local import free_port
from deployments.client import Ask, Client

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


# A shell starts background jobs with SIGINT ignored, and so would be what a test run in the background starts.
_AS_IN_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from deployments.cli import main
main()
"""


@contextmanager
def serving(config: Path, home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address it printed."""
    command = [sys.executable, "-c", _AS_IN_A_TERMINAL, "serve", "--config", str(config)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**inherited, "OUTRIDER_HOME": str(home)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        try:
            yield serve, serve.stdout.readline().strip()
        finally:
            serve.kill()


def processes_of(home: Path) -> list[psutil.Process]:
    """All processes that were started, at whatever remove, with this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OUTRIDER_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def test_serve_answers_and_stops_without_a_trace(model_folders: tuple[Path, Path], tmp_path: Path) -> None:
    config, home = tmp_path / "small.yaml", tmp_path / "home"
    config.write_text(
        f"target: {{model: {model_folders[0]}, dtype: float32}}\ndraft: {{enabled: false}}\n"
        f"server: {{grpc_port: {free_port()}, http_port: {free_port()}}}\n"
    )
    with serving(config, home) as (serve, printed):
        address = printed.removeprefix("serving on ")
        assert (home / "address").read_text() == address
        with Client(address) as client:
            ask = Ask(prompt="the", sampling={"max_tokens": 4, "ignore_eos": True})
            assert len(client.generate(ask, timeout_s=60).token_ids) == 4
        assert processes_of(home)
        serve.send_signal(signal.SIGINT)
        assert serve.wait(timeout=60) == 0
        assert serve.stderr is not None
        assert "Traceback" not in serve.stderr.read()
    assert not (home / "address").exists()
    assert processes_of(home) == []
