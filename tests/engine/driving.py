"""Drives engines by hand in tests: run to a verdict, and speculate with proposals of the test's choice."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import OutriderError
from engine.proposal import Proposal, State, Verdict
from engine.sampling import SamplingParams, StopParams
from engine.target import TargetEngine

Propose = Callable[[list[int]], list[int]]  # generated so far → draft tokens


def next_verdict(engine: TargetEngine, session: int) -> Verdict:
    """Steps until `session` has a verdict; checks integrity at every step."""
    for _ in range(200):
        outputs = dict(engine.step())
        engine.check_integrity()
        if session in outputs:
            outcome = outputs[session]
            if isinstance(outcome, OutriderError):
                raise outcome
            return outcome
    raise AssertionError(f"no verdict for session {session} in 200 steps")


def generate(
    engine: TargetEngine,
    prompt: list[int],
    propose: Propose,
    *,
    max_tokens: int = 40,
    sampling: SamplingParams | None = None,
    session: int = 1,
    **stops: object,
) -> tuple[list[int], str | None]:
    """Generates with the proposals `propose` makes; returns tokens and finish reason."""
    stop_params = StopParams(max_tokens=max_tokens, **stops)  # type: ignore[arg-type]
    engine.open(session, prompt, [], sampling or SamplingParams(), stop_params)
    tokens: list[int] = []
    verdict = next_verdict(engine, session)
    tokens += verdict.tokens
    while verdict.finish_reason is None:
        base = State.of(prompt + tokens)
        engine.propose(session, Proposal.chain(base, propose(tokens)))
        verdict = next_verdict(engine, session)
        assert verdict.base == base
        tokens += verdict.tokens
    engine.close(session)
    engine.check_integrity()
    return tokens, verdict.finish_reason
