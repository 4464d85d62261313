"""Owns making continuations: which prompt runs in which row, when a row ends, and what is kept of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerBase

from engine.distill.corpus import TOP_TOKENS, Continuation, Corpus
from engine.distill.progress import ProgressReport
from engine.distill.prompts import make_prompt
from engine.distill.settings import DistillSettings
from engine.distill.target import TargetBatch, TargetModel

LONGEST_PERIOD = 32
"""Longest repeated passage, in tokens, that is recognised as a loop."""
LOOP_REPEATS = 3
"""How often a passage follows itself before its continuation is cut off."""
SHORTEST_LOOP = 24
"""Tokens a loop must fill in total, so that short honest repeats such as a row of dashes survive."""
WINDOW = 512
"""Consecutive prompts that are ordered by length."""
SHARD_SIZE = 128
"""Continuations per shard."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be continued."""

    prompt_index: int
    """Index of the prompt in the seeded prompt stream."""
    kind: str
    """Class of the prompt."""
    tokens: list[int]
    """Token ids after the chat template, generation prompt included."""
    temperature: float
    """0 continues greedily; otherwise the next token is drawn from the ``TOP_TOKENS`` most probable."""


def top_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Most probable tokens and their log-probabilities, best first and lowest id first among equals.

    ``logits`` [rows, vocabulary] → int64 and float32 [rows, TOP_TOKENS]. The search runs over blocks first: the
    best tokens can only lie in the blocks with the best maxima.
    """
    wide = logits.float()
    rows, vocabulary = wide.shape
    normaliser = wide.logsumexp(-1, keepdim=True)
    if vocabulary % _BLOCK == 0 and vocabulary // _BLOCK >= TOP_TOKENS:
        blocks = wide.view(rows, -1, _BLOCK)
        best = blocks.amax(-1).topk(TOP_TOKENS).indices
        candidates = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
        values, where = candidates.topk(TOP_TOKENS)
        ids = best.gather(1, where // _BLOCK) * _BLOCK + where % _BLOCK
    else:
        values, ids = wide.topk(TOP_TOKENS)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), values - normaliser


def is_looping(tokens: list[int]) -> bool:
    """Whether ``tokens`` ends in a passage that has just been said ``LOOP_REPEATS`` times in a row."""
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(period * LOOP_REPEATS, SHORTEST_LOOP)
        if len(tokens) < span:
            return False
        tail = tokens[-span:]
        if tail[period:] == tail[:-period]:
            return True
    return False


class _Row:
    """One sequence in progress."""

    def __init__(self, job: Job, max_new_tokens: int) -> None:
        self.job = job
        self.generated: list[int] = []
        self.top_ids = torch.zeros(max_new_tokens, TOP_TOKENS, dtype=torch.int32)
        self.top_log_probs = torch.zeros(max_new_tokens, TOP_TOKENS, dtype=torch.float16)

    def take(self, token: int, ids: Tensor, log_probs: Tensor) -> None:
        at = len(self.generated)
        self.top_ids[at] = ids
        self.top_log_probs[at] = log_probs
        self.generated.append(token)

    def finish(self, id_type: torch.dtype) -> Continuation:
        length = len(self.generated)
        return Continuation(
            prompt_index=self.job.prompt_index,
            kind=self.job.kind,
            prompt=torch.tensor(self.job.tokens, dtype=torch.int32),
            generated=torch.tensor(self.generated, dtype=torch.int32),
            top_ids=self.top_ids[:length].to(id_type),
            top_log_probs=self.top_log_probs[:length].clone(),
        )


class ContinuationGenerator:
    """Continues a stream of jobs in a batch whose rows refill as they finish.

    ``stop_loops`` ends a continuation that only repeats itself; what it would add is not worth its time.
    """

    def __init__(
        self, model: TargetModel, rows: int, max_new_tokens: int, eos: int, seed: int, stop_loops: bool = True
    ) -> None:
        self._model = model
        self._row_count = rows
        self._max_new_tokens = max_new_tokens
        self._eos = eos
        self._stop_loops = stop_loops
        self._random = torch.Generator().manual_seed(seed)
        self._id_type = torch.uint16 if model.config.vocab_size <= 1 << 16 else torch.int32

    @torch.inference_mode()
    def run(self, jobs: Iterable[Job]) -> Iterator[Continuation]:
        """Yields finished continuations; neighbours in ``jobs`` should have prompts of similar length.

        The key cache is as long as the longest row, so that one long prompt among short ones slows all of them.
        """
        waiting = iter(jobs)
        batch = TargetBatch(self._model, self._row_count)
        rows: list[_Row | None] = [None] * self._row_count
        while True:
            for at in range(self._row_count):
                while rows[at] is None and (job := next(waiting, None)) is not None:
                    row = rows[at] = _Row(job, self._max_new_tokens)
                    self._choose([row], batch.admit(at, job.tokens)[None])
                    if self._ended(row):
                        yield self._leave(batch, rows, at)
            if not any(rows):
                return
            tokens = torch.tensor([row.generated[-1] if row else 0 for row in rows])
            self._choose(rows, batch.decode(tokens))
            for at, occupant in enumerate(rows):
                if occupant is not None and self._ended(occupant):
                    yield self._leave(batch, rows, at)

    def _choose(self, rows: list[_Row | None] | list[_Row], logits: Tensor) -> None:
        ids, log_probs = top_tokens(logits)
        temperature = torch.tensor([row.job.temperature if row else 0.0 for row in rows])[:, None]
        noise = torch.empty_like(log_probs).exponential_(generator=self._random).log_().neg_()
        drawn = torch.where(temperature > 0, log_probs / temperature.clamp_min(1e-6) + noise, log_probs).argmax(-1)
        drawn = torch.where(temperature[:, 0] > 0, drawn, 0)
        tokens = ids.gather(1, drawn[:, None])[:, 0].tolist()
        for at, row in enumerate(rows):
            if row is not None:
                row.take(tokens[at], ids[at], log_probs[at])

    def _ended(self, row: _Row) -> bool:
        generated = row.generated
        if len(generated) >= self._max_new_tokens or generated[-1] == self._eos:
            return True
        return self._stop_loops and is_looping(generated)

    def _leave(self, batch: TargetBatch, rows: list[_Row | None], at: int) -> Continuation:
        row = rows[at]
        assert row is not None
        rows[at] = None
        batch.release(at)
        return row.finish(self._id_type)


def chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins."""
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(encoded["input_ids"])


def single_eos(config: LlamaConfig) -> int:
    """The end-of-sequence token; ValueError where the configuration names none or several."""
    eos = config.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"the target's configuration must name one end-of-sequence token, not {eos}")
    return eos


def job_stream(seed: int, tokenizer: PreTrainedTokenizerBase, done: set[int], barred: set[str]) -> Iterator[Job]:
    """Endless jobs of the prompt stream ``seed`` that are not ``done``, neighbours of similar length.

    Repeated prompts are dropped, and so are those whose last message is in ``barred``, the held-out ones. Prompts
    are ordered by length within windows that run up and down in turn, so that the length changes gradually.
    """
    seen = set(barred)
    for number in itertools.count():
        jobs = []
        for index in range(number * WINDOW, (number + 1) * WINDOW):
            prompt = make_prompt(seed, index)
            text = prompt.messages[-1]["content"]
            if text in seen:
                continue
            seen.add(text)
            if index not in done:
                tokens = chat_tokens(tokenizer, prompt.messages)
                jobs.append(Job(index, prompt.kind, tokens, prompt.temperature))
        jobs.sort(key=lambda job: len(job.tokens), reverse=number % 2 == 1)
        yield from jobs


def extend_corpus(corpus: Corpus, jobs: Iterable[Job], model: TargetModel, settings: DistillSettings,
                  progress: ProgressReport) -> int:  # fmt: skip
    """Generates until the corpus holds ``settings.tokens`` or the time is up; returns its size in tokens."""
    done, tokens = corpus.done()
    eos = single_eos(model.config)
    generator = ContinuationGenerator(model, settings.rows, settings.max_new_tokens, eos, settings.seed + len(done))
    started, fresh, pending = time.monotonic(), 0, []
    progress.begin("corpus", settings.tokens)
    for continuation in generator.run(jobs):
        pending.append(continuation)
        fresh += len(continuation.generated)
        seconds = time.monotonic() - started
        over = tokens + fresh >= settings.tokens or seconds > settings.generation_minutes * 60
        if len(pending) >= SHARD_SIZE or over:
            corpus.append(pending)
            pending = []
        progress.reach("corpus", tokens + fresh, f"{fresh / max(seconds, 1e-3):.0f} tokens/s")
        if over:
            break
    else:
        if pending:
            corpus.append(pending)
    return tokens + fresh
