"""Where a judged block is cut: ending ids, max_tokens, and what then counts as accepted."""

from __future__ import annotations

import pytest

from engine.stopping import Cut, cut

ENDING = frozenset({9})


@pytest.mark.parametrize(
    ("tokens", "num_accepted", "room", "expected"),
    [
        ((1, 2, 3), 2, 10, Cut((1, 2, 3), 2, None)),
        ((9,), 0, 10, Cut((9,), 0, "stop")),
        ((1, 9, 3, 4), 3, 10, Cut((1, 9), 2, "stop")),
        ((1, 2, 9), 2, 10, Cut((1, 2, 9), 2, "stop")),
        ((1, 9, 9), 2, 10, Cut((1, 9), 2, "stop")),
        ((1, 2, 3), 2, 3, Cut((1, 2, 3), 2, "length")),
        ((1, 2, 3), 2, 2, Cut((1, 2), 2, "length")),
        ((1, 2, 3), 2, 1, Cut((1,), 1, "length")),
        ((1, 2, 9, 4), 3, 3, Cut((1, 2, 9), 3, "stop")),
        ((1, 2, 3, 9), 3, 3, Cut((1, 2, 3), 3, "length")),
    ],
    ids=[
        "nothing ends",
        "ends at once",
        "ends inside",
        "the bonus token ends it",
        "the first of two",
        "exactly full",
        "one too many",
        "room for one",
        "both at one token: stop wins",
        "an ending id past the room",
    ],
)
def test_cut(tokens: tuple[int, ...], num_accepted: int, room: int, expected: Cut) -> None:
    assert cut(tokens, num_accepted, ENDING, room) == expected


def test_without_ending_ids_only_the_room_counts() -> None:
    assert cut((9, 9), 1, (), 5) == Cut((9, 9), 1, None)
