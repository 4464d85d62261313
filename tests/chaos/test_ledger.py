"""The books notice what a soak is there to find."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import Entry, Ledger

REFERENCE = (5, 6, 7, 8)

EXPLAINED = [
    Entry("completed", REFERENCE, REFERENCE, "length"),
    Entry("refused", (), REFERENCE),
    Entry("cancelled", (5, 6), REFERENCE),
    Entry("deadline", REFERENCE, REFERENCE),
]
UNEXPLAINED = {
    "said to be finished": Entry("completed", (5, 6, 7), REFERENCE, "length"),
    "finished ('stop')": Entry("completed", REFERENCE, REFERENCE, "stop"),
    "token 1 is not": Entry("cancelled", (5, 5, 6), REFERENCE),
    "token 4 is not": Entry("completed", (*REFERENCE, 8), REFERENCE, "length"),
    "token 0 is not": Entry("deadline", (6, 7), REFERENCE),
    "refused after 1": Entry("refused", (5,), REFERENCE),
    "failed: gone": Entry("failed", (5,), REFERENCE, detail="gone"),
}


def test_what_a_disturbed_run_may_do() -> None:
    ledger = Ledger(list(EXPLAINED))
    assert ledger.unexplained() == []
    assert ledger.summary().startswith("4 sent = 1 completed + 1 refused + 1 cancelled + 1 deadline; 10 tokens")


@pytest.mark.parametrize("said", UNEXPLAINED)
def test_what_it_may_not(said: str) -> None:
    assert said in UNEXPLAINED[said].problem()
