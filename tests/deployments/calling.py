"""Keys, and calls with a credential, for the tests of who is let in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.access import Gate
from engine.errors import Unauthenticated
from router.api_keys import key_hash, key_id


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def bearer(credential: str) -> list[tuple[str, str]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {credential}")]


def refused(gate: Gate, metadata: list[tuple[str, Any]]) -> str:
    """What a call that must be refused is told."""
    with pytest.raises(Unauthenticated) as caught:
        gate.tenant(metadata)
    return str(caught.value)


def entry(key: str, name: str, **limits: int) -> dict[str, Any]:
    return {"name": name, "id": key_id(key), "sha256": key_hash(key), "limits": limits}


def write_keys(path: Path, *entries: dict[str, Any]) -> None:
    """As Kubernetes does it: a new file takes the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(list(entries)))
    os.replace(new, path)
