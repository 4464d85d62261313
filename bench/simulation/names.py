"""Owns looking up what a person named: the nearest name, and all there are, where there is no such thing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from engine.errors import InvalidArgument

T = TypeVar("T")


def pick(name: str, known: Mapping[str, T], field: str, also: str = "") -> T:
    """`known[name]`, whatever its case. Raises InvalidArgument; `also` says what else would have been accepted."""
    found = known.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidArgument(field, name, f"{', '.join(known)}{also}{guess}")
    return found
