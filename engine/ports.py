"""Owns what whoever drives an engine needs of it. engine.loop drives; engine.target and engine.drafting implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.errors import OutriderError
from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams

DraftOutput = Proposal | EarlyProposals

OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


class Engine(Protocol):
    """What a target and a draft have in common. `close` is idempotent; `info` is cheap."""

    def info(self) -> EngineInfo: ...

    def close(self, session: int) -> None: ...

    def has_work(self) -> bool: ...

    def check_integrity(self) -> None: ...


class TargetEngine(Engine, Protocol):
    """Verifies proposals. `open` raises InvalidArgument or Overloaded; `trace` is for who makes spans of forwards."""

    def open(
        self,
        session: int,
        prompt: Sequence[int],
        committed: Sequence[int],
        sampling: SamplingParams,
        stops: StopParams,
        trace: str = "",
    ) -> None: ...

    def propose(self, session: int, proposal: Proposal) -> None: ...

    def propose_early(self, session: int, early: EarlyProposals) -> None: ...

    def decode(self, session: int, max_tokens: int) -> None: ...

    def cached_tokens(self, session: int) -> int: ...

    def step(self) -> Sequence[tuple[int, Verdict | OutriderError]]:
        """One forward; per session it completed a round for, the verdict or the error that ended the session."""
        ...


class DraftEngine(Engine, Protocol):
    """Makes proposals. `open` raises InvalidArgument or Overloaded."""

    def open(self, session: int, prompt: Sequence[int], sampling: SamplingParams) -> None: ...

    def advance(
        self,
        session: int,
        base: State,
        tail: Sequence[int],
        num_speculative_tokens: int,
        confidence_threshold: float,
        run_ahead: RunAhead | None,
    ) -> None: ...

    def step(self) -> Sequence[tuple[int, DraftOutput | OutriderError]]:
        """One forward; the proposals that are ready, or the errors that ended sessions."""
        ...


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """A verdict, and how many prompt tokens its session found in the prefix cache."""

    verdict: Verdict
    cached_tokens: int


class Subscriber(Protocol[OutputT_contra]):
    """Whoever opened a session; called on the asyncio loop. Nothing follows `on_failed` or `on_closed`."""

    def on_output(self, output: OutputT_contra) -> None: ...

    def on_failed(self, error: OutriderError) -> None: ...

    def on_closed(self) -> None: ...
