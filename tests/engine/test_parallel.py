"""A target spread over real processes (gloo) against the same target in one: same logits, same tokens, no hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch import SpanRows, StepRows
from engine.errors import InvalidArgument, Unavailable
from engine.follower import follow
from engine.loading import load_model
from engine.memory import plan_memory
from engine.parallel import Place, Rendezvous, join
from engine.planner import RowShapes
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import EngineSettings
from engine.shards import use_local_layers
from engine.target import TargetEngine, build_target_engine
from tests.engine.driving import next_verdict
from tests.engine.models import EOS, VOCAB, plain_greedy

SHAPES = RowShapes(prompt_rows=16, generated_rows=8)
PROMPTS = [[5], [1, 9, 4], list(range(3, 40))]
MODES = [pytest.param(None, id="free"), pytest.param(SHAPES, id="reproducible")]
SIZES = [2, 4]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers whose 8 query heads on 4 key heads can be cut into 2 and 4."""
    path = tmp_path_factory.mktemp("models") / "wide"
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=True,
        attention_bias=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # biases start at zero, where a wrong sum would not show
        torch.nn.init.normal_(layer.self_attn.o_proj.bias)
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    model.save_pretrained(path)
    return path


def settings_for(folder: Path, **changes: object) -> EngineSettings:
    sizes: dict[str, object] = {"num_blocks": 64, "block_size": 8, "dtype": "float32"} | changes
    return EngineSettings(folder, **sizes)  # type: ignore[arg-type]


def serve_follower(jobs: Connection) -> None:
    """Follows one leader after another; says how each ended."""
    while (job := jobs.recv()) is not None:
        settings, place = job
        try:
            follow(settings, join(place, settings.device))
        except Exception as error:
            jobs.send(f"{type(error).__name__}: {error}")
        else:
            jobs.send("ended")


def lead_two_sessions(settings: EngineSettings, places: Connection) -> None:
    rendezvous = Rendezvous("127.0.0.1", 2)
    places.send(rendezvous.place(1))
    parallel = join(rendezvous.place(0), "cpu", rendezvous)
    engine = build_target_engine(settings, parallel)
    for session, (prompt, trace) in enumerate((([5, 9], TRACE), ([4], "")), start=1):
        engine.open(session, prompt, [], SamplingParams(), StopParams(max_tokens=1 + session, ignore_eos=True), trace)
        engine.decode(session, 4)
    while engine.has_work():
        engine.step()
    parallel.close()


def lead_and_die(settings: EngineSettings, places: Connection) -> None:
    rendezvous = Rendezvous("127.0.0.1", 2)
    places.send(rendezvous.place(1))
    build_target_engine(settings, join(rendezvous.place(0), "cpu", rendezvous))
    os.kill(os.getpid(), signal.SIGKILL)


class Follower:
    """A follower's process and the pipe to it."""

    def __init__(self) -> None:
        self.jobs, theirs = _context().Pipe()
        self.process = _context().Process(target=serve_follower, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.jobs.close()


def _context() -> multiprocessing.context.ForkServerContext:
    """Fresh processes that need not import torch again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.follower", "engine.target", "transformers.models.llama.modeling_llama"])
    return context


@pytest.fixture(scope="module")
def followers() -> Iterator[list[Follower]]:
    started = [Follower() for _ in range(max(SIZES) - 1)]
    yield started
    for follower in started:
        follower.end()


@pytest.fixture
def mortal() -> Iterator[Follower]:
    """One to be killed."""
    follower = Follower()
    yield follower
    follower.end()


@contextmanager
def lead(
    settings: EngineSettings, followers: list[Follower], timeout_s: float = 20.0, last_words: str = "ended"
) -> Iterator[TargetEngine]:
    """An engine over this process and `followers`, all of which must have ended with `last_words` afterwards."""
    rendezvous = Rendezvous("127.0.0.1", len(followers) + 1, timeout_s)
    for rank, follower in enumerate(followers, start=1):
        follower.jobs.send((settings, rendezvous.place(rank)))
    parallel = join(rendezvous.place(0), "cpu", rendezvous)
    try:
        yield build_target_engine(settings, parallel)
    finally:
        parallel.close()
    for follower in followers:
        if follower.process.is_alive():
            assert last_words in follower.jobs.recv()


def speculate(engine: TargetEngine, prompt: list[int], truth: list[int], *, tree: bool, session: int = 1) -> list[int]:
    """Generates like `truth` with proposals that are right in part, as chains or as trees."""
    engine.open(session, prompt, [], SamplingParams(), StopParams(max_tokens=len(truth), ignore_eos=True))
    tokens: list[int] = []
    while len(tokens) < len(truth):
        tokens += next_verdict(engine, session).tokens
        right = truth[len(tokens) : len(tokens) + 4]
        if len(right) < 4:
            engine.decode(session, 4)
            continue
        wrong, base = (right[0] + 1) % VOCAB, State.of(prompt + tokens)
        if tree:  # the wrong child comes first, so that what is accepted lies out of its natural slots
            engine.propose(session, Proposal(base, (wrong, *right[:2], wrong, right[2]), (-1, -1, 1, 1, 2)))
        else:
            engine.propose(session, Proposal.chain(base, [*right[:3], (right[3] + len(tokens) % 2) % VOCAB]))
    engine.close(session)
    engine.check_integrity()
    return tokens


def plain(engine: TargetEngine, prompt: list[int], num_tokens: int) -> list[int]:
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=num_tokens, ignore_eos=True))
    engine.decode(1, num_tokens)
    tokens: list[int] = []
    while engine.has_work():
        tokens += next_verdict(engine, 1).tokens
    engine.close(1)
    return tokens


def span(tokens: list[int], block: int, parents: tuple[int, ...] = ()) -> SpanRows:
    return SpanRows(tokens, 0, parents, len(tokens), list(range(block, block + 4)))


STEPS = [
    pytest.param(StepRows((span([5, 9, 4, 7, 8, 11], 1),), 8), id="chain"),
    pytest.param(StepRows((span([5, 9, 4, 7, 8, 11], 1, (-1, -1, 1)), span([3], 9)), 8), id="tree"),
    pytest.param(StepRows((SpanRows([5, 9], 0, (), 2, list(range(1, 64)) * 200),), 4), id="long_plan"),
    pytest.param(StepRows((SpanRows([5, 9], 0, (), 0, [1]),), 4), id="no_logits"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", MODES)
def test_logits_are_those_of_one_process(folder, followers, size, shapes):
    settings = settings_for(folder, shapes=shapes)
    alone = build_target_engine(settings)
    with lead(settings, followers[: size - 1]) as engine:
        for step in (case.values[0] for case in STEPS):
            logits, expected = engine._runner._execute(step), alone._runner._execute(step)
            assert logits.shape == expected.shape == (sum(s.num_logits for s in step.spans), VOCAB)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shapes", MODES)
def test_greedy_tokens_are_those_of_plain_decoding(folder, followers, size, shapes):
    truths = [plain_greedy(folder, prompt, 14, eos=None) for prompt in PROMPTS]
    with lead(settings_for(folder, shapes=shapes), followers[: size - 1]) as engine:
        for prompt, truth in zip(PROMPTS, truths, strict=True):
            assert plain(engine, prompt, 14) == truth
            assert speculate(engine, prompt, truth, tree=False) == truth
            assert speculate(engine, prompt, truth, tree=True) == truth


def test_a_group_reaches_the_end_of_the_window(folder, followers):
    """Public case A13 at two ranks."""
    with lead(settings_for(folder), followers[:1]) as engine:
        for length in (250, 255):
            prompt = [3 + i % 50 for i in range(length)]
            truth = plain_greedy(folder, prompt, 256 - length, eos=None)
            assert speculate(engine, prompt, truth, tree=True) == truth


def test_preemption_recomputes_on_every_rank(folder, followers):
    prompts = {1: list(range(3, 23)), 2: list(range(30, 52))}
    truths = {key: plain_greedy(folder, prompt, 30, eos=None) for key, prompt in prompts.items()}
    texts: dict[int, list[int]] = {1: [], 2: []}
    with lead(settings_for(folder, num_blocks=9), followers[:1]) as engine:
        for key, prompt in prompts.items():
            engine.open(key, prompt, [], SamplingParams(), StopParams(max_tokens=30, ignore_eos=True))
            engine.decode(key, 100)
        while engine.has_work():
            for key, outcome in engine.step():
                texts[key] += outcome.tokens
            engine.check_integrity()
        assert engine.info().forwards > 40  # side by side they would need 31
    assert texts == truths


def test_a_reproducible_row_does_not_depend_on_its_place_among_four_ranks(folder, followers):
    """A ring all-reduce adds each segment of the batch in another order of ranks; reproducible mode must not."""
    row = span([5, 9, 4], 1)
    with lead(settings_for(folder, shapes=SHAPES), followers) as engine:
        alone = engine._runner._execute(StepRows((row,), 8))
        behind = engine._runner._execute(StepRows((span([3, 3, 3, 3, 3], 9), row), 8))
    assert torch.equal(behind[5:], alone)


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_holds_its_part_only(folder, followers, size):
    settings = settings_for(folder)
    with lead(settings, followers[: size - 1]) as engine:
        model, cache = engine._runner.device.model, engine._runner.device.cache
        parts = {p.data_ptr(): p.numel() for module in (model.decoder, model.head) for p in module.parameters()}
        kv_bytes = sum(t.numel() * 4 for t in (*cache.keys, *cache.values))
    rank = plan_memory(settings, size, 2**30)[0]
    assert (4 * sum(parts.values()), kv_bytes) == (rank.weights, rank.kv_blocks)
    assert cache.num_kv_heads == 4 // size


def test_a_model_that_is_whole_on_every_rank_is_refused(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(InvalidArgument, match=r"model\.embed_tokens of this model was not cut into 2 parts"):
        use_local_layers(model, SimpleNamespace(size=2, rank=0, sum=None), reproducible=False)


def test_uneven_sizes_are_refused_with_the_numbers(target_folder, folder):
    with pytest.raises(InvalidArgument, match=r"found 4, .* 2 key/value heads: 1, 2") as refused:
        load_model(settings_for(target_folder), parallel=SimpleNamespace(size=4))
    assert refused.value.field == "target.tensor_parallel_size"
    with pytest.raises(InvalidArgument, match="8 attention heads, 4 key/value heads, 64 vocabulary entries: 1, 2, 4"):
        load_model(settings_for(folder), parallel=SimpleNamespace(size=3))


@pytest.mark.timeout(60)
def test_a_killed_follower_fails_the_step_long_before_the_timeout(folder, mortal):
    with lead(settings_for(folder), [mortal], timeout_s=300.0) as engine:
        assert plain(engine, [5], 2)
        mortal.end()
        engine.open(1, [5], [], SamplingParams(), StopParams(max_tokens=4))
        for _ in range(2):
            with pytest.raises(Unavailable, match="rank 0 of 2, forward"):
                engine.step()


@pytest.mark.timeout(60)
def test_a_hung_follower_fails_the_step_everywhere_within_the_timeout(folder, followers, mortal):
    with lead(settings_for(folder), [mortal, *followers[:2]], timeout_s=8.0, last_words="group is lost") as engine:
        assert plain(engine, [5], 2)
        os.kill(mortal.process.pid, signal.SIGSTOP)
        engine.open(1, [5], [], SamplingParams(), StopParams(max_tokens=4))
        with pytest.raises(Unavailable, match="rank 0 of 4, forward"):
            engine.step()
        mortal.end()


@pytest.mark.timeout(60)
def test_a_dead_leader_ends_its_waiting_followers(folder):
    ours, theirs = _context().Pipe()
    settings = settings_for(folder)
    leader = _context().Process(target=lead_and_die, args=(settings, theirs))
    leader.start()
    place: Place = ours.recv()
    with pytest.raises(Unavailable, match="rank 1 of 2, waiting for rank 0"):
        follow(settings, join(place, "cpu"))
    leader.join()
    assert leader.exitcode == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_a_follower_tells_whose_rows_each_forward_had(folder):
    ours, theirs = _context().Pipe()
    settings, told = settings_for(folder), list[tuple[StepRows, float]]()
    leader = _context().Process(target=lead_two_sessions, args=(settings, theirs))
    leader.start()
    follow(settings, join(ours.recv(), "cpu"), lambda step, seconds: told.append((step, seconds)))
    leader.join()
    rows = [[(each.trace, each.num_rows) for each in step.spans] for step, _ in told]
    assert [sorted(each) for each in rows] == [[("", 1), (TRACE, 2)], [("", 1), (TRACE, 1)], [("", 1)]]
    assert all(seconds > 0.0 for _, seconds in told)


@pytest.mark.timeout(60)
def test_a_leader_that_leaves_before_it_has_loaded_ends_the_others(folder, followers):
    rendezvous = Rendezvous("127.0.0.1", 2)
    followers[0].jobs.send((settings_for(folder), rendezvous.place(1)))
    parallel = join(rendezvous.place(0), "cpu", rendezvous)
    parallel.close()
    assert "Unavailable" in followers[0].jobs.recv()


def test_ranks_that_do_not_come_are_named():
    rendezvous = Rendezvous("127.0.0.1", 3, join_timeout_s=0.1)
    with pytest.raises(Unavailable, match=r"ranks \[1, 2\] of 3 have not joined within 0\.1 s"):
        join(rendezvous.place(0), "cpu", rendezvous)


def test_packed_steps_are_unpacked_as_they_were():
    for step in (case.values[0] for case in STEPS):
        assert StepRows.unpacked(step.packed()) == step


@pytest.mark.parametrize(("trace", "num_ints"), [("", 0), ("a", 1), ("abcd", 1), ("\x7f" * 5, 2), (TRACE, 14)])
def test_a_packed_trace_takes_an_integer_for_four_characters(trace, num_ints):
    traced, other = SpanRows([5, 9], 0, (), 2, [1], trace), span([3], 9)
    packed, without = (StepRows((each, other), 4).packed() for each in (traced, replace(traced, trace="")))
    assert StepRows.unpacked(packed) == StepRows((traced, other), 4)
    assert len(packed) - len(without) == num_ints
    assert all(0 <= value < 2**31 for value in packed)


def test_a_trace_that_could_not_be_packed_is_refused(folder):
    engine = build_target_engine(settings_for(folder))
    with pytest.raises(InvalidArgument, match="trace: found 'é', allowed is ASCII"):
        engine.open(1, [5], [], SamplingParams(), StopParams(max_tokens=1), "é")
    assert not engine.has_work()
