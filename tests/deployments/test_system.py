"""What can be said before anything is started, and of a start that failed."""

from __future__ import annotations

import socket

import pytest

from deployments.config_file import ConfigError, parse_config
from deployments.system import prepare, why_it_failed

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
Traceback (most recent call last):
  File "replicas.py", line 62, in __init__
engine.errors.OutriderError: no such device
"""


def test_the_last_line_of_a_traceback_says_why() -> None:
    messages = {"Target": TRACEBACK, "Draft": "", "Router": "waiting for a place"}
    assert why_it_failed(messages) == "Target: no such device"


def test_no_traceback_says_nothing() -> None:
    assert why_it_failed({"Target": "", "Router": "waiting for a place"}) == ""


def test_a_port_in_use_is_named(model_folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = parse_config(
            {
                "target": {"model": str(model_folder("target"))},
                "draft": {"enabled": False},
                "server": {"grpc_port": port},
            },
            "test",
        )
        with pytest.raises(ConfigError, match=f"server.grpc_port: something listens on {port} already"):
            prepare(config)
