"""Owns the tiny template grammar prompts are written in.

``@name@`` draws from the slot list ``name``; the same mark twice in one template means the same value, ``@name.2@``
asks for another one. ``@3..40@`` draws a whole number, ``@1.5..9.5@`` one with as many decimals as its bounds.
Drawn values may contain marks themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

Slots = Mapping[str, Sequence[str]]
"""Slot lists by name."""

_MARK = re.compile(r"@([A-Za-z_]+(?:\.\d)?|\d+(?:\.\d+)?\.\.\d+(?:\.\d+)?)@")


def fill(template: str, slots: Slots, random: Random) -> str:
    """Replaces every mark of ``template`` by a drawn value."""
    chosen: dict[str, str] = {}

    def draw(match: re.Match[str]) -> str:
        mark = match.group(1)
        if ".." in mark:
            return _number(mark, random)
        if mark not in chosen:
            name = mark.split(".")[0]
            taken = {value for key, value in chosen.items() if key.split(".")[0] == name}
            values = [value for value in slots[name] if value not in taken] or list(slots[name])
            chosen[mark] = _MARK.sub(draw, random.choice(values))
        return chosen[mark]

    return _MARK.sub(draw, template)


def _number(bounds: str, random: Random) -> str:
    low, high = bounds.split("..")
    if "." not in low:
        return str(random.randint(int(low), int(high)))
    places = len(low.split(".")[1])
    return f"{random.uniform(float(low), float(high)):.{places}f}"
