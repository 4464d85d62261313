"""Owns servers with an OpenAI-style HTTP API as peers: vLLM's and llama.cpp's, one process a mode."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from bench.modes import PLAIN
from bench.peers.peer import Output, max_tokens
from bench.prompts import Prompt
from engine.errors import InvalidArgument, Unavailable

SPECULATIVE = "speculative"
SILENCE_LIMIT_S = 300.0


class OpenAIPeer:
    """Two servers of one model: one started with speculation, one without, because neither is a request's choice there.

    Args:
        name: of the system.
        plain_url: base URL of the one without, e.g. http://host:8000.
        speculative_url: of the one with.
        encode: text → token ids, so that two texts can be compared token by token.
        clock: seconds, monotonic.

    Raises:
        InvalidArgument: not an http(s) URL.
        Unavailable: a server does not answer, or names no model.
    """

    def __init__(
        self,
        name: str,
        plain_url: str,
        speculative_url: str,
        encode: Callable[[str], Sequence[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self._encode, self._clock = name, encode, clock
        self._servers = {PLAIN: _Server(plain_url), SPECULATIVE: _Server(speculative_url)}

    @property
    def modes(self) -> Sequence[str]:
        return list(self._servers)

    def generate(self, prompt: Prompt, mode: str) -> Output:
        """Tokens are those of the server's own usage, of which the first text is taken to be one."""
        server, text = self._servers[mode], list[str]()
        first_s = last_s = 0.0
        num_tokens: int | None = None
        for event in server.stream(prompt):
            now = self._clock()
            for choice in event.get("choices") or ():
                piece = _text(choice)
                first_s = now if piece and not text else first_s
                last_s = now  # the end of the sequence is a token too, though it has no text
                text += [piece] if piece else []
            if event.get("usage"):
                num_tokens = int(event["usage"]["completion_tokens"])
        if num_tokens is None:
            raise Unavailable(f"{server.url}: the stream ended without usage, so its tokens cannot be counted")
        decode_s = last_s - first_s if text else 0.0
        return Output(tuple(self._encode("".join(text))), max(0, num_tokens - 1), decode_s)


class _Server:
    """One base URL, and the model it says it serves."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidArgument("url", url, "an http or https URL")
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self._model = json.loads(b"".join(self._lines("/v1/models", None)))["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.url}/v1/models: names no model") from error

    def stream(self, prompt: Prompt) -> Iterator[Mapping[str, Any]]:
        """The events of one greedy completion as they come. Raises Unavailable."""
        chat = prompt.messages is not None
        body = {
            "model": self._model,
            "max_tokens": max_tokens(prompt),
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"messages": list(prompt.messages or ())} if chat else {"prompt": prompt.text}),
        }
        return self._events(self._lines("/v1/chat/completions" if chat else "/v1/completions", body))

    def _lines(self, path: str, body: Mapping[str, Any] | None) -> Iterator[bytes]:
        """The lines of a reply as they come: to a GET without a body, to a POST with one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SILENCE_LIMIT_S) as reply:
                yield from reply
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise Unavailable(f"{self.url}{path}: HTTP {error.code}: {said or error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.url}{path}: {getattr(error, 'reason', error)}") from error

    def _events(self, lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
        """What follows `data:`, up to [DONE]; comments and empty lines keep a connection alive."""
        for line in lines:
            field, _, value = line.strip().partition(b":")
            if field != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            try:
                event = json.loads(value)
            except ValueError as error:
                raise Unavailable(f"{self.url}: sent an event that is not JSON: {value[:80]!r}") from error
            if event.get("error"):
                raise Unavailable(f"{self.url}: {event['error']}")
            yield event


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a raw prompt or of a chat, thoughts included: they are tokens of the usage too.

    The first event of a chat names a role and has none.
    """
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(choice.get("text") or delta.get("content") or thought)
