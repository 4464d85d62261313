"""Where sessions go: prompts with a common prefix together, as long as that crowds nobody."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.placement import PREFIX_TOKENS, least_loaded, nearest_with_room, prefix_key

NAMES = [f"10.0.0.{number}:7000" for number in range(8)]
KEYS = [prefix_key([number, number + 1, 5]) for number in range(2000)]


def test_a_common_prefix_makes_a_common_key_and_another_does_not() -> None:
    prefix = list(range(PREFIX_TOKENS))
    assert prefix_key([*prefix, 1, 2]) == prefix_key([*prefix, 3]) == prefix_key(prefix)
    assert prefix_key([*prefix[:-1], 7]) != prefix_key(prefix)
    assert len(set(KEYS)) == len(KEYS)


def test_idle_replicas_share_the_keys_about_evenly() -> None:
    shares = Counter(nearest_with_room(NAMES, {}, key) for key in KEYS)
    assert set(shares) == set(NAMES)
    assert max(shares.values()) < 1.35 * len(KEYS) / len(NAMES)


def test_the_order_of_the_names_does_not_matter() -> None:
    assert all(nearest_with_room(NAMES, {}, key) == nearest_with_room(NAMES[::-1], {}, key) for key in KEYS)


def test_only_the_keys_of_a_replica_that_goes_move() -> None:
    before = {key: nearest_with_room(NAMES, {}, key) for key in KEYS}
    for gone in NAMES:
        left = [name for name in NAMES if name != gone]
        after = {key: nearest_with_room(left, {}, key) for key in KEYS}
        assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
        assert len({after[key] for key in KEYS if before[key] == gone}) == len(left)  # and they spread


def test_what_is_too_much_for_the_nearest_goes_to_the_second_and_the_rest_on() -> None:
    """All sessions of one prefix: the loads stay close, and the first two take the most."""
    loads: Counter[str] = Counter()
    for _ in range(40):
        loads[nearest_with_room(NAMES[:4], loads, KEYS[0])] += 1
    nearest = nearest_with_room(NAMES[:4], {}, KEYS[0])
    assert loads[nearest] == max(loads.values())
    assert loads.total() == 40
    assert max(loads.values()) <= 1.25 * min(loads.values()) + 5
    few: Counter[str] = Counter()
    for _ in range(10):
        few[nearest_with_room(NAMES[:4], few, KEYS[0])] += 1
    assert len(few) == 2


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), min_size=1), st.integers(0, 2**64 - 1))
def test_whoever_is_picked_is_never_crowded(loads: dict[str, int], key: int) -> None:
    picked = nearest_with_room(loads, loads, key)
    assert loads[picked] <= 1.25 * min(loads.values()) + 4


def test_the_least_loaded_is_the_first_of_several() -> None:
    assert least_loaded(["a", "b", "c"], {"a": 2, "b": 1, "c": 1}) == "b"
    assert least_loaded(["a", "b"], {"a": 1}) == "b"
