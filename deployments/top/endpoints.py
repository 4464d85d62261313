"""Owns where metrics come from: Prometheus endpoints of Ray's metrics agents over HTTP, those of this machine found."""

from __future__ import annotations

import http.client
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from cluster.local import port_in_use
from engine.errors import InvalidArgument, Unavailable

FIELD = "--metrics"

_TIMEOUT_S = 5.0
_PATH = "/metrics"
_SESSIONS = ("outrider-*/session_latest", "ray/session_latest")
"""Where `outrider serve` and `ray start` keep what belongs to a running cluster."""
_PORT_FILES = "metrics_export_port_*"  # one for each node, written by Ray


def endpoints_of(urls: Sequence[str]) -> list[str]:
    """The addresses to read, each once; a URL without a path is given the usual one. Raises InvalidArgument."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidArgument(FIELD, url, "a URL such as http://127.0.0.1:8080/metrics")
        found.append(url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_PATH}")
    return list(dict.fromkeys(found))


def local_endpoints(folder: Path | None = None, is_open: Callable[[int], bool] = port_in_use) -> list[str]:
    """Those of the Ray cluster that was started last on this machine and still runs.

    Args:
        folder: where clusters keep their files; None takes the usual one.
        is_open: whether something listens on a port.

    Raises:
        Unavailable: none runs.
    """
    base = Path(tempfile.gettempdir()) if folder is None else folder
    sessions = [path for pattern in _SESSIONS for path in base.glob(pattern)]
    for session in sorted(sessions, key=lambda path: path.stat().st_mtime, reverse=True):
        ports = [port for file in sorted(session.glob(_PORT_FILES)) if (port := _port_in(file)) and is_open(port)]
        if ports:
            return [f"http://127.0.0.1:{port}{_PATH}" for port in ports]
    raise Unavailable(
        f"no system runs on this machine; start one with `outrider serve`, or give {FIELD} "
        "http://HOST:8080/metrics of each node with a router"
    )


def _port_in(file: Path) -> int:
    """0 where the file has none, or is gone."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def read_all(urls: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What each endpoint answers, and why each of the others does not, asked side by side."""
    asked = list(urls)
    answers: dict[str, str] = {}
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=max(len(asked), 1)) as threads:
        for url, (text, why) in zip(asked, threads.map(_read, asked), strict=True):
            if why:
                failures[url] = why
            else:
                answers[url] = text
    return answers, failures


def _read(url: str) -> tuple[str, str]:
    """Its text, or why there is none."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            return reply.read().decode("utf-8"), ""
    except urllib.error.HTTPError as error:
        with error:
            return "", f"HTTP {error.code} {error.reason}"
    except UnicodeDecodeError:
        return "", "not text in UTF-8"
    except (OSError, http.client.HTTPException) as error:
        return "", str(getattr(error, "reason", error)) or type(error).__name__
