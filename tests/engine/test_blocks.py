"""The block pool and the sequences that hold its blocks, under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import SCRATCH_BLOCK, BlockPool, chain_key
from engine.sequence import Sequence


def test_allocation_is_all_or_nothing_and_never_hands_out_scratch():
    pool = BlockPool(5, 4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert SCRATCH_BLOCK not in blocks
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_releasing_twice_is_an_error():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often than held"):
        pool.release(blocks)


def test_integrity_notices_a_leak():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.check_integrity([blocks])
    with pytest.raises(RuntimeError, match="otherwise than the block tables"):
        pool.check_integrity([blocks[:1]])


def test_cached_blocks_are_shared_and_survive_their_first_owner():
    pool = BlockPool(8, 2)
    first = Sequence([1, 2, 3, 4, 5], 5)
    assert first.reserve(pool, 5)
    first.num_computed = 4
    first.publish_full_blocks(pool, len(first.tokens))
    second = Sequence([1, 2, 3, 4, 9], 5)
    assert second.start(pool)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_computed == second.num_cached == 4
    pool.check_integrity([first.block_table, second.block_table])
    first.release(pool)
    second.release(pool)
    third = Sequence([1, 2, 3, 4], 4)
    assert third.start(pool)
    assert third.num_cached == 2  # the last token is left to compute, and blocks are whole


def test_a_sequence_starts_with_all_its_blocks_or_none():
    pool = BlockPool(6, 2)
    held = Sequence([1, 2, 3, 4], 4)
    assert held.start(pool)
    held.num_computed = 4
    held.publish_full_blocks(pool, 4)
    waiting = Sequence([1, 2, 3, 4, 5, 6, 7], 7)  # 2 blocks are cached, 2 more are wanted, 3 are free
    assert not waiting.start(pool, keep_free=2)
    assert (waiting.block_table, waiting.num_computed, pool.num_free) == ([], 0, 3)
    pool.check_integrity([held.block_table])
    assert waiting.start(pool, keep_free=1)
    assert (len(waiting.block_table), waiting.num_computed) == (4, 4)
    pool.check_integrity([held.block_table, waiting.block_table])


def test_the_least_recently_freed_block_is_reused_first():
    pool = BlockPool(4, 1)
    for token in (7, 8, 9):
        blocks = pool.allocate(1)
        pool.publish(blocks[0], chain_key(b"", [token], 1))
        pool.release(blocks)
    pool.allocate(1)
    assert pool.take_cached([chain_key(b"", [7], 1)]) == []
    assert pool.take_cached([chain_key(b"", [8], 1)]) != []


def test_prompt_and_generated_positions_have_different_keys():
    assert chain_key(b"", [1, 2], 2) != chain_key(b"", [1, 2], 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 30)), max_size=40))
def test_blocks_are_all_accounted_for_after_any_history(steps):
    """Sequences over a tiny alphabet, so that prefixes are shared often; opened, grown, rolled back, released."""
    pool = BlockPool(24, 4)
    live: dict[int, Sequence] = {}
    for action, key, amount in steps:
        if action == 0 and key not in live:
            live[key] = Sequence([amount % 2] * amount, amount)
            live[key].start(pool, keep_free=1)
        elif key in live and action == 1 and live[key].reserve(pool, len(live[key].tokens)):
            live[key].num_computed = len(live[key].tokens)
            live[key].tokens.append(amount % 2)
            live[key].publish_full_blocks(pool, len(live[key].tokens))
        elif key in live and action == 2:
            live[key].release(pool)
        elif key in live and action == 3:
            live.pop(key).release(pool)
        pool.check_integrity(s.block_table for s in live.values())
    for sequence in live.values():
        sequence.release(pool)
    assert pool.num_free == 23
