"""What a fuzzer says to an engine: requests of sessions that make sense so far, and every way of spoiling them.

A script knows by itself what an engine will answer, so what it says is a function of its seed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from google.protobuf.message import Message

from bench.emulated_model import NUM_WORDS
from engine.proposal import State
from engine.sampling import SamplingParams
from rpc.pb import session_pb2
from tests.fuzz.mutations import FLOATS, parsed, spoil_bytes, spoil_fields
from tests.fuzz.stage import BLOCK_SIZE, NUM_BLOCKS

MOST_OPEN = 4
MOST_TOKENS = 40
NEARLY_ALL = (NUM_BLOCKS - 1) * BLOCK_SIZE - MOST_TOKENS  # tokens of the pool
_KEPT = 64  # requests that may be sent once more
_UNKNOWN_SESSIONS = (0, 999, 2**63, 2**64 - 1)


@dataclass
class Told:
    """A session as the script believes it to be."""

    number: int
    sampling: SamplingParams
    tokens: list[int]
    room: int
    coming: list[int] = field(default_factory=list)  # what the target will say next
    trunk: tuple[int, ...] = ()
    before: list[int] = field(default_factory=list)  # the tokens one round ago

    @property
    def state(self) -> State:
        return State.of(self.tokens)


class Script(ABC):
    """An endless row of requests.

    Args:
        seed: all that decides them.
        vocab_size: of the engines.
    """

    request_type: type[Message]

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng, self.vocab_size = Random(f"{type(self).__name__} {seed}"), vocab_size
        self.open: list[Told] = []
        self._closed: list[Told] = []
        self._sent: list[bytes] = []
        self._numbers: set[int] = set()  # of sessions that were ever opened
        self._due: list[int] = []  # to be closed
        self._last_number = 0

    def request(self) -> bytes:
        """The next one that does not end its stream: sound in itself, or spoilt, repeated or out of order."""
        while True:
            data = self._any_request()
            message = parsed(self.request_type, data)
            if message is not None and not self._ends_stream(message):
                self._note(message, data)
                return data

    def last(self) -> bytes:
        """One that does end its stream: no message, no request, or a second opening."""
        while True:
            data = spoil_bytes(self._any_request(), self.rng)
            message = parsed(self.request_type, data)
            if message is None or self._ends_stream(message):
                return data

    def _any_request(self) -> bytes:
        rng, dice = self.rng, self.rng.random()
        if dice < 0.05 and self._sent:
            return rng.choice(self._sent)
        if self._due:
            return self._request(close=session_pb2.CloseSession(session=self._due.pop())).SerializeToString()
        message = self._sound() if dice < 0.75 else self._unordered()
        if dice < 0.82:
            return message.SerializeToString()
        self._give_up(getattr(message, message.WhichOneof("request")).session)
        if dice < 0.94:
            spoil_fields(message, rng)
            return message.SerializeToString()
        return spoil_bytes(message.SerializeToString(), rng)

    def _give_up(self, number: int) -> None:
        """A session of which a request was spoilt may be gone: mostly it is closed, and no more is said of it."""
        if self.rng.random() < 0.4:
            return
        self.open = [told for told in self.open if told.number != number]
        self._due.append(number)

    def _ends_stream(self, message: Any) -> bool:
        kind = message.WhichOneof("request")
        return kind is None or (kind == "open" and message.open.session in self._numbers)

    def _note(self, message: Any, data: bytes) -> None:
        if message.WhichOneof("request") == "open":
            self._numbers.add(message.open.session)
        if len(data) < 1 << 12:
            self._sent = [*self._sent[1 - _KEPT :], data]

    def _sound(self) -> Any:
        """What a router might say now."""
        rng = self.rng
        if not self.open or (len(self.open) < MOST_OPEN and rng.random() < 0.15):
            return self._open_request(self._opened())
        told = rng.choice(self.open)
        if rng.random() < (0.04 if told.room > 0 else 0.4):
            self.open.remove(told)
            self._closed = [*self._closed[-8:], told]
            return self._request(close=session_pb2.CloseSession(session=told.number))
        return self._round(told)

    def _unordered(self) -> Any:
        """What no router should say: a second opening, or words for sessions that are closed or never were."""
        rng = self.rng
        number = rng.choice(_UNKNOWN_SESSIONS)
        told = rng.choice([*self._closed, Told(number, SamplingParams(), self._prompt(), 5), *self.open])
        kind = rng.randrange(4)
        if kind == 0 and rng.random() < 0.1:
            return self._open_request(told)  # ends the stream where it is open
        if kind == 1:
            return self._request(close=session_pb2.CloseSession(session=told.number))
        return self._round(Told(told.number, told.sampling, self._prompt(), 5) if kind == 2 else told)

    def _opened(self) -> Told:
        self._last_number += 1
        told = Told(self._last_number, self._sampling(), self._prompt(), self.rng.randrange(1, MOST_TOKENS))
        self.open.append(told)
        return told

    def _prompt(self) -> list[int]:
        length = self.rng.choice((1, 2, 7, 8, 9, 30, 100, 100 if self.rng.random() < 0.8 else NEARLY_ALL))
        return [self.rng.randrange(NUM_WORDS) for _ in range(length)]

    def _sampling(self) -> SamplingParams:
        rng = self.rng
        temperature = rng.choice((0.0, 0.0, 0.0, 0.7, 1.5))
        filters = rng.choice(((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.5, 0.1)))
        sampling = SamplingParams(temperature, *filters, seed=rng.choice((None, rng.getrandbits(31))))
        if rng.random() < 0.1:
            name = rng.choice(("temperature", "top_p", "min_p"))
            sampling = replace(sampling, **{name: rng.choice(FLOATS)})
        return sampling

    def _traceparent(self) -> str:
        return self.rng.choice(("", "", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "nonsense"))

    def _request(self, **kind: Any) -> Any:
        return self.request_type(**kind)

    @abstractmethod
    def _open_request(self, told: Told) -> Any:
        """Opens a session."""

    @abstractmethod
    def _round(self, told: Told) -> Any:
        """One request of a session's next round."""
