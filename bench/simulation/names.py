"""Owns looking up what a person named: the nearest name, and all there are, where there is no such thing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from engine.errors import InvalidArgument

T = TypeVar("T")


def pick(name: str, known: Mapping[str, T], field: str, also: str = "") -> T:
    """`known[name]`, whatever its case. Raises InvalidArgument; `also` says what else would have been accepted."""
    asked = name.lower()
    found = known.get(asked)
    if found is None:
        # What another GPU has a slice for, or another family a size, is not what was meant.
        related = [each for each in known if each.partition("-")[0] == asked.partition("-")[0]]
        near = difflib.get_close_matches(asked, related or known, n=1, cutoff=0.4)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidArgument(field, name, f"{', '.join(known)}{also}{guess}")
    return found
