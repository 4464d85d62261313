"""The books of a soak: what became of each request, token by token against a reference run, what nobody explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "refused", "cancelled", "deadline", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One request that was sent.

    Attributes:
        outcome: how it ended, as the caller saw it.
        token_ids: what was delivered.
        reference: what an undisturbed run delivers, all of it.
        finish_reason: of the final message; "" without one.
        detail: what the server said, of a request that failed.
    """

    outcome: Outcome
    token_ids: tuple[int, ...]
    reference: tuple[int, ...]
    finish_reason: str = ""
    detail: str = ""

    def problem(self) -> str:
        """What cannot be explained about it; "" if all can."""
        delivered, expected = len(self.token_ids), len(self.reference)
        if self.token_ids != self.reference[:delivered]:
            wrong = next(
                i for i, (a, b) in enumerate(zip(self.token_ids, (*self.reference, -1), strict=False)) if a != b
            )
            return f"token {wrong} is not the reference's"
        if self.outcome == "completed" and (delivered, self.finish_reason) != (expected, "length"):
            return f"said to be finished ({self.finish_reason!r}) after {delivered} of {expected} tokens"
        if self.outcome == "refused" and delivered:
            return f"refused after {delivered} tokens"
        return f"failed: {self.detail}" if self.outcome == "failed" else ""


@dataclass(slots=True)
class Ledger:
    """Entries of all requests that were sent; thread-safe, since appending is."""

    entries: list[Entry] = field(default_factory=list)

    def unexplained(self) -> Sequence[str]:
        return [problem for entry in self.entries if (problem := entry.problem())]

    def summary(self) -> str:
        counts = Counter(entry.outcome for entry in self.entries)
        parts = " + ".join(f"{counts[name]} {name}" for name in ("completed", "refused", "cancelled", "deadline"))
        tokens = sum(len(entry.token_ids) for entry in self.entries)
        return f"{len(self.entries)} sent = {parts}; {tokens} tokens delivered; {len(self.unexplained())} unexplained"
