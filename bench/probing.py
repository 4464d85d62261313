"""Owns timing the devices of a running pair: forwards of target and draft by rows, context and sessions, over gRPC.

It talks to the engines as a router does, and takes the times they report of their own forwards: so a target spread over
several devices, or a draft on another machine, is timed where it is. The system must have nothing else to do.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.calibration import Devices, Forward, Ranks, Timed
from engine.proposal import EarlyProposals, Proposal, State
from engine.sampling import SamplingParams, StopParams
from router.ports import DraftPort, DraftSession, TargetPort, TargetSession

NUM_DRAFTED = 8
"""Tokens of each timed proposal of the draft."""
_NUM_DECODED = 16  # plain tokens of each session side by side, of which the middle half counts
_ROUNDS = 4  # timed with each opened session
_WAITS, _WAIT_CONTEXT = 12, 64


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target wrote."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is timed.

    Attributes:
        rows: of one session in a forward of the target.
        sessions: side by side, one row each.
        contexts: tokens of each session; two of them tell what a token costs.
        prompt_rows: tokens of a prompt that one forward of the target takes, and of the draft.
        num_drafted: tokens of a proposal of middle length.
        repeats: turns of everything; medians are over them.
    """

    rows: tuple[int, ...]
    sessions: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt_rows: tuple[int, int]
    num_drafted: int
    repeats: int

    @property
    def num_cells(self) -> int:
        """How often `time_devices` tells of one."""
        return self.repeats * len(self.contexts) * (len(self.rows) + 2 * len(self.sessions))


class Prompts:
    """Prompts of any length, out of tokens of the user's own: the same for the same turn, others for others."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def made(self, length: int, turn: str) -> list[int]:
        return random.Random(f"{length}, {turn}").choices(self._tokens, k=length)


async def time_devices(
    target: TargetPort, draft: DraftPort, prompts: Prompts, plan: Plan, done: Callable[[], None]
) -> Devices:
    """All of it, one device after the other; tells of each cell."""
    of_target = Timed(
        tuple(await target_forwards(target, prompts, plan, done)), tuple(await target_prompts(target, prompts, plan))
    )
    of_draft = Timed(
        tuple(await draft_forwards(draft, prompts, plan, done)), tuple(await draft_prompts(draft, prompts, plan))
    )
    return Devices(of_target, of_draft, await draft_wait_s(draft, prompts, plan.num_drafted, time.perf_counter))


async def target_forwards(port: TargetPort, prompts: Prompts, plan: Plan, done: Callable[[], None]) -> list[Forward]:
    """Forwards of generated rows: of one session with several rows, and of several sessions; tells of each cell."""
    found = []
    for _ in range(plan.repeats):
        for context in plan.contexts:
            for rows in plan.rows:
                found.append(await _verified(port, prompts.made(context, "0"), rows))
                done()
            for number in plan.sessions:
                sessions = [prompts.made(context, f"{each}") for each in range(number)]
                found.append(await _decoded(port, sessions))
                done()
    return found


async def target_prompts(port: TargetPort, prompts: Prompts, plan: Plan) -> list[Forward]:
    """Forwards of prompts that no cache holds; `rows_each` is their length."""
    found, length = [], plan.prompt_rows[0]
    for turn in range(plan.repeats):
        session = port.open(prompts.made(length, f"new {turn}"), [], SamplingParams(), _stops(1))
        verdict = await session.verdict()
        await session.close()
        found.append(Forward(1, length, length, verdict.forward_time_s))
    return found


async def draft_forwards(port: DraftPort, prompts: Prompts, plan: Plan, done: Callable[[], None]) -> list[Forward]:
    """Forwards that draft one more token for each of some sessions; tells of each cell."""
    found = []
    for _ in range(plan.repeats):
        for context in plan.contexts:
            for number in plan.sessions:
                sessions = [prompts.made(context, f"{each}") for each in range(number)]
                found.append(await _drafted(port, sessions))
                done()
    return found


async def draft_prompts(port: DraftPort, prompts: Prompts, plan: Plan) -> list[Forward]:
    """As target_prompts."""
    found, length = [], plan.prompt_rows[1]
    for turn in range(plan.repeats):
        session, state = _open_draft(port, prompts.made(length, f"new {turn}"), SamplingParams())
        session.advance(state, [], 1)
        proposal = await session.proposal()
        await session.close()
        found.append(Forward(1, length, length, proposal.draft_time_s))
    return found


async def draft_wait_s(port: DraftPort, prompts: Prompts, num_tokens: int, clock: Callable[[], float]) -> float:
    """Of a proposal of so many tokens, what is not in the draft's forwards: its host's work, the way there and back.

    Args:
        clock: seconds, monotonic.
    """
    session, state = _open_draft(port, prompts.made(_WAIT_CONTEXT, "wait"), SamplingParams())
    tail: list[int] = []
    seconds = []
    for _ in range(_WAITS):
        began = clock()
        session.advance(state, tail, num_tokens)
        proposal = await session.proposal()
        seconds.append(clock() - began - proposal.draft_time_s)
        state, tail = state.extend(proposal.tokens), list(proposal.tokens)
    await session.close()
    return max(statistics.median(seconds[1:]), 0.0)  # the first has the prompt in it


async def ranks(port: DraftPort, texts: Sequence[Text], num_ranked: int, done: Callable[[], None]) -> Ranks:
    """Where in the draft's ranking each token of the texts is, given all before it; tells of each text."""
    found = Ranks()
    for text in texts:
        known = [*text.prompt, *text.output[:1]]  # the first token is never drafted: the prompt's forward brings it
        session, state = _open_draft(port, known, SamplingParams(temperature=1.0))
        tail: list[int] = []
        for token in text.output[1:]:
            session.advance(state, tail, 1)
            found = found.seen(_rank_of(token, await session.proposal()), num_ranked)
            state, tail = state.extend([token]), [token]
        await session.close()
        done()
    return found


def _rank_of(token: int, proposal: Proposal) -> int | None:
    """From 0; None where the draft did not send it. A proposal that is sampled carries what it was sampled from."""
    (probs,) = proposal.draft_probs or ((),)
    if not probs:
        return None
    order = sorted(range(len(probs.ids)), key=lambda index: -probs.probs[index])
    ids = [probs.ids[index] for index in order]
    return ids.index(token) if token in ids else None


async def _verified(port: TargetPort, prompt: Sequence[int], rows: int) -> Forward:
    """One session; its draft tokens are whatever they are, since a forward takes as long whether they are right."""
    session = port.open(prompt, [], SamplingParams(), _stops(_ROUNDS * rows + 1))
    tokens = [*prompt, *(await session.verdict()).tokens]
    seconds, queues, contexts = [], [], []
    for _ in range(_ROUNDS):
        session.propose(Proposal.chain(State.of(tokens), prompt[: rows - 1]))
        verdict = await session.verdict()
        seconds.append(verdict.forward_time_s)
        queues.append(verdict.queue_time_s)
        contexts.append(len(tokens))
        tokens += verdict.tokens
    await session.close()
    return Forward(1, rows, statistics.mean(contexts), statistics.median(seconds), statistics.median(queues))


async def _decoded(port: TargetPort, prompts: Sequence[Sequence[int]]) -> Forward:
    """Sessions side by side, plainly. They start and end one after the other, so the middle counts."""
    sessions = [port.open(prompt, [], SamplingParams(), _stops(_NUM_DECODED + 1)) for prompt in prompts]
    await asyncio.gather(*(session.verdict() for session in sessions))
    for session in sessions:
        session.decode(_NUM_DECODED)
    seconds = await asyncio.gather(*map(_middle, sessions))
    await asyncio.gather(*(session.close() for session in sessions))
    context = statistics.mean(map(len, prompts)) + _NUM_DECODED / 2
    return Forward(len(sessions), 1, context, statistics.median(statistics.median(each) for each in seconds))


async def _middle(session: TargetSession) -> list[float]:
    """Seconds of its forwards but for the first and the last quarter."""
    seconds = [(await session.verdict()).forward_time_s for _ in range(_NUM_DECODED)]
    return seconds[_NUM_DECODED // 4 : -_NUM_DECODED // 4]


async def _drafted(port: DraftPort, prompts: Sequence[Sequence[int]]) -> Forward:
    """Sessions side by side. All are asked at once, so but for the first and the last forward all are in it."""
    opened = [_open_draft(port, prompt, SamplingParams()) for prompt in prompts]
    asked: list[tuple[DraftSession, State, list[int]]] = [(session, state, []) for session, state in opened]
    seconds = []
    for number in range(_ROUNDS + 1):
        proposals = await _proposals(asked)
        if number:  # the first has the prompt in it
            seconds += [proposal.draft_time_s / len(proposal.tokens) for proposal in proposals]
        asked = [
            (session, state.extend(proposal.tokens), list(proposal.tokens))
            for (session, state, _), proposal in zip(asked, proposals, strict=True)
        ]
    await asyncio.gather(*(session.close() for session, _ in opened))
    context = statistics.mean(map(len, prompts)) + NUM_DRAFTED * (_ROUNDS / 2 + 1)
    return Forward(len(opened), 1, context, statistics.median(seconds))


async def _proposals(asked: Sequence[tuple[DraftSession, State, list[int]]]) -> list[Proposal]:
    for session, state, tail in asked:
        session.advance(state, tail, NUM_DRAFTED)
    return await asyncio.gather(*(session.proposal() for session, _, _ in asked))


def _open_draft(port: DraftPort, prompt: Sequence[int], sampling: SamplingParams) -> tuple[DraftSession, State]:
    return port.open(prompt, sampling, on_early=_unasked), State.of(prompt)


def _unasked(early: EarlyProposals) -> None:
    """Nothing here lets a draft run ahead."""


def _stops(max_tokens: int) -> StopParams:
    return StopParams(max_tokens=max_tokens, ignore_eos=True)
