"""Owns what happens before a Ray Pod stops: Serve is told to move what runs here, and the kubelet waits until it has.

Run as a preStop hook, `python drain.py SECONDS`, which waits so long at most. A router finishes its streams meanwhile
and gets no new ones; sessions of a draft or target that stops go on elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

_POLL_S = 1.0


def drain(
    limit_s: float, ask: Callable[[float], None], busy: Callable[[], bool], sleep: Callable[[float], None]
) -> bool:
    """Asks for everything to be moved, then waits while this Pod is busy. Whether it came to rest in time."""
    ask(limit_s)
    waited_s = 0.0
    while busy():
        if waited_s >= limit_s:
            return False
        sleep(_POLL_S)
        waited_s += _POLL_S
    return True


def ask_ray(limit_s: float) -> None:
    """Tells the GCS that this node goes away; without a GCS nothing moves, and streams end here or not at all."""
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the Pod stops"]
    done = subprocess.run([*command, "--deadline-remaining-seconds", f"{limit_s:.0f}"], check=False)
    if done.returncode:
        print(f"ray drain-node ended with {done.returncode}: waiting for what runs here all the same", file=sys.stderr)


def replicas_here() -> bool:
    """Whether this Pod runs a replica of Serve's; Ray names their processes so."""
    return any(_title(process).startswith("ray::ServeReplica") for process in psutil.process_iter())


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


if __name__ == "__main__":
    sys.exit(not drain(float(sys.argv[1]), ask_ray, replicas_here, time.sleep))
