"""Owns which replica a session goes to: the one whose prefix cache its prompt may meet, unless that one is crowded.

Pure: names, loads and a key in, a name out. Rendezvous hashing (Thaler and Ravishankar, 1998) gives every key a ranking
of all replicas that does not change when others come or go; bounding the load, as in consistent hashing with bounded
loads (Mirrokni, Thorup and Zadimoghaddam, 2018), sends what is too much for the first to the second in rank, where
it meets its prefix again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from engine.proposal import State

PREFIX_TOKENS = 64
"""Tokens that make prompts of one kind: longer than what a chat template puts before everything, and short enough that
all turns of a conversation, and most prompts behind one system prompt, agree in them."""
_SLACK_SHARE, _SLACK_SESSIONS = 1.25, 4  # crowded: above this share of the least load, and these sessions more


def prefix_key(prompt: Sequence[int]) -> int:
    """The same for prompts whose first PREFIX_TOKENS tokens are."""
    return State.of(prompt[:PREFIX_TOKENS]).hash


def least_loaded(names: Iterable[str], loads: Mapping[str, int]) -> str:
    """Of several the first."""
    return min(names, key=lambda name: loads.get(name, 0))


def nearest_with_room(names: Iterable[str], loads: Mapping[str, int], key: int) -> str:
    """The first in the key's ranking that is not crowded; the least loaded one never is.

    Args:
        names: at least one replica.
        loads: sessions by replica; none counts as 0.
        key: what replicas are ranked by.
    """
    ranking = sorted(names, key=lambda name: _rank(name, key), reverse=True)
    limit = _SLACK_SHARE * min(loads.get(name, 0) for name in ranking) + _SLACK_SESSIONS
    return next(name for name in ranking if loads.get(name, 0) <= limit)


def _rank(name: str, key: int) -> bytes:
    """Every router must rank alike, so Python's own hash, which differs by process, will not do."""
    return blake2b(name.encode(), digest_size=8, key=key.to_bytes(8, "big")).digest()
