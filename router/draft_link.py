"""Owns one session's dealings with a draft replica that may be slow, wrong, or gone, so that a round never has to care.

A proposal is awaited for a bounded time. What comes later, for a state that has passed, or malformed is dropped and
counted; a draft that fails is closed and opened again after a while, on whichever replica is there then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import OutriderError, Unavailable
from engine.proposal import EarlyProposals, Proposal, RunAhead, State
from engine.sampling import SamplingParams
from router.acceptance import SpeculationTotals
from router.peers import Pool
from router.policy import DraftStatus, RoundPlan
from router.ports import DraftPort, DraftSession


@dataclass(frozen=True, slots=True)
class DraftLinkConfig:
    """Patience with a draft.

    Attributes:
        retry_s: seconds before a failed draft is opened again, unless another has come; doubles with each failure in a
            row.
        max_retry_s: longest such wait.
        max_malformed: malformed proposals in a row after which the draft counts as failed.
        busy_rounds: rounds after which an answer that is still out is given up.
        max_late: proposals late in a row after which no round waits for the draft any more, until it has been seen to
            answer in time.
        close_s: longest wait for a draft to acknowledge that its blocks are free; it goes on in the background.
    """

    retry_s: float = 0.5
    max_retry_s: float = 8.0
    max_malformed: int = 3
    busy_rounds: int = 64
    max_late: int = 2
    close_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking the draft.

    Attributes:
        proposal: for exactly the state that was asked about; None when the round goes on without.
        wait_s: seconds the round waited.
        dropped: why there is none: "late", "malformed", "failed", or "".
    """

    proposal: Proposal | None
    wait_s: float
    dropped: str = ""


class DraftLink:
    """The draft side of one session. `close` exactly once, whatever happened before.

    Args:
        on_early: told of proposals that were made ahead of what is committed.
    """

    def __init__(
        self,
        drafts: Pool[DraftPort],
        sampling: SamplingParams,
        totals: SpeculationTotals,
        clock: Callable[[], float],
        config: DraftLinkConfig,
        on_early: Callable[[EarlyProposals], None],
    ) -> None:
        self._drafts, self._sampling, self._totals = drafts, sampling, totals
        self._clock, self._config, self._on_early = clock, config, on_early
        self._session: DraftSession | None = None
        self._name = ""
        self._port: DraftPort | None = None
        self._window = 0
        self._vocab_size = 0
        self._told = 0  # tokens of the true sequence the draft has been told
        self._reader: asyncio.Task[Proposal] | None = None
        self._written_off: set[State] = set()  # asked about, and no longer waited for
        self._late_streak = self._malformed_streak = self._failures = 0
        self._busy = 0  # rounds
        self._patience_s, self._probed = 0.0, 1  # how long the latest round waited at most, and for how many tokens
        self._retry_at, self._arrivals = float("-inf"), 0
        self._closing: set[asyncio.Task[None]] = set()

    def warm_up(self, tokens: Sequence[int], vocab_size: int, traceparent: str = "") -> None:
        """Has the draft compute the sequence so far while the target does, so that its first proposal is not late.

        Args:
            vocab_size: ids below it are known to the target; a proposal with others is malformed.
        """
        self._vocab_size = vocab_size
        if not self._ensure_open(tokens, traceparent) or self._session is None:
            return
        base = State.of(tokens)
        self._written_off.add(base)
        try:
            self._session.advance(base, tokens[-1:], 1, traceparent=traceparent)
        except OutriderError as error:
            self._fail_with(error)
            return
        self._reader = asyncio.ensure_future(self._session.proposal())

    def status(self, base: State, tokens: Sequence[int], traceparent: str = "") -> DraftStatus:
        """Whether the draft can be asked in the round that begins; opens it if it is not open and may be tried."""
        if not self._ensure_open(tokens, traceparent):
            return "unavailable"
        if self._has_failed():
            return "unavailable"
        if self._late_streak >= self._config.max_late and self._reader is None and self._session is not None:
            self._probe(self._session, base, tokens, traceparent)
        return "busy" if self._is_busy() else "ready"

    def room(self, length: int) -> int:
        """Draft tokens the draft's window still holds behind `length` tokens; its session ends when there is none."""
        room = self._window - length
        if room < 1 and self._session is not None:
            self._hang_up()
        return room

    async def propose(
        self, base: State, tokens: Sequence[int], plan: RoundPlan, timeout_s: float, traceparent: str = ""
    ) -> Answer:
        """Tells the draft what it was not told of `tokens` and waits up to `timeout_s` for its proposal."""
        assert self._session is not None
        began, self._patience_s, self._probed = self._clock(), timeout_s, plan.num_speculative_tokens
        tail = tokens[min(self._told, len(tokens) - 1) :]
        try:
            self._session.advance(
                base,
                tail,
                plan.num_speculative_tokens,
                confidence_threshold=plan.confidence_threshold,
                run_ahead=plan.run_ahead,
                traceparent=traceparent,
            )
            self._told = len(tokens)
            proposal = await self._answer_for(base, timeout_s)
        except OutriderError as error:
            self._fail_with(error)
            return Answer(None, self._clock() - began, "failed")
        wait_s = self._clock() - began
        if proposal is None:
            self._was_late(base)
            return Answer(None, wait_s, "late")
        self._late_streak = 0
        if proposal.flaw(self._vocab_size, plan.num_speculative_tokens) is not None:
            self._was_malformed()
            return Answer(None, wait_s, "malformed")
        self._malformed_streak = self._failures = 0
        return Answer(proposal, wait_s)

    def went_on(self, base: State, tokens: Sequence[int], run_ahead: RunAhead | None) -> None:
        """An early proposal for `base` is being verified: the draft may run ahead of that."""
        if self._session is None:
            return
        try:
            self._session.advance(base, tokens[min(self._told, len(tokens) - 1) :], 0, run_ahead=run_ahead)
        except OutriderError as error:
            self._fail_with(error)
            return
        self._told = len(tokens)
        if self._reader is not None:  # what it still owed it owes no more
            self._reader.cancel()
            self._reader = None

    async def close(self) -> None:
        """Frees the draft's blocks. One that does not acknowledge holds up nobody for longer than `close_s`."""
        self._hang_up()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._config.close_s)

    def _ensure_open(self, tokens: Sequence[int], traceparent: str) -> bool:
        """False while there is no draft. True without a session means the sequence outgrew the draft's window."""
        if self._session is not None:
            return True
        if self._clock() < self._retry_at and self._drafts.arrivals == self._arrivals:
            return False
        # By load alone, unlike targets: a draft computes a prompt long before its target has, so a prefix found in
        # its cache gains nothing, while a neighbour more may make its proposals late.
        picked = self._drafts.pick()
        if picked is None:
            return False
        self._name, self._port = picked
        try:
            self._window = self._port.info.max_context_length
            if self._window <= len(tokens):
                return True
            self._session = self._port.open(tokens, self._sampling, on_early=self._on_early, traceparent=traceparent)
        except OutriderError as error:
            self._fail_with(error)
            return False
        self._told = len(tokens)
        self._drafts.took(self._name)
        return True

    def _probe(self, session: DraftSession, base: State, tokens: Sequence[int], traceparent: str) -> None:
        """Asks the draft for what it was late with, but has no round wait for it."""
        try:
            tail = tokens[min(self._told, len(tokens) - 1) :]
            session.advance(base, tail, self._probed, traceparent=traceparent)
        except OutriderError as error:
            self._fail_with(error)
            return
        self._told = len(tokens)
        self._written_off.add(base)
        reader, self._busy, asked = asyncio.ensure_future(session.proposal()), 0, self._clock()

        def answered(_: asyncio.Future[Proposal]) -> None:
            if self._reader is reader and self._clock() - asked <= self._patience_s:
                self._late_streak = 0

        reader.add_done_callback(answered)
        self._reader = reader

    def _is_busy(self) -> bool:
        """Whether an answer nobody waits for any more is still out."""
        if self._reader is None:
            self._busy = 0
            return False
        self._busy += 1
        return self._busy <= self._config.busy_rounds

    def _has_failed(self) -> bool:
        """Takes an answer that came while no round waited for it; whether it was an error."""
        reader = self._reader
        if reader is None or not reader.done():
            return False
        self._reader = None
        try:
            self._drop_stale(reader.result())
        except OutriderError as error:
            self._fail_with(error)
            return True
        return False

    async def _answer_for(self, base: State, timeout_s: float) -> Proposal | None:
        """The proposal for `base`; None when it did not come in time. The read goes on: its answer is stale by then."""
        assert self._session is not None
        give_up_at = self._clock() + timeout_s
        while True:
            if self._reader is None:
                self._reader = asyncio.ensure_future(self._session.proposal())
            reader = self._reader
            await asyncio.wait({reader}, timeout=max(0.0, give_up_at - self._clock()))
            if not reader.done():
                return None
            self._reader = None
            proposal = reader.result()
            if proposal.base == base:
                self._written_off.clear()
                return proposal
            self._drop_stale(proposal)

    def _drop_stale(self, proposal: Proposal) -> None:
        if proposal.base in self._written_off:
            self._written_off.discard(proposal.base)
        else:
            self._totals.count_dropped("stale")

    def _was_late(self, base: State) -> None:
        self._written_off.add(base)
        self._totals.count_dropped("late")
        self._late_streak += 1
        self._busy = 0

    def _was_malformed(self) -> None:
        self._totals.count_dropped("malformed")
        self._malformed_streak += 1
        if self._malformed_streak >= self._config.max_malformed:
            self._fail()

    def _fail_with(self, error: OutriderError) -> None:
        """One that cannot be reached is not picked again, by any session, before it has been discovered anew."""
        if isinstance(error, Unavailable) and self._port is not None:
            self._drafts.lose(self._name, self._port)
        self._fail()

    def _fail(self) -> None:
        """The draft is of no use now: let go of it and try again after a while."""
        self._hang_up()
        self._retry_at = self._clock() + min(self._config.retry_s * 2**self._failures, self._config.max_retry_s)
        self._arrivals = self._drafts.arrivals
        self._failures = min(self._failures + 1, 16)
        self._malformed_streak = self._late_streak = 0

    def _hang_up(self) -> None:
        session, self._session = self._session, None
        reader, self._reader = self._reader, None
        self._written_off.clear()
        if session is None:
            return
        closing = asyncio.ensure_future(self._close_session(session, reader, self._name))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_session(self, session: DraftSession, reader: asyncio.Task[Proposal] | None, name: str) -> None:
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})
            if not reader.cancelled():
                reader.exception()  # seen: what a draft says after it was let go of changes nothing
        try:
            with contextlib.suppress(OutriderError):  # gone already, and its blocks with it
                await session.close()
        finally:
            self._drafts.gave_back(name)
