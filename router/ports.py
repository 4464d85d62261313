"""Owns what the router needs of a draft and of a target. rpc.clients implements it; tests pass fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams


class TargetSession(Protocol):
    """One open sequence on a target. Sending never waits; every round answers with one verdict.

    Opening prefills and yields the first verdict (num_proposed 0, one token, or none when the resumed sequence was
    already finished).
    """

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens the prefix cache already held; known once the first verdict came."""
        ...

    def propose(self, proposal: Proposal, *, traceparent: str = "") -> None: ...

    def propose_early(self, early: EarlyProposals) -> None:
        """Proposals for what may come of the round under way. If one does, its verdict follows without being asked."""
        ...

    def decode(self, max_tokens: int, *, traceparent: str = "") -> None:
        """Run on plainly for up to `max_tokens` tokens more, one verdict each; 0 interrupts."""
        ...

    async def verdict(self) -> Verdict:
        """The next verdict. Raises OutriderError when the session or the peer is gone."""
        ...

    async def close(self) -> None:
        """Frees the blocks; returns when the target has acknowledged, or is gone. Idempotent."""
        ...


class TargetPort(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def open(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        sampling: SamplingParams,
        stops: StopParams,
        *,
        deadline_s: float = 0.0,
        traceparent: str = "",
    ) -> TargetSession: ...


class DraftSession(Protocol):
    """One sequence on a draft."""

    def advance(
        self,
        base: State,
        tail: Sequence[int],
        num_speculative_tokens: int,
        *,
        confidence_threshold: float = 0.0,
        run_ahead: RunAhead | None = None,
        traceparent: str = "",
    ) -> None:
        """The true sequence has `base.length` tokens and ends with `tail`: commit, roll back, draft on.

        A proposal is owed where tokens are asked for. Early ones may come after it, or without it, as `run_ahead` says.
        """
        ...

    async def proposal(self) -> Proposal:
        """The next proposal, maybe for a state long gone. Raises OutriderError when session or peer is gone."""
        ...

    async def close(self) -> None: ...


class DraftPort(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        on_early: Callable[[EarlyProposals], None],
        traceparent: str = "",
    ) -> DraftSession:
        """`on_early` is told, on the event loop, of proposals made ahead of what is committed."""
        ...
