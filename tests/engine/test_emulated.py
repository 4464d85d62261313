"""Emulated devices: engines on them output the reference whatever happens, and the stubs do what a profile says."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.emulated_model import NUM_WORDS, VOCAB_SIZE, make_folder
from engine.batch import SpanRows, StepRows
from engine.drafting import build_draft_engine
from engine.emulated import EmulatedDevice, ForwardTime, extended, identity_of, reference
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.stubs import MODEL_TEMPERATURE, NUM_RANKED, Agreement, EmulatedDraft, EmulatedTarget
from engine.target import TargetEngine, build_target_engine
from tests.engine.driving import generate, next_verdict

TARGET = EmulatedTarget(VOCAB_SIZE, NUM_WORDS, top_probability=0.8)
PROMPT = list(b"once upon a time there was a prompt of several blocks")
NUM_TOKENS = 40
NUM_PREFIXES = 5000


@dataclass
class Time:
    """A clock that only sleeping moves, and which wakes late as a real one does."""

    now: float = 100.0
    late_s: float = 70e-6

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "emulated")


def settings(folder: Path, **changes: object) -> EngineSettings:
    return EngineSettings(folder, **({"num_blocks": 64, "block_size": 8} | changes))  # type: ignore[arg-type]


def device(folder: Path, stub=TARGET, forward_time: ForwardTime | None = None, **changes: object) -> EmulatedDevice:
    time = Time()
    return EmulatedDevice(
        settings(folder, **changes), stub, forward_time or ForwardTime(0.01), clock=time.clock, sleep=time.sleep
    )


def target_engine(folder: Path, **changes: object) -> TargetEngine:
    return build_target_engine(settings(folder, **changes), device=device(folder, **changes))


def truth_after(prompt: list[int]) -> list[int]:
    return reference(TARGET, prompt, NUM_TOKENS)


def prefixes(count: int = NUM_PREFIXES) -> np.ndarray:
    """Identities as they come about: of random prefixes."""
    rng = random.Random(3)
    return np.array([identity_of([rng.randrange(NUM_WORDS) for _ in range(12)]) for _ in range(count)], dtype=np.uint64)


def argmax(logits: np.ndarray) -> np.ndarray:
    return logits.argmax(-1)


# The engine on the device.


@pytest.mark.parametrize("wrong_every", [0, 1, 3])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_the_target_engine_outputs_the_reference(folder, k, wrong_every):
    truth, rng = truth_after(PROMPT), random.Random(7)

    def propose(tokens: list[int]) -> list[int]:
        chain = truth[len(tokens) : len(tokens) + k]
        return [(t + 1) % NUM_WORDS if wrong_every and rng.randrange(wrong_every) == 0 else t for t in chain]

    assert generate(target_engine(folder), PROMPT, propose, max_tokens=NUM_TOKENS) == (truth, "length")


def test_trees_are_accepted_along_the_branch_that_is_true(folder):
    engine, truth = target_engine(folder), truth_after(PROMPT)
    engine.open(1, PROMPT, [], SamplingParams(), StopParams(max_tokens=NUM_TOKENS))
    tokens = list(next_verdict(engine, 1).tokens)
    while len(tokens) < NUM_TOKENS:
        n, wrong = len(tokens), (truth[min(len(tokens), NUM_TOKENS - 1)] + 1) % NUM_WORDS
        first, second, third = [*truth[n : n + 3], 0, 0][:3]
        # The true path is nodes 1, 3, 4, out of its natural slots.
        tree = Proposal(State.of(PROMPT + tokens), (wrong, first, second, second, third), (-1, -1, 0, 1, 3))
        engine.propose(1, tree)
        verdict = next_verdict(engine, 1)
        assert verdict.num_accepted == min(3, NUM_TOKENS - n - 1)
        tokens += verdict.tokens
    assert tokens == truth


def test_preempted_sessions_go_on_with_the_reference(folder):
    engine = target_engine(folder, num_blocks=17)
    prompts = {key: [key, *PROMPT[:30]] for key in range(4)}
    for key, prompt in prompts.items():
        engine.open(key, prompt, [], SamplingParams(), StopParams(max_tokens=NUM_TOKENS))
        engine.decode(key, NUM_TOKENS)
    tokens: dict[int, list[int]] = {key: [] for key in prompts}
    while engine.has_work():
        for key, verdict in engine.step():
            tokens[key] += verdict.tokens
        engine.check_integrity()
    assert tokens == {key: truth_after(prompt) for key, prompt in prompts.items()}


def test_the_prefix_cache_gives_the_reference_too(folder):
    engine = target_engine(folder)
    for session in (1, 2):
        engine.open(session, PROMPT, [], SamplingParams(), StopParams(max_tokens=NUM_TOKENS))
        engine.decode(session, NUM_TOKENS)
        tokens: list[int] = []
        while engine.has_work():
            tokens += next_verdict(engine, session).tokens
        assert tokens == truth_after(PROMPT)
    assert engine.cached_tokens(2) == len(PROMPT) // 8 * 8


def test_a_draft_on_an_emulated_device_proposes_what_its_stub_would(folder):
    draft = EmulatedDraft(TARGET, Agreement())
    engine = build_draft_engine(DraftSettings(settings(folder)), device(folder, draft))
    tokens, tail = list(PROMPT), []
    engine.open(1, tokens, SamplingParams())
    for turn in range(12):
        engine.advance(1, State.of(tokens), tail, 4, run_ahead=None)
        outputs: dict[int, object] = {}
        while not outputs:
            outputs = dict(engine.step())
        expected, prefix = [], identity_of(tokens)
        for length in range(len(tokens), len(tokens) + 4):
            row = draft.logits(np.array([prefix], dtype=np.uint64), np.array([length]))
            expected.append(int(argmax(row)[0]))
            prefix = extended(prefix, expected[-1])
        assert list(outputs[1].tokens) == expected
        tail = [*expected[: turn % 5], turn]
        tokens = tokens + tail


# The device alone.


def span(tokens: list[int], start: int, parents: tuple[int, ...] = (), num_logits: int = 1, first_block: int = 1):
    return SpanRows(tokens, start, parents, num_logits, list(range(first_block, first_block + 16)))


def forward(on: EmulatedDevice, *spans: SpanRows) -> torch.Tensor:
    return on.forward(StepRows(spans, sum(each.num_rows for each in spans)))


def test_every_slot_of_the_context_counts(folder):
    whole = device(folder)
    forward(whole, span(PROMPT, 0))
    right = forward(whole, span([7], len(PROMPT)))
    for position in range(len(PROMPT)):
        broken = device(folder)
        forward(broken, span(PROMPT, 0))
        broken.move([0], [8 + position])
        assert not torch.equal(forward(broken, span([7], len(PROMPT))), right)


def test_a_tree_may_be_computed_in_several_forwards(folder):
    tokens, parents = [5, 6, 7, 8, 9], (-1, -1, 0, 1, 3)
    at_once, in_parts = device(folder), device(folder)
    expected = forward(at_once, span(PROMPT + tokens, 0, parents, 6))
    first = forward(in_parts, span(PROMPT + tokens[:2], 0, parents[:2], 3))
    second = forward(in_parts, span(tokens[2:4], len(PROMPT) + 2, parents[:4], 2))
    third = forward(in_parts, span(tokens[4:], len(PROMPT) + 4, parents, 1))
    assert torch.equal(torch.cat([first, second, third]), expected)


def test_a_row_of_a_tree_sees_its_ancestors_only(folder):
    tree = forward(device(folder), span([*PROMPT, 5, 6, 7], 0, (-1, -1, 1), 4))
    chain = forward(device(folder), span([*PROMPT, 6, 7], 0, (-1, 0), 3))
    assert torch.equal(tree[[0, 2, 3]], chain)
    assert not torch.equal(tree[1], tree[2])


def test_slots_move_as_if_all_at_once(folder):
    moved = device(folder)
    forward(moved, span(PROMPT, 0))
    source = [8 + position for position in range(len(PROMPT))]
    moved.move(source, [slot + 8 for slot in source])  # block 1 and those after it, one block on
    right = forward(device(folder), span([*PROMPT, 7], 0))
    assert torch.equal(forward(moved, span([7], len(PROMPT), first_block=2)), right)


def test_a_forward_takes_its_time_and_hardly_more(folder):
    time = Time()
    forward_time = ForwardTime(base_s=0.02, per_row_s=0.001, per_prompt_row_s=0.0001, per_context_token_s=1e-5)
    on = EmulatedDevice(settings(folder), TARGET, forward_time, clock=time.clock, sleep=time.sleep)
    forward(on, span([1] * 20, 0))
    assert time.now - 100.0 == pytest.approx(0.02 + 19 * 0.0001 + 20 * 1e-5, abs=1e-4)
    began = time.now
    forward(on, span([1, 2, 3], 20, (-1, 0), 3), span([4], 0, first_block=9))
    assert time.now - began == pytest.approx(0.02 + 3 * 0.001 + 24 * 1e-5, abs=1e-4)


def test_stretched_times_are_all_stretched():
    step = StepRows((span([1, 2, 3], 20, (-1, 0), 2),), 4)
    times = ForwardTime(base_s=0.02, per_row_s=0.001, per_prompt_row_s=0.0001, per_context_token_s=1e-5)
    assert times.stretched(3.0).of(step) == pytest.approx(3.0 * times.of(step))


# The stubs.


def within(share: float, probability: float, count: int = NUM_PREFIXES) -> bool:
    """Whether a share measured over `count` trials is within 3 sigma of the probability."""
    return abs(share - probability) <= 3.0 * (probability * (1.0 - probability) / count) ** 0.5


def test_likely_tokens_are_distinct_words_evenly_drawn():
    ranked = TARGET.ranked(prefixes())
    assert ranked.shape == (NUM_PREFIXES, NUM_RANKED)
    assert ((ranked >= 0) & (ranked < NUM_WORDS)).all()
    assert all(len(set(row)) == NUM_RANKED for row in ranked.tolist())
    counts = np.bincount(ranked[:, 0], minlength=NUM_WORDS)
    assert counts.max() < 5 * NUM_PREFIXES / NUM_WORDS


def test_the_target_is_as_sure_as_it_was_made():
    logits = torch.from_numpy(EmulatedTarget(VOCAB_SIZE, NUM_WORDS, 0.7).logits(prefixes(10), np.ones(10, dtype=int)))
    probs = torch.softmax(logits.double() / MODEL_TEMPERATURE, -1)
    assert probs.amax(-1).numpy() == pytest.approx(0.7, abs=1e-6)
    assert (probs[:, NUM_WORDS:] == 0).all()  # no end of sequence


@pytest.mark.parametrize(
    ("alpha", "recall", "num_ranked"), [(0.8, 0.95, 4), (0.5, 0.8, 3), (0.8, 1.0, 7), (0.7, 0.9, 1)]
)
def test_the_draft_agrees_as_often_as_it_believes(alpha, recall, num_ranked):
    agreement = Agreement(((0, alpha),), recall, num_ranked)
    draft, those, lengths = EmulatedDraft(TARGET, agreement), prefixes(), np.ones(NUM_PREFIXES, dtype=np.int64)
    logits = torch.from_numpy(draft.logits(those, lengths)).double()
    probs, ids = torch.softmax(logits, -1).topk(num_ranked)
    assert probs.numpy() == pytest.approx(np.tile(agreement.rank_probs(alpha), (NUM_PREFIXES, 1)), abs=1e-6)
    true = torch.from_numpy(argmax(TARGET.logits(those, lengths)))
    hits = (ids == true[:, None]).double().mean(0)
    assert all(within(float(hit), float(p)) for hit, p in zip(hits, agreement.rank_probs(alpha), strict=True))
    assert within(float(hits[0]), alpha)
    assert within(float(hits.sum()), alpha + recall * (1.0 - alpha) if num_ranked > 1 else alpha)


def test_agreement_changes_with_the_position():
    draft = EmulatedDraft(TARGET, Agreement(((0, 0.9), (100, 0.3))))
    those = prefixes()
    for length, alpha in ((1, 0.9), (99, 0.9), (100, 0.3), (5000, 0.3)):
        ranks = draft.true_ranks(those, np.full(NUM_PREFIXES, length))
        assert within(float((ranks == 0).mean()), alpha)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 0.95])
def test_a_ranking_falls_whatever_is_asked_of_it(alpha):
    probs = Agreement(((0, alpha),), 0.95, 4).rank_probs(alpha)
    assert (np.diff(probs) <= 0).all()
    assert probs.sum() <= 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.8, 1.2])
def test_what_is_accepted_of_samples_is_what_it_says(temperature):
    draft, those, lengths = EmulatedDraft(TARGET, Agreement()), prefixes(), np.ones(NUM_PREFIXES, dtype=np.int64)
    target_logits, draft_logits = (torch.from_numpy(stub.logits(those, lengths)).double() for stub in (TARGET, draft))
    if temperature == 0.0:
        measured = (target_logits.argmax(-1) == draft_logits.argmax(-1)).double().mean()
    else:
        pair = (torch.softmax(logits / temperature, -1) for logits in (target_logits, draft_logits))
        measured = torch.minimum(*pair).sum(-1).mean()
    assert float(measured) == pytest.approx(draft.acceptance(temperature), abs=0.015)


@pytest.mark.parametrize(("top_probability", "accepted"), [(0.7, 0.706), (0.8, 0.774), (0.84, 0.80)])
def test_the_surer_the_target_the_more_samples_are_accepted(top_probability, accepted):
    target = EmulatedTarget(VOCAB_SIZE, NUM_WORDS, top_probability)
    assert EmulatedDraft(target, Agreement()).acceptance(MODEL_TEMPERATURE) == pytest.approx(accepted, abs=0.005)
