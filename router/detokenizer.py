"""Owns incremental detokenization: token ids in, whole characters out, never half of one.

A character may span tokens, so decoding is done on a window of tokens that starts at a character boundary: the tokens
of the last piece of text given out (some decoders treat a leading token specially, so a window never begins with a
new token), then the tokens not yet given out. Work per token is the size of the window, not of the sequence.
"""

from __future__ import annotations

from router.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # how a decoder renders bytes that are no character, or not yet one
_MAX_HELD = 3  # most replacement characters that one unfinished character can show as (byte-fallback vocabularies)


class Detokenizer:
    """One sequence's text. `push` all tokens in order, some at a time, then `flush` once.

    The pieces concatenate to `tokenizer.decode` of all ids. A replacement character at the end is held back while more
    bytes could still turn it into a character; `flush` gives it out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_given = 0  # tokens at the front of the window whose text was given out
        self._given = 0  # characters of the window's text that were given out

    def push(self, *token_ids: int) -> str:
        """The text that became certain with these tokens, of one often a word piece, maybe nothing."""
        new = [each for each in token_ids if each not in self._skip and self._tokenizer.token(each) is not None]
        if not new:
            return ""
        self._window += new
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._give_certain(text)
        piece = text[self._given :]
        if piece:
            self._slide(text)
        return piece

    def flush(self) -> str:
        """What was held back: the sequence is over, so it stays what it is."""
        piece = self._decode(self._window)[self._given :]
        self._window, self._num_given, self._given = [], 0, 0
        return piece

    def _give_certain(self, text: str) -> str:
        """All but the trailing replacement characters that may be one unfinished character."""
        body = len(text.rstrip(_REPLACEMENT))
        certain = max(body, len(text) - _MAX_HELD)
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _slide(self, text: str) -> None:
        """Everything up to here is given out and ends at a character boundary: forget the piece before it."""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = len(self._decode(self._window)) if len(self._window) else len(text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
