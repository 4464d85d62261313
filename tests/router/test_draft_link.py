"""One draft, as a link to it sees it: what is late, what is made ahead, and when it is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import OutriderError, Unavailable
from engine.proposal import EarlyProposals, Proposal, RunAhead, State
from engine.sampling import SamplingParams
from router.acceptance import SpeculationTotals
from router.draft_link import Answer, DraftLink, DraftLinkConfig
from router.peers import PeerSet
from router.policy import RoundPlan
from tests.router.fakes import VirtualClock, engine_info

PATIENCE_S = 0.01
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
AHEAD = RunAhead(7, 0.8, 0.02)
PLAN = RoundPlan("draft_model", 3, run_ahead=AHEAD)


class HandDraft:
    """A port and its only session: a test answers for it."""

    info = engine_info("draft", 250, 4096)

    def __init__(self) -> None:
        self.asked: list[tuple[State, int, RunAhead | None]] = []
        self.traceparents: list[str] = []
        self.gone: OutriderError | None = None
        self._answers: asyncio.Queue[Proposal] = asyncio.Queue()

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        on_early: Callable[[EarlyProposals], None],
        traceparent: str = "",
    ) -> HandDraft:
        return self

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
        if self.gone is not None:
            raise self.gone
        self.asked.append((base, num_speculative_tokens, run_ahead))
        self.traceparents.append(traceparent)

    async def proposal(self) -> Proposal:
        return await self._answers.get()

    async def close(self) -> None:
        await asyncio.sleep(0)

    def say(self, base: State) -> None:
        self._answers.put_nowait(Proposal.chain(base, [1, 2, 3]))


class Linked:
    """A link to a HandDraft, and the sequence that both know: one more token with every round."""

    def __init__(self) -> None:
        self.draft, self.clock, self.totals = HandDraft(), VirtualClock(), SpeculationTotals()
        self.pool = PeerSet().drafts
        self.pool.replace({"draft": self.draft})
        self.link = DraftLink(
            self.pool, SamplingParams(), self.totals, self.clock, DraftLinkConfig(), on_early=lambda _: None
        )
        self.tokens = [5, 6, 7]

    @property
    def base(self) -> State:
        return State.of(self.tokens)

    def begin(self) -> str:
        """A round begins: whether the draft can be asked in it."""
        self.tokens.append(4)
        return self.link.status(self.base, self.tokens, TRACEPARENT)

    def ask(self, timeout_s: float = PATIENCE_S) -> asyncio.Task[Answer]:
        return asyncio.ensure_future(self.link.propose(self.base, self.tokens, PLAN, timeout_s))

    async def be_late_twice(self) -> None:
        for _ in range(2):
            assert self.begin() == "ready"
            assert (await self.ask()).dropped == "late"
            self.draft.say(self.base)
            await settled()


async def warm() -> Linked:
    """Linked with a draft that has computed the prompt."""
    linked = Linked()
    linked.link.warm_up(linked.tokens, vocab_size=250)
    linked.draft.say(linked.base)
    await settled()
    return linked


async def settled() -> None:
    """All that can happen without waiting has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_draft_late_twice_is_asked_without_anybody_waiting() -> None:
    linked = await warm()
    await linked.be_late_twice()
    assert linked.begin() == "busy"
    assert linked.draft.asked[-1] == (linked.base, 3, None)
    assert linked.draft.traceparents[-1] == TRACEPARENT  # or its span would be a trace of its own
    num_asked = len(linked.draft.asked)
    assert linked.begin() == "busy"
    assert len(linked.draft.asked) == num_asked  # one probe at a time
    await linked.link.close()


async def test_one_answer_in_time_and_rounds_wait_for_it_again() -> None:
    linked = await warm()
    await linked.be_late_twice()
    linked.begin()
    linked.clock.spend(PATIENCE_S / 2)
    linked.draft.say(linked.base)
    await settled()
    assert linked.begin() == "ready"
    asking = linked.ask()
    linked.draft.say(linked.base)
    assert (await asking).proposal == Proposal.chain(linked.base, [1, 2, 3])
    assert linked.totals.dropped == {"late": 2}  # and the probe's answer counts for nothing
    await linked.link.close()


async def test_a_draft_that_stays_slow_is_only_probed() -> None:
    linked = await warm()
    await linked.be_late_twice()
    num_asked = len(linked.draft.asked)
    for _ in range(50):
        assert linked.begin() == "busy"
        probed = linked.draft.asked[-1][0]
        linked.clock.spend(PATIENCE_S * 1.5)
        linked.draft.say(probed)
        await settled()
    assert len(linked.draft.asked) == num_asked + 50
    assert linked.totals.dropped == {"late": 2}
    await linked.link.close()


async def test_a_draft_that_is_gone_when_it_is_probed_is_let_go_of() -> None:
    linked = await warm()
    await linked.be_late_twice()
    linked.draft.gone = Unavailable("gone")
    linked.begin()
    assert linked.begin() == "unavailable"
    await linked.link.close()


async def test_a_draft_whose_early_proposal_is_verified_runs_ahead_of_that_and_owes_nothing() -> None:
    """What it was asked for before is never said then, and must not count as still to come."""
    linked = await warm()
    linked.begin()
    assert (await linked.ask(timeout_s=0.0)).dropped == "late"
    linked.link.went_on(linked.base, linked.tokens, AHEAD)
    assert linked.draft.asked[-1] == (linked.base, 0, AHEAD)
    assert linked.begin() == "ready"
    asking = linked.ask(timeout_s=60.0)
    linked.draft.say(linked.base)
    assert (await asking).proposal is not None
    await linked.link.close()


async def test_a_draft_that_has_come_anew_is_asked_at_once_however_often_its_like_has_failed() -> None:
    linked = await warm()
    for _ in range(8):  # by now the next try is seconds away
        linked.draft.gone = Unavailable("gone")
        linked.clock.spend(60.0)
        linked.pool.replace({"draft": linked.draft})
        linked.begin()
        await linked.ask()
    assert linked.begin() == "unavailable"
    linked.pool.replace({"draft": HandDraft()})
    assert linked.begin() == "ready"
    await linked.link.close()
