"""Owns where an output ends in text: stop strings, found exactly to the token however many tokens arrive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.proposal import FinishReason
from router.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class StopStrings:
    """What ends an output by its text.

    Attributes:
        strings: the stop strings, none empty.
        min_tokens: a stop string counts only when a later token than the first `min_tokens` completes it.
        include_in_output: the stop string itself is delivered too.
    """

    strings: tuple[str, ...] = ()
    min_tokens: int = 0
    include_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block of tokens adds to the output.

    Attributes:
        text: text that is certain to be delivered.
        token_ids: the delivered tokens of the block, cut after the one that completes a stop string.
        matched_stop: the stop string that ended the output, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    matched_stop: str | None = None


class TextStream:
    """Tokens in, deliverable text out; holds back what may still become a stop string.

    When a stop string appears the output ends with the shortest prefix of tokens whose text contains it, and the text
    is cut where it starts (where it ends if it is to be included). Of several in that prefix the leftmost wins, then
    the one listed first.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest = max(map(len, stops.strings), default=0)
        self._held = ""  # certain as text, not yet deliverable
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Adds a block of committed tokens."""
        if not self._stops.strings:  # then no token of the block can be the last one
            self._num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(*token_ids), tuple(token_ids))
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            delivered, matched = self._add(self._detokenizer.push(token_id))
            text += delivered
            if matched is not None:
                return Piece(text, tuple(token_ids[:count]), matched)
        return Piece(text, tuple(token_ids))

    def finish(self, ending_id: int | None = None) -> Piece:
        """Ends the output without a stop string having been found before.

        Args:
            ending_id: the EOS or stop token that ended it, which is delivered as a token; its text only if stops are
                to be included.
        """
        text, ids = "", () if ending_id is None else (ending_id,)
        self._num_tokens += len(ids)
        if ending_id is not None and self._stops.include_in_output:
            text, matched = self._add(self._detokenizer.push(ending_id))
            if matched is not None:
                return Piece(text, ids, matched)
        rest, matched = self._add(self._detokenizer.flush())
        text += rest
        if matched is None:
            text += self._held
            self._held = ""
        return Piece(text, ids, matched)

    def _add(self, new: str) -> tuple[str, str | None]:
        """Takes new text; returns what can be delivered, and the stop string if one is complete."""
        if not self._stops.strings:
            return new, None
        countable_from = len(self._held)
        self._held += new
        if self._num_tokens > self._stops.min_tokens:
            found = self._leftmost_match(countable_from)
            if found is not None:
                start, stop = found
                end = start + len(stop) if self._stops.include_in_output else start
                delivered, self._held = self._held[:end], ""
                return delivered, stop
        keep = self._possible_start()
        delivered, self._held = self._held[:keep], self._held[keep:]
        return delivered, None

    def _leftmost_match(self, countable_from: int) -> tuple[int, str] | None:
        """The first stop string in the held text that ends behind `countable_from`."""
        matches = []
        for order, stop in enumerate(self._stops.strings):
            start = self._held.find(stop, max(0, countable_from - len(stop) + 1))
            if start >= 0:
                matches.append((start, order, stop))
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop

    def _possible_start(self) -> int:
        """Where the earliest stop string could begin that later text may complete."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            tail = self._held[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops.strings):
                return start
        return len(self._held)


class Output:
    """A request's output: blocks of committed tokens in, pieces to deliver out, until it has ended.

    What is delivered for a token does not depend on the block it comes in, so an output that is given once more the
    tokens delivered before is where it was then.

    Attributes:
        finish_reason: how it ended; None while it goes on.
        matched_stop: the stop string that ended it, if one did.
        num_tokens: tokens delivered.
    """

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | None = None
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """What a block adds. Ends the output at a stop string, or where the target ended it, with the last token."""
        by_id = finish_reason == "stop"
        piece = self._text.push(token_ids[:-1] if by_id else token_ids)
        if piece.matched_stop is None and finish_reason is not None:
            rest = self._text.finish(token_ids[-1] if by_id else None)
            piece = Piece(piece.text + rest.text, piece.token_ids + rest.token_ids, rest.matched_stop)
        self.matched_stop = piece.matched_stop
        self.finish_reason = "stop" if piece.matched_stop is not None else finish_reason
        self.num_tokens += len(piece.token_ids)
        return piece

    def take_singly(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Piece]:
        """What a block adds, token by token."""
        pieces = []
        for end in range(1, max(len(token_ids), 1) + 1):
            is_last = end >= len(token_ids)
            pieces.append(self.take(token_ids[end - 1 : end], finish_reason if is_last else None))
            if self.finish_reason is not None:
                break
        return pieces
