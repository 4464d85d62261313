"""Tiny deterministic engines: the next token is a function of the length, and every step serves all who wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.errors import InvalidArgument, OutriderError, Overloaded
from engine.info import EngineInfo
from engine.proposal import Branch, EarlyProposals, Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams

VOCAB_SIZE = 1000
CRASH, OVERLOAD, BUG, FAULT = 990, 991, 992, 993  # first prompt tokens that make the engine misbehave


def next_token(length: int) -> int:
    return (length * 7 + 3) % 900


class FakeEngine:
    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.closed: list[int] = []
        self.steps = 0
        self.forward_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()

    def info(self) -> EngineInfo:
        open_now = len(self.lengths)
        blocks = (64, 64 - open_now, 16)
        return EngineInfo("fake", VOCAB_SIZE, 4096, (2,), 8, *blocks, open_now, self.steps, self.forward_s)

    def close(self, session: int) -> None:
        if self.lengths.pop(session, None) is not None:
            self.closed.append(session)

    def check_integrity(self) -> None:
        return

    def _begin_step(self) -> None:
        self.in_step.set()
        self.gate.wait()
        self.steps += 1

    def _admit(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidArgument("prompt_token_ids", "nothing", "at least one token")
        if prompt[0] == OVERLOAD:
            raise Overloaded("all 3 sessions of this target are in use", 1.5)
        if prompt[0] == BUG:
            raise ValueError("secret detail of a bug")


class FakeTarget(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.firsts: dict[int, int] = {}
        self.traces: dict[int, str] = {}
        self.proposals: list[tuple[int, Proposal]] = []
        self.early: dict[int, EarlyProposals] = {}
        self.allowance: dict[int, int] = {}
        self.max_tokens: dict[int, int] = {}

    def open(
        self,
        session: int,
        prompt: Sequence[int],
        committed: Sequence[int],
        sampling: SamplingParams,
        stops: StopParams,
        trace: str = "",
    ) -> None:
        self._admit(prompt)
        sampling.validate()
        stops.validate(VOCAB_SIZE)
        self.lengths[session] = len(prompt) + len(committed)
        self.firsts[session] = prompt[0]
        self.traces[session] = trace
        self.max_tokens[session] = len(prompt) + stops.max_tokens

    def propose(self, session: int, proposal: Proposal) -> None:
        self.proposals.append((session, proposal))

    def propose_early(self, session: int, early: EarlyProposals) -> None:
        self.early[session] = early

    def decode(self, session: int, max_tokens: int) -> None:
        self.allowance[session] = self.allowance.get(session, 0) + max_tokens if max_tokens else 0

    def close(self, session: int) -> None:
        super().close(session)
        self.firsts.pop(session, None)
        self.allowance.pop(session, None)
        self.proposals = [(owner, proposal) for owner, proposal in self.proposals if owner != session]

    def cached_tokens(self, session: int) -> int:
        return self.lengths[session] // 2

    def has_work(self) -> bool:
        return bool(self.firsts or self.proposals or any(self.allowance.values()))

    def step(self) -> list[tuple[int, Verdict | OutriderError]]:
        self._begin_step()
        outcomes: list[tuple[int, Verdict | OutriderError]] = []
        for session, first in self.firsts.items():
            if first == CRASH:
                raise RuntimeError("secret detail of a crash")
            outcomes.append((session, OutriderError("this one only") if first == FAULT else self._advance(session)))
        self.firsts = {}
        for session, proposal in self.proposals:
            outcomes.append((session, self._advance(session, proposal)))
        self.proposals = []
        for session, left in self.allowance.items():
            if left:
                outcomes.append((session, self._advance(session)))
                self.allowance[session] = left - 1
        return outcomes

    def _advance(self, session: int, proposal: Proposal | None = None) -> Verdict:
        length, tokens = self.lengths[session], []
        for token in proposal.tokens if proposal else ():
            if token != next_token(length + len(tokens)):
                break
            tokens.append(token)
        num_accepted = len(tokens)
        tokens.append(next_token(length + num_accepted))
        self.lengths[session] += len(tokens)
        base = proposal.base if proposal else State(length, 0)
        finish = "length" if self.lengths[session] >= self.max_tokens[session] else None
        num_proposed = len(proposal.tokens) if proposal else 0
        return Verdict(base, num_proposed, num_accepted, tuple(tokens), finish, 0.0625, 0.0, 4)


class FakeDraft(FakeEngine):
    """Answers what it is asked for, then sends early proposals for the outcome that all of it is accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, State, int]] = []
        self.run_ahead: dict[int, RunAhead | None] = {}

    def open(self, session: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._admit(prompt)
        self.lengths[session] = len(prompt)

    def advance(
        self,
        session: int,
        base: State,
        tail: Sequence[int],
        num_speculative_tokens: int,
        confidence_threshold: float,
        run_ahead: RunAhead | None,
    ) -> None:
        self.lengths[session] = base.length
        self.asked.append((session, base, num_speculative_tokens))
        self.run_ahead[session] = run_ahead

    def close(self, session: int) -> None:
        super().close(session)
        self.asked = [entry for entry in self.asked if entry[0] != session]

    def has_work(self) -> bool:
        return bool(self.asked)

    def step(self) -> list[tuple[int, Proposal | EarlyProposals | OutriderError]]:
        self._begin_step()
        asked, self.asked = self.asked, []
        outputs: list[tuple[int, Proposal | EarlyProposals | OutriderError]] = []
        for session, base, count in asked:
            tokens = [next_token(base.length + i) for i in range(count)]
            if count:
                outputs.append((session, Proposal.chain(base, tokens, drafter="fake")))
            if (run_ahead := self.run_ahead[session]) is not None:
                outputs.append((session, _early(base, tokens, run_ahead)))
        return outputs


def _early(base: State, trunk: Sequence[int], run_ahead: RunAhead) -> EarlyProposals:
    first, *more = (next_token(base.length + len(trunk) + i) for i in range(1 + run_ahead.num_speculative_tokens))
    return EarlyProposals(base, base.extend(trunk), (Branch(len(trunk), first, tuple(more)),), "fake")
