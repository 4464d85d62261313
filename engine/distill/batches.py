"""Owns turning a corpus into training batches: the head's vocabulary, packing and the order of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.distill.corpus import Continuation
from engine.distill.loss import target_weights
from engine.distill.model import Packed

ROW_BLOCK = 256
"""Packed rows of a training batch are filled up to a multiple of this."""
PREDICTED_BLOCK = 128
"""Predicted rows of a training batch are filled up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Packed sequences and what the target thought at their predicted rows."""

    packed: Packed
    """Prompts with their continuations, less the last token, which is only ever predicted."""
    rows: Tensor
    """Head rows of the target's best tokens, int64 [predicted rows, k]."""
    weights: Tensor
    """Their weights in the loss, float32 [predicted rows, k]."""


def pack(prompts: Sequence[Sequence[int] | Tensor], continuations: Sequence[Sequence[int] | Tensor]) -> Packed:
    """Packs prompts with their continuations so that exactly the continuations' tokens are predicted."""
    tokens, lengths, predicted = [], [], []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        tokens += [torch.as_tensor(prompt), torch.as_tensor(continuation)[:-1]]
        lengths.append(len(prompt) + len(continuation) - 1)
        predicted.append(len(continuation))
    return Packed(torch.cat(tokens).long(), lengths, predicted)


def choose_head_vocabulary(corpus: Iterable[Continuation], size: int, vocabulary: int, always: Iterable[int]) -> Tensor:
    """Target ids the draft can propose, ascending, int32 [min(size, vocabulary)].

    ``always`` comes first, then what the target said most often: each generated token counts one, each of the
    target's runners-up its probability, so that ties among rare tokens are broken by how near they came.
    """
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for item in corpus:
        counts.scatter_add_(0, item.generated.long(), torch.ones(len(item.generated), dtype=torch.float64))
        counts.scatter_add_(0, item.top_ids.long().flatten(), item.top_log_probs.double().exp().flatten())
    for token in always:
        counts[token] = float("inf")
    return counts.topk(min(size, vocabulary)).indices.sort().values.to(torch.int32)


def spelling_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens without which code, numbers or JSON cannot be written: special ones, single characters, punctuation.

    Tokens made of white space and ASCII punctuation only are taken up to four characters.
    """
    kept = set(tokenizer.all_special_ids)
    for text, token in tokenizer.get_vocab().items():
        plain = text.replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t")
        symbols = all(character.isascii() and not character.isalnum() for character in plain)
        if len(plain) == 1 or (symbols and len(plain) <= 4):
            kept.add(token)
    return kept


def target_to_draft(draft_to_target: Tensor, vocabulary: int) -> Tensor:
    """Head row of every target id, or -1 where the draft cannot propose it, int64 [vocabulary]."""
    inverse = torch.full((vocabulary,), -1, dtype=torch.int64)
    inverse[draft_to_target.long()] = torch.arange(len(draft_to_target))
    return inverse


def epoch(
    corpus: Sequence[Continuation], inverse: Tensor, batch_tokens: int, hard_share: float, seed: int
) -> Iterator[TrainingBatch]:
    """The corpus once, in an order that follows from ``seed``, about ``batch_tokens`` predicted rows at a time."""
    order = list(range(len(corpus)))
    Random(seed).shuffle(order)
    group: list[Continuation] = []
    size = 0
    for index in order:
        group.append(corpus[index])
        size += len(corpus[index].generated)
        if size >= batch_tokens:
            yield _batch(group, inverse, hard_share)
            group, size = [], 0


def _batch(group: Sequence[Continuation], inverse: Tensor, hard_share: float) -> TrainingBatch:
    packed = pack([item.prompt for item in group], [item.generated for item in group])
    log_probs = torch.cat([item.top_log_probs for item in group])
    ids = torch.cat([item.top_ids.to(torch.int64) for item in group])
    rows, weights = target_weights(log_probs, ids, inverse, hard_share)
    return _filled_up(TrainingBatch(packed, rows, weights))


def _filled_up(batch: TrainingBatch) -> TrainingBatch:
    """Adds a sequence without weight so that few different row counts occur.

    oneDNN prepares code for every shape of a product that it meets; with free shapes that took a third of a step.
    """
    packed, rows, weights = batch.packed, batch.rows, batch.weights
    predicted = PREDICTED_BLOCK - len(rows) % PREDICTED_BLOCK
    length = predicted + (-(len(packed.tokens) + predicted)) % ROW_BLOCK
    tokens = torch.cat((packed.tokens, torch.zeros(length, dtype=torch.int64)))
    filled = Packed(tokens, [*packed.lengths, length], [*packed.predicted, predicted])
    return TrainingBatch(filled, F.pad(rows, (0, 0, 0, predicted)), F.pad(weights, (0, 0, 0, predicted)))
