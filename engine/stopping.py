"""Owns where a sequence ends, as far as token ids can tell. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from engine.proposal import FinishReason


class Cut(NamedTuple):
    """What is left of newly judged tokens.

    Attributes:
        tokens: the tokens to commit.
        num_accepted: how many of them the draft proposed.
        finish_reason: set when the sequence ends with the last of `tokens`.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None


def cut(tokens: tuple[int, ...], num_accepted: int, ending_ids: Collection[int], room: int) -> Cut:
    """Ends a sequence at its first ending id, which is kept, or at max_tokens; on a tie the id wins.

    Ending ids need no check against min_tokens: before that they have probability 0 (`engine.judge`).

    Args:
        tokens: what the judge returned: accepted tokens, then one recovered or bonus token.
        num_accepted: how many of them are accepted draft tokens.
        ending_ids: EOS and stop token ids of the request.
        room: tokens the request may still generate, max_tokens less those generated.
    """
    kept = tokens[:room]
    reason: FinishReason | None = "length" if len(kept) == room else None
    for index, token in enumerate(kept):
        if token in ending_ids:
            kept, reason = kept[: index + 1], "stop"
            break
    return Cut(kept, min(num_accepted, len(kept)), reason)
