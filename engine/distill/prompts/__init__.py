"""Owns the prompt stream a target is distilled on: which classes in which shares, deterministic from a seed.

Every prompt is a template filled with slot values, so that many thousands of different ones come from a few
hundred lines; none of them is meant to coincide with the prompts a draft is measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from engine.distill.prompts.code import code_prompt
from engine.distill.prompts.creative import creative_prompt
from engine.distill.prompts.general import general_prompt
from engine.distill.prompts.reasoning import reasoning_prompt
from engine.distill.prompts.tools import tool_messages

SHARES: Mapping[str, float] = {"code": 0.30, "tool": 0.13, "cot": 0.23, "creative": 0.22, "general": 0.12}
"""Share of each class among the prompts."""

GREEDY_SHARE = 0.75
"""Share of prompts that are continued greedily; drafts are judged on greedy text, the rest adds variety."""
TEMPERATURES = (0.7, 0.85, 1.0)
"""Temperatures of the others."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be continued."""

    kind: str
    """Class, a key of ``SHARES``."""
    messages: list[dict[str, str]]
    """Chat messages with ``role`` and ``content``."""
    temperature: float
    """Temperature of the continuation; 0 is greedy."""


def make_prompt(seed: int, index: int) -> Prompt:
    """Prompt number ``index`` of the stream ``seed``; the same on every machine."""
    random = Random(f"{seed}:{index}")
    kind = random.choices(list(SHARES), weights=list(SHARES.values()))[0]
    temperature = 0.0 if random.random() < GREEDY_SHARE else random.choice(TEMPERATURES)
    return Prompt(kind, _MAKERS[kind](random), temperature)


def _as_user(make: Callable[[Random], str]) -> Callable[[Random], list[dict[str, str]]]:
    return lambda random: [{"role": "user", "content": make(random)}]


_MAKERS: Mapping[str, Callable[[Random], list[dict[str, str]]]] = {
    "code": _as_user(code_prompt),
    "tool": tool_messages,
    "cot": _as_user(reasoning_prompt),
    "creative": _as_user(creative_prompt),
    "general": _as_user(general_prompt),
}
