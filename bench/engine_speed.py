"""Owns the engine's own numbers, without servers: plain decoding against transformers, and what rows cost.

Everything is interleaved in one process on one thread and compared by medians of ratios, because machines are shared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.planner import RowShapes
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import EngineSettings
from engine.target import TargetEngine, build_target_engine
from router.tokenizer import Tokenizer

PROMPT = "Write a Python function that merges two sorted lists, with a docstring and three examples."
NUM_TOKENS = 48
ROWS = (1, 2, 3, 4, 5, 6, 8)


def prompt_ids(folder: Path) -> list[int]:
    return Tokenizer(folder).encode_chat([{"role": "user", "content": PROMPT}])


def transformers_decoder(folder: Path, prompt: Sequence[int]) -> Callable[[], float]:
    """Seconds per decoded token of generate() with the same weights, dtype and thread count; the prompt is excluded."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)

    def seconds(num_tokens: int) -> float:
        began = time.perf_counter()
        model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens)
        return time.perf_counter() - began

    return lambda: (seconds(NUM_TOKENS) - seconds(1)) / (NUM_TOKENS - 1)


class EngineProbe:
    """One engine, stepped by hand.

    Args:
        folder: the model.
        shapes: reproducible mode's row counts, or None.
        prompt: token ids that every measurement starts from.
    """

    def __init__(self, folder: Path, shapes: RowShapes | None, prompt: Sequence[int]) -> None:
        self._engine: TargetEngine = build_target_engine(EngineSettings(folder, num_blocks=256, shapes=shapes))
        self._prompt, self._session = list(prompt), 0

    def plain_token_s(self) -> float:
        """Seconds per token of plain decoding, judging and committing included."""
        tokens = self._open()
        self._engine.decode(self._session, NUM_TOKENS)
        began = time.perf_counter()
        while self._engine.has_work():
            for _, verdict in self._engine.step():
                tokens += verdict.tokens  # type: ignore[union-attr]
        seconds = time.perf_counter() - began
        self._engine.close(self._session)
        return seconds / (NUM_TOKENS - 1)

    def verify_s(self, rows: int) -> float:
        """Median seconds of a step that verifies rows - 1 draft tokens, all of them wrong."""
        tokens, seconds = self._open(), []
        for _ in range(8):
            base = State.of(self._prompt + tokens)
            self._engine.propose(self._session, Proposal.chain(base, [0] * (rows - 1)))
            began = time.perf_counter()
            ((_, verdict),) = self._engine.step()
            seconds.append(time.perf_counter() - began)
            tokens += verdict.tokens  # type: ignore[union-attr]
        self._engine.close(self._session)
        return statistics.median(seconds)

    def _open(self) -> list[int]:
        self._session += 1
        stops = StopParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        self._engine.open(self._session, self._prompt, [], SamplingParams(), stops)
        while True:
            for _, verdict in self._engine.step():
                return list(verdict.tokens)  # type: ignore[union-attr]


def num_measurements(rounds: int) -> int:
    """How often `measure` will tell of one."""
    return (rounds + 1) * (3 + 2 * len(ROWS))


def measure(folder: Path, rounds: int, measured_one: Callable[[], None]) -> dict[str, list[float]]:
    """All figures of the model in `folder`: seconds by name, one value per round; tells of each as it is done."""
    torch.set_num_threads(1)
    prompt = prompt_ids(folder)
    reference = transformers_decoder(folder, prompt)
    fixed, free = EngineProbe(folder, RowShapes(), prompt), EngineProbe(folder, None, prompt)
    measured: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, call in _calls(reference, fixed, free):
            measured.setdefault(name, []).append(call())
            measured_one()
    return {name: values[1:] for name, values in measured.items()}  # the first round warms caches


def _calls(
    reference: Callable[[], float], fixed: EngineProbe, free: EngineProbe
) -> list[tuple[str, Callable[[], float]]]:
    calls: list[tuple[str, Callable[[], float]]] = [
        ("transformers generate()", reference),
        ("plain, reproducible", fixed.plain_token_s),
        ("plain, free shapes", free.plain_token_s),
    ]
    for rows in ROWS:
        calls.append((f"verify {rows} rows, reproducible", lambda rows=rows: fixed.verify_s(rows)))  # type: ignore[misc]
        calls.append((f"verify {rows} rows, free shapes", lambda rows=rows: free.verify_s(rows)))  # type: ignore[misc]
    return calls


def report(measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a figure: median, spread, and the median of the ratios to its base in the same round."""
    rows = []
    for name, values in measured.items():
        mode = "free shapes" if "free" in name else "reproducible"
        base = f"verify 1 rows, {mode}" if name.startswith("verify") else "transformers generate()"
        ratios = [mine / theirs for mine, theirs in zip(values, measured[base], strict=True)]
        rows.append(
            {
                "what": name,
                "ms": 1e3 * statistics.median(values),
                "min_ms": 1e3 * min(values),
                "max_ms": 1e3 * max(values),
                "times_base": statistics.median(ratios),
                "base": base,
            }
        )
    return rows
