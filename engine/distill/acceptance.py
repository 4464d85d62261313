"""Owns measuring a draft against the target's greedy text, the way the server accepts it.

A draft of this kind sees tokens only. As long as its proposals are accepted, its context is the target's own text,
so whether a proposal is accepted depends only on whether the draft's best token agrees with the target's at that
place: one forward over the finished text yields the outcome of every round exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine.distill.batches import pack
from engine.distill.generation import ContinuationGenerator, Job, chat_tokens, single_eos
from engine.distill.model import DraftModel
from engine.distill.target import TargetModel


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """A held-out prompt and the target's greedy answer."""

    kind: str
    """Class of the prompt."""
    prompt: list[int]
    """Token ids of the prompt."""
    answer: list[int]
    """The target's greedy token ids, the end-of-sequence token included if it came."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of one measurement with chains of up to ``len(reached)`` draft tokens."""

    reached: tuple[int, ...]
    """How often position i was judged, that is, was drafted and everything before it accepted."""
    accepted: tuple[int, ...]
    """How often position i was accepted."""
    drafted: int
    """Draft tokens proposed."""
    rounds: int
    """Rounds, each of which also yields one token of the target."""

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted / drafted."""
        return sum(self.accepted) / max(self.drafted, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Acceptance rate of each position, given that everything before it was accepted."""
        return tuple(hit / max(seen, 1) for hit, seen in zip(self.accepted, self.reached, strict=True))

    @property
    def mean_length(self) -> float:
        """Mean acceptance length: tokens per round, the target's own one included."""
        return (sum(self.accepted) + self.rounds) / max(self.rounds, 1)

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            tuple(map(sum, zip(self.reached, other.reached, strict=True))),
            tuple(map(sum, zip(self.accepted, other.accepted, strict=True))),
            self.drafted + other.drafted,
            self.rounds + other.rounds,
        )


def run_rounds(agrees: Sequence[bool], draft_tokens: int) -> Acceptance:
    """Plays the rounds of one answer whose tokens the draft would (``agrees``) or would not have proposed.

    A round drafts ``draft_tokens``, but never past the end of the answer, and moves on by what was accepted plus
    the target's own token.
    """
    reached, accepted = [0] * draft_tokens, [0] * draft_tokens
    at = drafted = rounds = 0
    while at < len(agrees):
        chain = agrees[at : at + draft_tokens]
        drafted += len(chain)
        rounds += 1
        for position, hit in enumerate(chain):
            reached[position] += 1
            if not hit:
                break
            accepted[position] += 1
            at += 1
        at += 1
    return Acceptance(tuple(reached), tuple(accepted), drafted, rounds)


def agreement(draft: DraftModel, texts: Sequence[HeldOutText]) -> list[list[bool]]:
    """For every text, at which of its answer's tokens the draft's best token is the target's."""
    packed = pack([text.prompt for text in texts], [text.answer for text in texts])
    said = torch.cat([torch.tensor(text.answer) for text in texts])
    agrees = (draft.greedy(packed) == said).tolist()
    split: list[list[bool]] = []
    for text in texts:
        split.append(agrees[: len(text.answer)])
        agrees = agrees[len(text.answer) :]
    return split


def measure(agrees: Sequence[Sequence[bool]], kinds: Sequence[str], draft_tokens: int) -> Mapping[str, Acceptance]:
    """Acceptance by class and, under ``all``, over everything."""
    nothing = Acceptance((0,) * draft_tokens, (0,) * draft_tokens, 0, 0)
    found: dict[str, Acceptance] = {}
    for kind, flags in zip(kinds, agrees, strict=True):
        found[kind] = found.get(kind, nothing) + run_rounds(flags, draft_tokens)
    return {**found, "all": sum(found.values(), nothing)}


def first_token_agreement(agrees: Sequence[Sequence[bool]]) -> float:
    """Share of all answer tokens at which draft and target agree, given the target's text before it."""
    return sum(map(sum, agrees)) / max(sum(map(len, agrees)), 1)


def held_out_texts(
    path: Path, cache: Path, model: TargetModel, tokenizer: PreTrainedTokenizerBase
) -> list[HeldOutText]:
    """The target's greedy answers to the prompts of ``path``, computed once and kept in ``cache``."""
    if cache.exists():
        return [HeldOutText(**entry) for entry in json.loads(cache.read_text())]
    requests = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    jobs, limits = [], []
    for number, request in enumerate(requests):
        jobs.append(Job(number, request["class"], chat_tokens(tokenizer, request["messages"]), temperature=0.0))
        limits.append(int(request.get("max_tokens", 128)))
    eos = single_eos(model.config)
    generator = ContinuationGenerator(model, rows=16, max_new_tokens=max(limits), eos=eos, seed=0, stop_loops=False)
    texts = []
    for item in sorted(generator.run(jobs), key=lambda item: item.prompt_index):
        answer = item.generated.tolist()[: limits[item.prompt_index]]
        texts.append(HeldOutText(item.kind, item.prompt.tolist(), answer))
    cache.write_text(json.dumps([asdict(text) for text in texts]))
    return texts
