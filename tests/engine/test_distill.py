"""Distillation on a tiny random Llama: prompts, corpus, loss, acceptance, training, folder and the whole run."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from engine.distill import DistillSettings, train_draft
from engine.distill.acceptance import HeldOutText, agreement, first_token_agreement, measure, run_rounds
from engine.distill.batches import choose_head_vocabulary, epoch, pack, spelling_tokens, target_to_draft
from engine.distill.card import command_line
from engine.distill.corpus import TOP_TOKENS, Continuation, Corpus, CorpusIdentity
from engine.distill.export import put_in_place, read_draft, write_draft
from engine.distill.generation import ContinuationGenerator, Job, extend_corpus, is_looping, job_stream, top_tokens
from engine.distill.loss import head_loss, target_weights
from engine.distill.model import DraftModel, draft_config, fit_output_map, start_from_target
from engine.distill.progress import SilentProgress
from engine.distill.prompts import SHARES, make_prompt
from engine.distill.prompts.grammar import fill
from engine.distill.target import TargetModel, load_target_weights
from engine.distill.training import Trainer, schedule

EOS = 2
VOCABULARY = 128
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; what is not printable ASCII is unknown."""
    letters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": EOS, **{letter: 3 + at for at, letter in enumerate(letters)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama in float32 and its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def full_copy(target: Path, head: torch.Tensor | None = None) -> DraftModel:
    """A draft that is the whole target, with the whole vocabulary unless ``head`` lists less."""
    model = TargetModel(target)
    head = torch.arange(VOCABULARY) if head is None else head
    draft = DraftModel(draft_config(model.config, 2), model.embedding, head, torch.float32)
    start_from_target(draft, load_target_weights(target), (0, 1))
    return draft


def continue_prompts(target: Path, prompts: list[list[int]], length: int = 12, rows: int = 3) -> list[Continuation]:
    generator = ContinuationGenerator(TargetModel(target), rows, length, EOS, seed=0, stop_loops=False)
    jobs = [Job(index, "code", tokens, 0.0) for index, tokens in enumerate(prompts)]
    return sorted(generator.run(jobs), key=lambda item: item.prompt_index)


PROMPTS = [[5, 9, 40, 77], [5, 9, 41], [100, 3], [8, 8, 8, 60, 61, 62, 63], [17]]


class TestPrompts:
    def test_stream_is_deterministic(self) -> None:
        assert [make_prompt(7, index) for index in range(50)] == [make_prompt(7, index) for index in range(50)]
        assert make_prompt(7, 0) != make_prompt(8, 0)

    def test_every_class_occurs_and_every_mark_is_filled(self) -> None:
        prompts = [make_prompt(1, index) for index in range(1500)]
        assert {prompt.kind for prompt in prompts} == set(SHARES)
        for prompt in prompts:
            for message in prompt.messages:
                assert not re.search(r"@[A-Za-z_]+(\.\d)?@|@\d+\.\.\d+@", message["content"])
        assert len({str(prompt.messages) for prompt in prompts}) > 1300

    def test_equal_marks_mean_equal_values(self) -> None:
        from random import Random

        slots = {"a": ["x", "y", "z"]}
        for seed in range(20):
            first, again, other = fill("@a@ @a@ @a.2@", slots, Random(seed)).split()
            assert first == again != other
        assert 3 <= int(fill("@3..5@", slots, Random(0))) <= 5
        assert re.fullmatch(r"\d\.\d\d", fill("@1.25..2.50@", slots, Random(0)))

    def test_tool_examples_are_valid_calls(self) -> None:
        seen = 0
        for index in range(600):
            prompt = make_prompt(3, index)
            for message in prompt.messages:
                if message["role"] == "assistant":
                    call = json.loads(message["content"])
                    assert set(call) == {"name", "arguments"}
                    assert f'"{call["name"]}"' in prompt.messages[0]["content"]
                    seen += 1
        assert seen > 20


class TestTarget:
    def test_batched_decoding_equals_transformers(self, target: Path) -> None:
        reference = LlamaForCausalLM.from_pretrained(target)
        for item in continue_prompts(target, PROMPTS):
            prompt = item.prompt.long()[None]
            expected = reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12
            )
            assert item.generated.tolist() == expected[0, prompt.shape[1] :].tolist()

    def test_stored_log_probs_are_the_models(self, target: Path) -> None:
        reference = LlamaForCausalLM.from_pretrained(target)
        item = continue_prompts(target, PROMPTS)[0]
        sequence = torch.cat((item.prompt, item.generated)).long()
        with torch.inference_mode():
            log_probs = reference(sequence[None]).logits[0].log_softmax(-1)
        expected = log_probs[len(item.prompt) - 1 : -1].gather(1, item.top_ids.long())
        assert torch.allclose(item.top_log_probs.float(), expected, atol=5e-3)

    def test_top_tokens_searches_blocks_exactly(self) -> None:
        logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(3))
        ids, log_probs = top_tokens(logits)
        expected = logits.log_softmax(-1).topk(TOP_TOKENS)
        assert torch.equal(ids, expected.indices)
        assert torch.allclose(log_probs, expected.values, atol=1e-5)

    def test_equal_logits_prefer_the_lowest_id(self) -> None:
        ids, _ = top_tokens(torch.zeros(1, 40))
        assert ids[0, 0] == ids[0].min()

    def test_loops_are_seen_and_short_repeats_are_not(self) -> None:
        assert is_looping([1, 2, 3] * 8)
        assert is_looping([9, 9] + [4] * 24)
        assert not is_looping([1, 2, 3] * 7)
        assert not is_looping(list(range(100)))


class TestCorpus:
    IDENTITY = CorpusIdentity(seed=1, max_new_tokens=12, vocabulary=VOCABULARY)

    def test_shards_round_trip(self, tmp_path: Path, target: Path) -> None:
        made = continue_prompts(target, PROMPTS)
        Corpus(tmp_path, self.IDENTITY).append(made[:2])
        Corpus(tmp_path, self.IDENTITY).append(made[2:])
        found = list(Corpus(tmp_path, self.IDENTITY))
        assert [item.prompt_index for item in found] == [0, 1, 2, 3, 4]
        for left, right in zip(made, found, strict=True):
            assert left.kind == right.kind
            for name in ("prompt", "generated", "top_ids", "top_log_probs"):
                assert torch.equal(getattr(left, name), getattr(right, name))

    def test_another_corpus_is_refused(self, tmp_path: Path) -> None:
        Corpus(tmp_path, self.IDENTITY)
        with pytest.raises(ValueError, match="another corpus"):
            Corpus(tmp_path, replace(self.IDENTITY, seed=2))

    def test_generation_goes_on_where_it_stopped(self, tmp_path: Path, target: Path) -> None:
        settings = DistillSettings(target, tmp_path / "out", tmp_path, tokens=60, max_new_tokens=6, rows=4)
        model, tokenizer = TargetModel(target), tiny_tokenizer()
        for wanted in (60, 120):
            corpus = Corpus(tmp_path / "corpus", replace(self.IDENTITY, max_new_tokens=6))
            done, _ = corpus.done()
            jobs = itertools.islice(job_stream(1, tokenizer, done, set()), 60)
            size = extend_corpus(corpus, jobs, model, replace(settings, tokens=wanted), SilentProgress())
            assert size >= wanted
        indexes = [item.prompt_index for item in Corpus(tmp_path / "corpus", replace(self.IDENTITY, max_new_tokens=6))]
        assert len(indexes) == len(set(indexes))
        assert len(indexes) >= 20

    def test_barred_prompts_never_run(self) -> None:
        texts = [make_prompt(1, index).messages[-1]["content"] for index in range(512)]
        barred = set(texts[:5])
        jobs = list(itertools.islice(job_stream(1, tiny_tokenizer(), set(), barred), 400))
        assert not {job.prompt_index for job in jobs} & {at for at, text in enumerate(texts) if text in barred}


class TestLoss:
    def test_equals_plain_cross_entropy(self) -> None:
        torch.manual_seed(1)
        features = torch.randn(700, 16, requires_grad=True)
        head = torch.randn(50, 16)
        inverse = target_to_draft(torch.arange(0, 100, 2), 100)
        top_ids = torch.stack([torch.randperm(100)[:4] for _ in range(700)])
        top_log_probs = torch.randn(700, 4).log_softmax(-1)
        rows, weights = target_weights(top_log_probs, top_ids, inverse, hard_share=0.3)
        loss, agreed = head_loss(features, head, rows, weights)
        loss.backward()
        copied = features.detach().clone().requires_grad_()
        log_probs = (copied @ head.T).log_softmax(-1)
        plain = -(weights * log_probs.gather(1, rows)).sum() / 700
        plain.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
        assert torch.allclose(features.grad, copied.grad, atol=1e-6)
        best = log_probs.argmax(-1) * 2
        assert int(agreed) == int((best == top_ids[:, 0]).sum())

    def test_weights_mix_distribution_and_best_token(self) -> None:
        inverse = target_to_draft(torch.tensor([4, 7]), 10)
        rows, weights = target_weights(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[7, 3]]), inverse, 0.5)
        assert rows.tolist() == [[1, 0]]
        assert weights.tolist() == [[pytest.approx(0.75), 0.0]]


def test_the_card_names_the_command_without_this_machines_paths() -> None:
    settings = DistillSettings(
        Path("/t"),
        Path("/o"),
        Path("/w"),
        Path("/h.jsonl"),
        tokens=5000,
        training_minutes=3.0,
        target_name="some-target",
    )
    assert command_line(settings) == (
        "outrider train draft --target TARGET --output DRAFT --work WORK --held-out PROMPTS.jsonl "
        "--tokens 5000 --training-minutes 3.0"
    )


class TestAcceptance:
    def test_rounds_of_a_hand_made_answer(self) -> None:
        # K = 3: [1 1 0] accepts two, its target token is the third; [1 0 .] accepts one; [1] ends the answer.
        found = run_rounds([True, True, False, True, False, True], 3)
        assert (found.rounds, found.drafted) == (3, 3 + 3 + 1)
        assert found.reached == (3, 2, 1)
        assert found.accepted == (3, 1, 0)
        assert found.rate == pytest.approx(4 / 7)
        assert found.mean_length == pytest.approx(7 / 3)
        assert found.by_position == (1.0, 0.5, 0.0)

    def test_a_copy_of_the_target_is_always_accepted(self, target: Path) -> None:
        items = continue_prompts(target, PROMPTS)
        texts = [HeldOutText("code", item.prompt.tolist(), item.generated.tolist()) for item in items]
        flags = agreement(full_copy(target), texts)
        assert first_token_agreement(flags) == 1.0
        assert measure(flags, ["code"] * len(flags), 5)["all"].rate == 1.0

    def test_tokens_outside_the_head_are_never_right(self, target: Path) -> None:
        items = continue_prompts(target, PROMPTS)
        said = {token for item in items for token in item.generated.tolist()}
        texts = [HeldOutText("code", item.prompt.tolist(), item.generated.tolist()) for item in items]
        head = torch.tensor(sorted(set(range(VOCABULARY)) - said))
        assert first_token_agreement(agreement(full_copy(target, head), texts)) == 0.0


class TestModel:
    def test_packing_does_not_mix_sequences(self, target: Path) -> None:
        draft = full_copy(target)
        together = draft.greedy(pack(PROMPTS, [[1, 2, 3], [4], [5, 6], [7], [8, 9]]))
        alone = [
            draft.greedy(pack([prompt], [said]))
            for prompt, said in zip(PROMPTS, [[1, 2, 3], [4], [5, 6], [7], [8, 9]], strict=True)
        ]
        assert torch.equal(together, torch.cat(alone))

    def test_output_map_is_least_squares(self) -> None:
        torch.manual_seed(2)
        hidden, wanted = torch.randn(500, 8), torch.randn(8, 8)
        fitted = fit_output_map(hidden, hidden @ wanted.T, ridge=1e-7)
        assert torch.allclose(fitted, wanted, atol=1e-3)

    def test_head_vocabulary_keeps_what_is_said_and_what_is_needed(self, target: Path) -> None:
        items = continue_prompts(target, PROMPTS)
        said = {token for item in items for token in item.generated.tolist()}
        chosen = choose_head_vocabulary(items, len(said) + 2, VOCABULARY, [EOS, 120])
        assert {EOS, 120} <= set(chosen.tolist())
        assert len(chosen) == len(said) + 2
        assert chosen.tolist() == sorted(chosen.tolist())

    def test_spelling_covers_json(self) -> None:
        tokenizer = tiny_tokenizer()
        text = '{"name": "x", "arguments": {"a": [1, -2.5]}}\n'
        assert set(tokenizer.encode(text)) - {tokenizer.unk_token_id} <= spelling_tokens(tokenizer)


class TestFolder:
    def test_round_trip(self, tmp_path: Path, target: Path) -> None:
        draft = full_copy(target, torch.arange(0, VOCABULARY, 3))
        write_draft(draft, tmp_path)
        again = read_draft(tmp_path, target, torch.bfloat16)
        for (name, left), (_, right) in zip(draft.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(left.to(torch.bfloat16), right.to(torch.bfloat16)), name
        assert torch.equal(draft.draft_to_target, again.draft_to_target)
        assert json.loads((tmp_path / "config.json").read_text())["outrider_draft"] == {
            "format": 1, "shared_embedding": True, "head_vocabulary": 43,
        }  # fmt: skip

    def test_transformers_computes_the_same_from_it(self, tmp_path: Path, target: Path) -> None:
        from safetensors.torch import load_file

        draft = full_copy(target, torch.arange(0, VOCABULARY, 3))
        torch.nn.init.normal_(draft.output_map, std=0.2)
        write_draft(draft, tmp_path)
        draft = read_draft(tmp_path, target, torch.float32)
        tensors = {name: value.float() for name, value in load_file(tmp_path / "model.safetensors").items()}
        output_map, head_ids = tensors.pop("output_map"), tensors.pop("draft_to_target").long()
        llama = LlamaModel(LlamaConfig.from_pretrained(tmp_path))
        missing = llama.load_state_dict({**tensors, "embed_tokens.weight": draft.embedding})
        assert not missing.missing_keys
        assert not missing.unexpected_keys
        tokens = torch.tensor([[5, 9, 40, 77, 3, 12]])
        with torch.inference_mode():
            hidden = llama(tokens).last_hidden_state[0]
            logits = (hidden @ output_map.T) @ draft.embedding[head_ids].T
            ours = draft.features(pack([tokens[0, :1]], [[*tokens[0, 1:].tolist(), 0]])) @ draft.head.T
        assert torch.allclose(ours, logits, atol=1e-4)

    def test_a_foreign_folder_is_refused(self, tmp_path: Path, target: Path) -> None:
        write_draft(full_copy(target), tmp_path)
        described = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**described, "outrider_draft": {"format": 2}}))
        with pytest.raises(ValueError, match="format"):
            read_draft(tmp_path, target)
        (tmp_path / "config.json").write_text(json.dumps({**described, "hidden_size": 64}))
        with pytest.raises(ValueError, match="hidden_size"):
            read_draft(tmp_path, target)

    def test_put_in_place_replaces_the_whole_folder(self, tmp_path: Path) -> None:
        for name in ("draft", "draft.new"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).touch()
        put_in_place(tmp_path / "draft.new", tmp_path / "draft")
        assert [path.name for path in tmp_path.iterdir()] == ["draft"]
        assert [path.name for path in (tmp_path / "draft").iterdir()] == ["draft.new"]


@pytest.fixture
def ticking() -> Callable[[], float]:
    """A clock that moves on by a second whenever it is read."""
    seconds: Iterator[float] = itertools.count(0.0, 1.0)
    return lambda: next(seconds)


class TestTraining:
    def settings(self, target: Path, work: Path) -> DistillSettings:
        return DistillSettings(
            target, work / "out", work, batch_tokens=20, training_minutes=0.5, evaluate_seconds=5, checkpoint_seconds=0,
            layers=(0,), learning_rate=1e-2,
        )  # fmt: skip

    def start(self, target: Path) -> DraftModel:
        model = TargetModel(target)
        draft = DraftModel(draft_config(model.config, 1), model.embedding, torch.arange(VOCABULARY), torch.float32)
        start_from_target(draft, load_target_weights(target), (0,))
        return draft

    def test_loss_falls(self, tmp_path: Path, target: Path, ticking: Callable[[], float]) -> None:
        corpus = continue_prompts(target, PROMPTS * 4)
        trainer = Trainer(self.start(target), self.settings(target, tmp_path), [], ticking)
        trainer.run(corpus, SilentProgress())
        assert trainer.state.curve[-1].loss < 0.8 * trainer.state.curve[0].loss
        assert trainer.state.seconds >= 30

    def test_a_stopped_run_ends_like_an_undisturbed_one(
        self, tmp_path: Path, target: Path, ticking: Callable[[], float]
    ) -> None:
        corpus = continue_prompts(target, PROMPTS * 4)
        undisturbed = Trainer(self.start(target), self.settings(target, tmp_path / "a"), [], ticking)
        (tmp_path / "a").mkdir()
        undisturbed.run(corpus, SilentProgress())

        class Stop(SilentProgress):
            def reach(self, stage: str, done: float, note: str = "") -> None:
                if done >= 10:
                    raise KeyboardInterrupt

        (tmp_path / "b").mkdir()
        settings = self.settings(target, tmp_path / "b")
        with pytest.raises(KeyboardInterrupt):
            Trainer(self.start(target), settings, [], ticking).run(corpus, Stop())
        resumed = Trainer(self.start(target), settings, [], ticking)
        assert resumed.state.step == 10
        resumed.run(corpus, SilentProgress())
        assert resumed.state.step == undisturbed.state.step
        for left, right in zip(undisturbed.draft.parameters(), resumed.draft.parameters(), strict=True):
            assert torch.allclose(left, right, atol=1e-6)

    def test_schedule_rises_and_falls(self) -> None:
        assert schedule(0.0, 0) < 0.1
        assert schedule(0.5, 1000) == pytest.approx(0.5)
        assert schedule(1.0, 1000) == pytest.approx(0.0)

    def test_filler_rows_weigh_nothing(self, target: Path) -> None:
        corpus = continue_prompts(target, PROMPTS)
        inverse = target_to_draft(torch.arange(VOCABULARY), VOCABULARY)
        (batch,) = epoch(corpus, inverse, sum(len(item.generated) for item in corpus), 0.5, seed=0)
        assert len(batch.packed.tokens) % 256 == 0
        assert len(batch.rows) % 128 == 0
        assert sum(batch.packed.lengths) == len(batch.packed.tokens)
        assert int((batch.weights.sum(-1) > 0).sum()) == sum(len(item.generated) for item in corpus)


def test_whole_run_writes_a_draft_with_its_card(tmp_path: Path, target: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    lines = [
        {"id": f"h{n}", "class": "code", "messages": [{"role": "user", "content": f"held {n}"}], "max_tokens": 8}
        for n in range(3)
    ]
    held_out.write_text("\n".join(map(json.dumps, lines)))
    settings = DistillSettings(
        target, tmp_path / "draft", tmp_path / "work", held_out, tokens=400, max_new_tokens=8, rows=8, layers=(0,),
        head_vocabulary=64, training_minutes=0.01, batch_tokens=100, evaluate_seconds=0.1, target_name="Tiny",
    )  # fmt: skip
    folder = train_draft(settings, SilentProgress())
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| all |" in card
    assert str(tmp_path) not in card
    assert len(read_draft(folder, target).draft_to_target) == 64
    first = (folder / "model.safetensors").read_bytes()
    assert train_draft(settings, SilentProgress()) == folder
    assert (folder / "model.safetensors").read_bytes() == first
