"""Owns KV blocks: which are free, who shares which, and what the prefix cache holds. Torch-free and deterministic.

A block is `block_size` token slots. Block 0 is scratch: padding rows write there and nobody ever owns it. A block is
*held* while its reference count is above 0, else *free*; a free block may still be *cached*, i.e. found again by the
key of the tokens it holds, until it is handed out anew (least recently freed first).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

SCRATCH_BLOCK = 0


def chain_key(parent: bytes, tokens: Sequence[int], num_prompt: int) -> bytes:
    """Key of a full block: its tokens, all tokens before them (through `parent`), and how many are prompt positions.

    The last part keeps KV computed in forwards for prompt positions apart from KV computed in forwards for generated
    ones, which reproducible mode must not mix (docs/design.md §6).
    """
    body = parent + array("q", [num_prompt, *tokens]).tobytes()
    return hashlib.blake2b(body, digest_size=16).digest()


class BlockPool:
    """All KV blocks of one engine.

    Args:
        num_blocks: blocks in the pool, the scratch block included; at least 2.
        block_size: token slots per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, keep_free: int = 0) -> list[int] | None:
        """`count` blocks with one reference each, or None (and no change) if fewer than `keep_free` would be left."""
        if count + keep_free > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._forget(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back one reference to each; the last of a table goes first, so that prefixes stay cached longest."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
            elif self._references[block] < 0:
                raise RuntimeError(f"block {block} was released more often than held")

    def take_cached(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run of `keys`, each with one more reference."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Lets later sessions find the full `block` under `key`. The first block with a key keeps it."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless the block tables in use explain every reference and every free block."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        if counted != self._references:
            wrong = [b for b in range(self.num_blocks) if counted[b] != self._references[b]]
            raise RuntimeError(f"blocks {wrong[:8]} are referenced otherwise than the block tables say")
        free = {block for block in range(1, self.num_blocks) if counted[block] == 0}
        if free != set(self._free):
            raise RuntimeError(f"blocks {sorted(free ^ set(self._free))[:8]} are neither free nor held")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise RuntimeError("the prefix cache's two maps disagree")
