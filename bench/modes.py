"""Owns the modes a benchmark compares: their names, what each asks of speculation, and the order they take turns in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import InvalidArgument
from router.acceptance import DRAFT_MODEL

PLAIN, AUTO = "off", "auto"
SYNC, AHEAD = "sync", "ahead"
MAX_K = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mode:
    """What a request asks of speculation, under the name that tables show.

    Attributes:
        name: "off", "auto", a drafter's name, "sync", "sync:K" or "ahead:K".
        speculation: "off" or "auto".
        drafter: "" lets the policy pick.
        num_speculative_tokens: K; None leaves it to the policy.
        run_ahead: the draft drafts on while its proposal is verified.
    """

    name: str
    speculation: str = "auto"
    drafter: str = ""
    num_speculative_tokens: int | None = None
    run_ahead: bool = True


def plain(name: str = PLAIN) -> Mode:
    """Plain decoding."""
    return Mode(name, speculation="off")


def family(name: str) -> str:
    """What is before the colon: modes of one family differ by K only."""
    return name.partition(":")[0]


def fixed_k(name: str) -> int | None:
    """K of the mode called `name`, where the mode fixes it."""
    return int(name.partition(":")[2]) if ":" in name else None


def parse_modes(asked: str, drafters: Sequence[str]) -> list[Mode]:
    """Modes to compare, each once, plain decoding first.

    Args:
        asked: names separated by commas; ``sync:1-8`` is ``sync:1`` to ``sync:8``. "" stands for plain, auto, and each
            of the drafters alone.
        drafters: those that the server has.

    Raises:
        InvalidArgument: a name that is none, or needs a drafter that is not there.
    """
    names = asked.split(",") if asked else [AUTO, *sorted(drafters)]
    modes = [mode for name in names for mode in _parse(name.strip(), drafters)]
    return list(dict.fromkeys([plain(), *modes]))


def in_turn(things: Sequence[T], turn: int) -> list[T]:
    """All of them, beginning with another one each turn."""
    first = turn % len(things)
    return [*things[first:], *things[:first]]


def _parse(name: str, drafters: Sequence[str]) -> list[Mode]:
    if name == PLAIN:
        return [plain()]
    if name == AUTO:
        return [Mode(AUTO)]
    if name in drafters:
        return [Mode(name, drafter=name)]
    if DRAFT_MODEL in drafters and name == SYNC:
        return [Mode(SYNC, drafter=DRAFT_MODEL, run_ahead=False)]
    kind, _, sizes = name.partition(":")
    if DRAFT_MODEL in drafters and kind in (SYNC, AHEAD) and (span := _span(sizes)):
        return [Mode(f"{kind}:{k}", "auto", DRAFT_MODEL, k, run_ahead=kind == AHEAD) for k in span]
    raise InvalidArgument("modes", name, ", ".join(_allowed(drafters)))


def _span(text: str) -> range:
    """``4`` or ``1-8`` as a range; an empty one for anything else."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        return range(0)
    begin, end = int(first), int(last or first)
    return range(begin, end + 1) if 1 <= begin <= end <= MAX_K else range(0)


def _allowed(drafters: Sequence[str]) -> list[str]:
    by_k = [SYNC, f"{SYNC}:K", f"{AHEAD}:K", f"ranges such as {SYNC}:1-8 (K is 1 to {MAX_K})"]
    return [PLAIN, AUTO, *sorted(drafters), *(by_k if DRAFT_MODEL in drafters else [])]
