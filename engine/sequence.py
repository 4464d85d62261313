"""Owns Sequence: the committed tokens of one session, their KV blocks, and how far the KV is computed. Torch-free.

There are no prefill and decode phases: `num_computed` chases `len(tokens)`, and rollback lowers it (vLLM v1's idea).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.blocks import BlockPool, chain_key


@dataclass(slots=True)
class Sequence:
    """A growing list of tokens with a block table.

    Attributes:
        tokens: prompt and everything after it that is to be computed.
        num_prompt: how many of them are prompt positions.
        num_computed: tokens whose KV is valid; always below len(tokens), so that every forward yields logits.
        num_cached: tokens found in the prefix cache at the start.
        wanted_at: when rows were last wanted for it, in seconds of the runner's clock.
        block_table: blocks in order; slot of position i is block_table[i // block_size] * block_size + i % block_size.
            Empty before the start and after preemption.
        trace: what spans of its forwards hang on, opaque to the engine; "" where none are wanted.
    """

    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    num_cached: int = 0
    wanted_at: float = -math.inf
    block_table: list[int] = field(default_factory=list)
    trace: str = ""
    _keys: list[bytes] = field(default_factory=list)  # of the full blocks published or attached so far

    def start(self, pool: BlockPool, keep_free: int = 0) -> bool:
        """Takes over what the prefix cache holds of the tokens (the last is left to compute) and blocks for the rest.

        False (and no change) when fewer than `keep_free` blocks would stay free.
        """
        usable = (len(self.tokens) - 1) // pool.block_size
        keys = [key for _, key in zip(range(usable), self._chain(pool.block_size), strict=False)]
        cached = pool.take_cached(keys)
        missing = pool.allocate(pool.blocks_for(len(self.tokens)) - len(cached), keep_free)
        if missing is None:
            pool.release(cached)
            return False
        self.block_table = cached + missing
        self._keys = keys[: len(cached)]
        self.num_computed = self.num_cached = len(cached) * pool.block_size
        return True

    def reserve(self, pool: BlockPool, num_tokens: int) -> bool:
        """Makes the block table cover `num_tokens` positions; False (and no change) when blocks are short."""
        missing = pool.blocks_for(num_tokens) - len(self.block_table)
        if missing <= 0:
            return True
        blocks = pool.allocate(missing)
        if blocks is None:
            return False
        self.block_table += blocks
        return True

    def roll_back(self, num_computed: int) -> None:
        """KV from position `num_computed` on is no longer valid. Arithmetic only; blocks stay for what comes next."""
        self.num_computed = min(self.num_computed, num_computed, len(self.tokens) - 1)

    def slots(self, positions: Iterable[int], block_size: int) -> list[int]:
        """Where the keys and values of positions lie."""
        return [self.block_table[at // block_size] * block_size + at % block_size for at in positions]

    def trim(self, pool: BlockPool) -> None:
        """Gives back the blocks past those of its tokens."""
        needed = pool.blocks_for(len(self.tokens))
        pool.release(self.block_table[needed:])
        del self.block_table[needed:]

    def publish_full_blocks(self, pool: BlockPool, num_committed: int) -> None:
        """Offers every newly completed block of the first `num_committed` tokens to the prefix cache."""
        full = min(self.num_computed, num_committed) // pool.block_size
        if len(self._keys) >= full:
            return
        for index, key in enumerate(self._chain(pool.block_size, start=len(self._keys)), start=len(self._keys)):
            if index >= full:
                break
            pool.publish(self.block_table[index], key)
            self._keys.append(key)

    def release(self, pool: BlockPool) -> None:
        """Gives all blocks back (end of session, or preemption: the tokens stay and are recomputed later)."""
        pool.release(self.block_table)
        self.block_table, self._keys, self.num_computed = [], [], 0

    def _chain(self, block_size: int, start: int = 0) -> Iterator[bytes]:
        parent = self._keys[start - 1] if start else b""
        for begin in range(start * block_size, len(self.tokens) - block_size + 1, block_size):
            block = self.tokens[begin : begin + block_size]
            parent = chain_key(parent, block, min(max(self.num_prompt - begin, 0), block_size))
            yield parent
