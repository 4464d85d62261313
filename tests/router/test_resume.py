"""A caller that has part of an output gets the rest of exactly that output, wherever it was cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest

from engine.errors import InvalidArgument
from router.events import Complete, Delta
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.tokenizer import Tokenizer
from tests.router.fakes import FakeDraft, FakeTarget, VirtualClock, agreeing, engine_info, scripted

PROMPT = (9, 10, 11)
EOS, FILLER = 2, 5
OFF = SpeculationControl(enabled=False)
CONTROLS = [OFF, SpeculationControl(drafter="ngram"), SpeculationControl(drafter="draft_model"), SpeculationControl()]


@dataclass
class Case:
    """An output and what ends it."""

    written: str
    request: GenerateRequest
    ends_with_eos: bool = True


def case(written: str, ends_with_eos: bool = True, **rest: object) -> Case:
    request = GenerateRequest(TokenIds(PROMPT), **rest)  # type: ignore[arg-type]
    return Case(written, request, ends_with_eos)


CASES = {
    "half characters": case("a 👨‍👩‍👧‍👦 안녕 é👋🏽 b"),
    "half a character at the end": case("x👋", ends_with_eos=False, max_tokens=4),
    "a replacement character": case("so \ufffd\ufffd it is\ufffd"),
    "text that may become a stop": case("say </too </tool </to", stop=("</tool>", "ol </toX")),
    "a stop": case("say </too and </tool> and more", stop=("</tool>", "more")),
    "a stop that is included": case("one STOP two", stop=("STOP",), include_stop_str_in_output=True),
    "a stop past min_tokens": case("stop a stop b", stop=("stop",), min_tokens=6),
    "a stop of half a character": case("x👋 and more", ends_with_eos=False, stop=("\ufffd",), max_tokens=3),
    "a stop behind half a character": case("é👋stop", stop=("👋s",)),
    "eos": case("the quick brown fox"),
    "eos as text": case("the fox", include_stop_str_in_output=True, skip_special_tokens=False),
    "eos that is ignored": case("the fox", ignore_eos=True, max_tokens=20, skip_special_tokens=False),
    "a stop token": case("the quick fox", stop_token_ids=(FILLER,), ends_with_eos=False),
    "length": case("the fox and the dog and the fox", max_tokens=7),
    "one token": case("the fox", max_tokens=1),
}


class Served:
    def __init__(self, tokenizer: Tokenizer, case_: Case) -> None:
        output = [*tokenizer.encode(case_.written), *([EOS] if case_.ends_with_eos else [])]
        model, vocab_size, clock = scripted(PROMPT, output, FILLER), tokenizer.vocab_size, VirtualClock()
        peers = PeerSet()
        self.target = FakeTarget(engine_info("big", vocab_size, 512, (EOS,)), model, clock)
        draft = FakeDraft(engine_info("small", vocab_size, 512), agreeing(model, 80, vocab_size), clock)
        peers.targets.replace({"a": self.target})
        peers.drafts.replace({"b": draft})
        self.router = Router(tokenizer, peers, RouterConfig(), clock=clock)

    async def ask(self, request: GenerateRequest) -> tuple[list[Delta], Complete]:
        *deltas, complete = [event async for event in self.router.generate(request)]
        assert isinstance(complete, Complete)
        assert all(isinstance(delta, Delta) for delta in deltas)
        assert self.target.open_sessions == 0
        return deltas, complete  # type: ignore[return-value]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("name", CASES)
async def test_every_cut_goes_on_to_exactly_the_undisturbed_output(tokenizer: Tokenizer, name: str) -> None:
    case_ = CASES[name]
    whole, end = await Served(tokenizer, case_).ask(replace(case_.request, speculation=OFF))
    assert all(len(delta.token_ids) == 1 for delta in whole)  # so that what each token delivered is known
    texts = list(accumulate((delta.text for delta in whole), initial=""))
    ids = ids_of(whole)
    for cut in range(len(ids) + 1):
        for control in CONTROLS:
            served = Served(tokenizer, case_)
            request = replace(case_.request, resume_from=tuple(ids[:cut]), speculation=control)
            rest, resumed_end = await served.ask(request)
            assert texts[cut] + text_of(rest) == text_of(whole)
            assert ids[:cut] + ids_of(rest) == ids
            assert resumed_end.finish_reason == end.finish_reason
            assert resumed_end.matched_stop == end.matched_stop
            assert resumed_end.usage == end.usage
            assert served.target.openings == ([ids[:cut]] if cut < len(ids) else [])


@pytest.mark.parametrize("name", ["half characters", "text that may become a stop", "a stop", "length"])
async def test_a_cut_between_deltas_of_several_tokens(tokenizer: Tokenizer, name: str) -> None:
    """What callers can see: the deltas of a speculating call, cut after any of them, resumed, and cut again."""
    case_ = CASES[name]
    whole, _ = await Served(tokenizer, case_).ask(case_.request)
    assert max(len(delta.token_ids) for delta in whole) > 1
    for first in range(len(whole) + 1):
        got = whole[:first]
        resumed, _ = await Served(tokenizer, case_).ask(replace(case_.request, resume_from=tuple(ids_of(got))))
        for second in range(len(resumed) + 1):
            so_far = got + resumed[:second]
            rest, _ = await Served(tokenizer, case_).ask(replace(case_.request, resume_from=tuple(ids_of(so_far))))
            assert text_of(so_far + rest) == text_of(whole)
            assert ids_of(so_far + rest) == ids_of(whole)


async def test_times_and_rounds_are_those_of_the_resumed_call(tokenizer: Tokenizer) -> None:
    case_ = CASES["eos"]
    whole, _ = await Served(tokenizer, case_).ask(case_.request)
    ids = ids_of(whole)
    rest, end = await Served(tokenizer, case_).ask(replace(case_.request, resume_from=tuple(ids[:-1])))
    assert ids_of(rest) == ids[-1:]
    assert (end.usage.completion_tokens, end.speculation.rounds, end.timing.decode_tokens_per_s) == (len(ids), 0, 0.0)


@pytest.mark.parametrize(
    ("resumed", "changes", "found"),
    [
        ((5, 10**6), {}, "1000000"),
        ((-1,), {}, "-1"),
        ((5,) * 8, {"max_tokens": 7}, "8 tokens', allowed is at most max_tokens (7)"),
        ((5,) * 257, {}, "257 tokens', allowed is at most max_tokens (256)"),
        ((5,) * 510, {"max_tokens": 600}, "510 tokens', allowed is at most max_tokens (509)"),
        ((5, EOS, 5), {}, "3 tokens, of which number 2 ends the output"),
        ((5, 7, 5), {"stop_token_ids": (7,), "ignore_eos": True}, "3 tokens, of which number 2 ends the output"),
    ],
)
async def test_what_cannot_have_been_delivered_is_refused(
    tokenizer: Tokenizer, resumed: tuple[int, ...], changes: dict[str, object], found: str
) -> None:
    served = Served(tokenizer, CASES["eos"])
    with pytest.raises(InvalidArgument) as caught:
        await served.ask(replace(CASES["eos"].request, resume_from=resumed, **changes))
    assert caught.value.field == "resume_from"
    assert found in str(caught.value)
    assert served.target.openings == []


async def test_tokens_behind_a_stop_string_are_refused(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, CASES["a stop"])
    ids = tuple(tokenizer.encode("a </tool> b"))
    with pytest.raises(InvalidArgument, match="resume_from"):
        await served.ask(replace(CASES["a stop"].request, resume_from=ids))
