"""Owns `train draft` as a whole: corpus → draft started from the target → training → folder with card."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.distill.acceptance import HeldOutText, agreement, first_token_agreement, held_out_texts, measure
from engine.distill.batches import choose_head_vocabulary, pack, spelling_tokens
from engine.distill.card import CardFacts, write_card
from engine.distill.corpus import Continuation, Corpus, CorpusIdentity
from engine.distill.cost import linear_cost
from engine.distill.export import put_in_place, read_draft, write_draft
from engine.distill.generation import extend_corpus, job_stream
from engine.distill.model import DraftModel, draft_config, fit_output_map, start_from_target
from engine.distill.progress import ProgressReport
from engine.distill.settings import DistillSettings
from engine.distill.target import TargetModel, load_target_config, load_target_weights
from engine.distill.training import Trainer

FIT_CONTINUATIONS = 80
"""Continuations whose hidden states the output map is first fitted to."""
HEAD_FILE = "head.pt"


def train_draft(settings: DistillSettings, progress: ProgressReport) -> Path:
    """Makes a draft for ``settings.target`` and returns its folder, ``settings.output``.

    Every stage goes on from what ``settings.work`` holds. Raises ValueError for a target or a work folder that does
    not fit, FileNotFoundError for missing files.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    settings.work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    held_out, corpus = _gather(settings, tokenizer, progress)
    draft = _start(settings, tokenizer, corpus, progress)
    trainer = Trainer(draft, settings, held_out)
    trainer.run(corpus, progress)
    return _finish(settings, trainer, corpus, held_out, progress)


def _gather(
    settings: DistillSettings, tokenizer: PreTrainedTokenizerBase, progress: ProgressReport
) -> tuple[list[HeldOutText], list[Continuation]]:
    """The target's part: answers to the held-out prompts, and the corpus."""
    model = TargetModel(settings.target, rows=settings.rows)
    texts: list[HeldOutText] = []
    barred: set[str] = set()
    if settings.held_out is not None:
        progress.say("the target answers the held-out prompts")
        texts = held_out_texts(settings.held_out, settings.work / "held_out.json", model, tokenizer)
        lines = settings.held_out.read_text().splitlines()
        barred = {json.loads(line)["messages"][-1]["content"] for line in lines if line.strip()}
    corpus = Corpus(
        settings.work / "corpus",
        CorpusIdentity(settings.seed, settings.max_new_tokens, model.config.vocab_size),
    )
    done, tokens = corpus.done()
    if tokens < settings.tokens and not (settings.work / "checkpoint.pt").exists():
        extend_corpus(corpus, job_stream(settings.seed, tokenizer, done, barred), model, settings, progress)
    return texts, list(corpus)


def _start(
    settings: DistillSettings,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Sequence[Continuation],
    progress: ProgressReport,
) -> DraftModel:
    """An untrained draft: layers of the target and, unless a checkpoint follows, a fitted output map."""
    config = load_target_config(settings.target)
    weights = load_target_weights(settings.target)
    head_file = settings.work / HEAD_FILE
    if head_file.exists():
        draft_to_target = torch.load(head_file, weights_only=True)
    else:
        always = spelling_tokens(tokenizer)
        draft_to_target = choose_head_vocabulary(corpus, settings.head_vocabulary, config.vocab_size, always)
        torch.save(draft_to_target, head_file)
    described = draft_config(config, len(settings.layers))
    draft = DraftModel(described, weights["model.embed_tokens.weight"], draft_to_target, torch.bfloat16)
    start_from_target(draft, weights, settings.layers)
    if not (settings.work / "checkpoint.pt").exists():
        progress.say("the output map is fitted to the target's hidden states")
        _fit(draft, TargetModel(settings.target, rows=settings.rows), corpus)
    return draft


@torch.no_grad()
def _fit(draft: DraftModel, target: TargetModel, corpus: Sequence[Continuation]) -> None:
    chosen = corpus[:: max(1, len(corpus) // FIT_CONTINUATIONS)][:FIT_CONTINUATIONS]
    theirs = []
    for item in chosen:
        hidden, _ = target.read([*item.prompt.tolist(), *item.generated.tolist()[:-1]])
        theirs.append(hidden[-len(item.generated) :])
    own = draft.final_hidden(pack([item.prompt for item in chosen], [item.generated for item in chosen]))
    draft.output_map.copy_(fit_output_map(own, torch.cat(theirs).float()))


def _finish(
    settings: DistillSettings,
    trainer: Trainer,
    corpus: Sequence[Continuation],
    held_out: Sequence[HeldOutText],
    progress: ProgressReport,
) -> Path:
    """Writes weights and card next to the output folder, measures what was written, and puts it in place."""
    finished = settings.output.with_name(settings.output.name + ".new")
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir(parents=True)
    write_draft(trainer.draft, finished)
    draft = read_draft(finished, settings.target)
    flags = agreement(draft, held_out) if held_out else []
    kinds = [text.kind for text in held_out]
    known = set(draft.draft_to_target.tolist())
    tokens = Counter[str]()
    for item in corpus:
        tokens[item.kind] += len(item.generated)
    facts = CardFacts(
        settings=settings,
        target_name=settings.target_name or settings.target.name,
        draft=draft,
        corpus_tokens=tokens,
        state=trainer.state,
        acceptance={length: measure(flags, kinds, length) for length in settings.draft_tokens} if held_out else {},
        agreement=first_token_agreement(flags),
        head_coverage=_share_known(held_out, known),
        cost=linear_cost(draft, load_target_weights(settings.target)),
    )
    write_card(facts, finished)
    put_in_place(finished, settings.output)
    progress.say(f"draft written to {settings.output}")
    return settings.output


def _share_known(texts: Sequence[HeldOutText], known: set[int]) -> float:
    """Share of the answers' tokens that lie in ``known``."""
    flags = [token in known for text in texts for token in text.answer]
    return sum(flags) / max(len(flags), 1)
