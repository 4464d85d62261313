"""Owns emulated devices: forwards that take a given time, over stubs whose logits are a function of the prefix alone.

An emulated device is a Device like any other, so engines, scheduling and block pools are the real ones around it. Its
cache is one number for each KV slot, worked out from everything that the row may see, as keys and values are. So a
fault in block tables, rollback, prefix sharing or copying shows as wrong tokens, and `reference` says which are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AutoConfig

from engine.batch import SpanRows, StepRows
from engine.loading import model_shape
from engine.settings import EngineSettings
from engine.stubs import EmulatedTarget, Prefixes, Stub
from engine.waiting import wait_until

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


# Identities of prefixes. What position i leaves in its slot depends on the identity of the prefix before it and on its
# token, and the identity of a prefix is the sum of its slots: so each row depends on every slot it sees.


def _entry(prefix: int, token: int) -> int:
    """What `token` after `prefix` leaves in its KV slot."""
    value = ((prefix ^ (token + 1)) * _MULTIPLIER) & _MASK
    return value ^ (value >> 29)


def extended(prefix: int, token: int) -> int:
    """Identity of the prefix with `token` after it; the empty one's is 0."""
    return (prefix + _entry(prefix, token)) & _MASK


def identity_of(tokens: Sequence[int]) -> int:
    """Identity of a whole prefix."""
    prefix = 0
    for token in tokens:
        prefix = extended(prefix, token)
    return prefix


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """What a forward takes, in seconds.

    Attributes:
        base_s: with one row whose logits are wanted.
        per_row_s: each further row whose logits are wanted.
        per_prompt_row_s: each row that is only caught up: of a prompt, mostly.
        per_context_token_s: each token that a session's rows attend to, whatever the number of rows.
    """

    base_s: float
    per_row_s: float = 0.0
    per_prompt_row_s: float = 0.0
    per_context_token_s: float = 0.0

    def stretched(self, factor: float) -> ForwardTime:
        """All of it times `factor`."""
        return replace(self, **{name: factor * getattr(self, name) for name in self.__slots__})

    def of(self, step: StepRows) -> float:
        """Seconds of one forward. Padding costs nothing."""
        rows = sum(span.num_logits for span in step.spans)
        prompt_rows = sum(span.num_rows for span in step.spans) - rows
        context = sum(span.start + span.num_rows for span in step.spans)
        further = self.per_row_s * max(rows - 1, 0) + self.per_prompt_row_s * prompt_rows
        return self.base_s + further + self.per_context_token_s * context


class EmulatedDevice:
    """A Device whose forward works out a stub's logits and returns when the forward would have ended.

    Args:
        settings: of the engine; the shape is that of the folder's config.json.
        stub: what the logits come from; its vocabulary is the folder's.
        forward_time: what a forward takes.
        clock: seconds, monotonic.
        sleep: waits for seconds.
    """

    head_token_ids: torch.Tensor | None = None

    def __init__(
        self,
        settings: EngineSettings,
        stub: Stub,
        forward_time: ForwardTime,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.shape = model_shape(AutoConfig.from_pretrained(settings.model_path))
        self.device = torch.device("cpu")
        self._stub, self._time, self._clock, self._sleep = stub, forward_time, clock, sleep
        self._block_size = settings.block_size
        self._slots: Prefixes = np.zeros(settings.num_blocks * settings.block_size, dtype=np.uint64)
        self._blocks = self._slots.reshape(settings.num_blocks, settings.block_size)  # the same memory

    def forward(self, step: StepRows) -> torch.Tensor:
        """Logits of the wanted rows, span by span, float32 [n, vocab]."""
        ends_at = self._clock() + self._time.of(step)
        prefixes: list[int] = []
        lengths: list[int] = []
        for span in step.spans:
            first = span.num_rows - span.num_logits
            prefixes += self._compute(span)[first:]
            lengths += _lengths(span)[first:]
        logits = self._stub.logits(np.array(prefixes, dtype=np.uint64), np.array(lengths, dtype=np.int64))
        wait_until(ends_at, self._clock, self._sleep)
        return torch.from_numpy(logits)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies the slots `sources` to the slots `destinations`, all read before any is written."""
        self._slots[list(destinations)] = self._slots[list(sources)]

    def _compute(self, span: SpanRows) -> list[int]:
        """Writes the span's slots; the identity of each row's prefix, its own token included."""
        num_committed = max(span.base - span.start, 0)
        seen = self._seen(span)
        prefix = int(np.add.reduce(seen[: span.base]))
        prefixes: list[int] = []
        entries: list[int] = []
        for token in span.tokens[:num_committed]:
            entries.append(_entry(prefix, token))
            prefixes.append(prefix := (prefix + entries[-1]) & _MASK)
        nodes: list[int] = []
        for parent, entry in zip(span.parents, seen[span.base :].tolist(), strict=False):  # of earlier forwards
            nodes.append(((nodes[parent] if parent >= 0 else prefix) + entry) & _MASK)
        for parent, token in zip(span.parents[len(nodes) :], span.tokens[num_committed:], strict=True):
            before = nodes[parent] if parent >= 0 else prefix
            entries.append(_entry(before, token))
            prefixes.append((before + entries[-1]) & _MASK)
            nodes.append(prefixes[-1])
        self._slots[self._own_slots(span)] = np.array(entries, dtype=np.uint64)
        return prefixes

    def _seen(self, span: SpanRows) -> Prefixes:
        """What the slots before the span's own hold."""
        num_blocks = -(-span.start // self._block_size)
        blocks = self._blocks.take(np.array(span.block_table[:num_blocks], dtype=np.int64), axis=0)
        return blocks.reshape(-1)[: span.start]

    def _own_slots(self, span: SpanRows) -> list[int]:
        table, size = span.block_table, self._block_size
        return [table[i // size] * size + i % size for i in range(span.start, span.start + span.num_rows)]


def _lengths(span: SpanRows) -> list[int]:
    """Tokens of each row's prefix, its own included."""
    nodes: list[int] = []
    for parent in span.parents:
        nodes.append((nodes[parent] if parent >= 0 else span.base) + 1)
    return [*range(span.start + 1, span.base + 1), *nodes[max(span.start - span.base, 0) :]]


def reference(target: EmulatedTarget, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The target's greedy continuation of `prompt`, by which outputs are checked: no device, cache or engine in it."""
    prefix = identity_of(prompt)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(int(target.ranked(np.array([prefix], dtype=np.uint64))[0, 0]))
        prefix = extended(prefix, tokens[-1])
    return tokens
