from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import OutriderError, Unavailable
from engine.proposal import Proposal, SparseProbs, State
from engine.sampling import StopParams
from router.policy import SpeculationControl
from router.tokenizer import Tokenizer
from tests.router.fakes import Behaviour, FakeDraftSession, wandering
from tests.router.test_session import OFF, Bench, collect

CONTROL = SpeculationControl(drafter="draft_model")
STOPS = StopParams(max_tokens=80)
MODEL = wandering(200)


async def undisturbed(tokenizer: Tokenizer) -> list[int]:
    _, ids, _ = await collect(Bench(tokenizer, MODEL).session([4, 5], OFF, STOPS))
    return ids


async def dropped(tokenizer: Tokenizer, behaviour: Behaviour) -> tuple[dict[str, int], Bench]:
    """What was dropped while a draft behaved so; its target's text must be what it always is."""
    bench = Bench(tokenizer, MODEL, percent=90)
    bench.draft.behaviour = behaviour
    for control in (CONTROL, SpeculationControl()):
        _, ids, complete = await collect(bench.session([4, 5], control, STOPS))
        assert ids == await undisturbed(tokenizer)
        assert bench.nothing_is_open()
        if control == CONTROL:
            counted = complete.speculation.dropped
    return counted, bench


def garbage(kind: str) -> Behaviour:
    def behave(number: int, proposal: Proposal) -> Proposal:
        n = len(proposal.tokens)
        half = SparseProbs((1, 2), (0.5, 0.5))
        made = {
            "id past the vocabulary": replace(proposal, tokens=(10**6,) * n),
            "negative id": replace(proposal, tokens=(-1,) * n),
            "too many": Proposal.chain(proposal.base, (1,) * 50),
            "cycle": replace(proposal, parents=tuple(range(n))),
            "no parents": replace(proposal, parents=()),
            "probs of other tokens": replace(proposal, draft_probs=(replace(half, ids=(200, 201)),) * n),
            "NaN": replace(proposal, draft_probs=(replace(half, probs=(float("nan"), 0.5)),) * n),
        }
        return made[kind]

    return behave


@pytest.mark.parametrize(
    "kind",
    ["id past the vocabulary", "negative id", "too many", "cycle", "no parents", "probs of other tokens", "NaN"],
)
async def test_garbage_is_dropped_and_counted(tokenizer: Tokenizer, kind: str) -> None:
    counted, bench = await dropped(tokenizer, garbage(kind))
    assert counted["malformed"] >= 3
    assert all(not proposal.tokens or proposal.drafter == "ngram" for proposal in bench.target.proposals)


async def test_a_garbage_draft_is_let_go_of_and_tried_again_later(tokenizer: Tokenizer) -> None:
    counted, bench = await dropped(tokenizer, garbage("negative id"))
    assert counted["malformed"] < 20
    assert bench.draft.num_opened > 2


async def test_answers_for_other_states_are_dropped_as_stale(tokenizer: Tokenizer) -> None:
    stale = State.of([1])

    def behave(number: int, proposal: Proposal) -> Proposal:
        return replace(proposal, base=stale) if number % 3 == 1 else proposal

    counted, _ = await dropped(tokenizer, behave)
    assert counted["stale"] >= 1
    assert counted["late"] >= 1  # the right answer never came


async def test_a_silent_draft_is_waited_for_a_few_times_only(tokenizer: Tokenizer) -> None:
    counted, bench = await dropped(tokenizer, lambda number, proposal: proposal if number == 0 else None)
    assert counted == {"late": 1}
    assert all(not proposal.tokens or proposal.drafter == "ngram" for proposal in bench.target.proposals)


async def test_a_draft_still_busy_with_the_prompt_delays_nobody(tokenizer: Tokenizer) -> None:
    counted, _ = await dropped(tokenizer, lambda number, proposal: None)
    assert counted == {}


@pytest.mark.parametrize("at", [0, 1, 4])
async def test_a_dying_draft_leaves_plain_decoding(tokenizer: Tokenizer, at: int) -> None:
    def behave(number: int, proposal: Proposal) -> Proposal | OutriderError:
        return Unavailable("the draft is gone") if number >= at else proposal

    bench = Bench(tokenizer, MODEL)
    bench.draft.behaviour = behave
    _, ids, complete = await collect(bench.session([4, 5], CONTROL, STOPS))
    assert ids == await undisturbed(tokenizer)
    assert complete.speculation.switched_off_reason == "draft_unavailable"
    assert bench.nothing_is_open()


async def test_speculation_returns_with_the_draft(tokenizer: Tokenizer) -> None:
    def behave(number: int, proposal: Proposal) -> Proposal | OutriderError:
        return Unavailable("restarting") if number == 3 else proposal

    bench = Bench(tokenizer, MODEL, percent=95)
    bench.draft.behaviour = behave
    _, _, complete = await collect(bench.session([4, 5], CONTROL, StopParams(max_tokens=300)))
    assert bench.draft.num_opened == 2
    assert complete.speculation.switched_off_reason == ""
    assert complete.speculation.drafters["draft_model"].rounds > 20


async def test_no_draft_at_all(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, MODEL, with_draft=False)
    _, ids, complete = await collect(bench.session([4, 5], CONTROL, STOPS))
    assert ids == await undisturbed(tokenizer)
    assert complete.speculation.switched_off_reason == "draft_unavailable"
    bench.shared.peers.drafts.replace({"draft": bench.draft})
    _, _, complete = await collect(bench.session([4, 5], CONTROL, STOPS))
    assert complete.speculation.switched_off_reason == ""


async def test_a_draft_that_stays_slow_costs_two_rounds_their_patience(tokenizer: Tokenizer) -> None:
    """It answers when the round it was asked for is long over, time and again."""
    bench = Bench(tokenizer, MODEL, percent=90)
    held_back: list[Proposal] = []
    asked = bench.draft.open

    def open_(*args: Any, **kwargs: Any) -> FakeDraftSession:
        session = asked(*args, **kwargs)

        def release(_: int) -> None:  # with every verdict, more than a patience after it was asked for
            bench.clock.spend(0.05)
            while held_back:
                session._answers.put_nowait(held_back.pop())

        bench.target.fault = release
        return session

    bench.draft.open = open_  # type: ignore[method-assign]
    bench.draft.behaviour = lambda number, proposal: held_back.append(proposal)
    _, ids, complete = await collect(bench.session([4, 5], CONTROL, STOPS))
    assert ids == await undisturbed(tokenizer)
    assert complete.speculation.dropped == {"late": 2}
    assert not any(proposal.tokens for proposal in bench.target.proposals)
    assert bench.draft.num_answers > 5  # for it was probed now and then
    assert bench.nothing_is_open()
