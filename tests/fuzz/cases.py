"""How many cases there are, and the seed that all of them follow from: FUZZ_CASES and FUZZ_SEED of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Cases:
    """The cases of one run.

    Attributes:
        number: requests and calls that the three services get; those that only the readers of messages get come on top.
    """

    number: int
    seed: int

    def share(self, part: float) -> int:
        return max(1, round(self.number * part))

    def rng(self, name: str) -> Random:
        return Random(f"{name} {self.seed}")


cases = Cases(int(os.environ.get("FUZZ_CASES", "52000")), int(os.environ.get("FUZZ_SEED", "0")))
