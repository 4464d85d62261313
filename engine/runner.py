"""Owns one device: model, KV cache, block pool and row budget, and runs planned forwards on them.

In a tensor-parallel group every rank has an Executor; rank 0's Runner plans, and tells the others each step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from typing import Protocol

import torch

from engine.attention import choose_attention
from engine.batch import StepRows, build_batch
from engine.blocks import BlockPool
from engine.info import EngineInfo
from engine.kv_cache import KVCache
from engine.model import LanguageModel, ModelShape
from engine.parallel import TensorParallel
from engine.planner import Demand, Kind, RowBudget, StepPlan, plan_step
from engine.sequence import Sequence
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)
PARKED_AFTER_S = 1.0
"""A session that has wanted nothing for so long (its caller reads slowly, say) is the first to lose its blocks."""
CPU_ROW_MULTIPLE = 4  # on CPU a one-row bf16 product is no faster than a four-row one


class Device(Protocol):
    """What a runner plans for: something that computes the logits of rows and remembers their keys and values."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def head_token_ids(self) -> torch.Tensor | None:
        """int64 [head_vocab], the token each logit is for; None when logits are for ids 0, 1, …."""
        ...

    def forward(self, step: StepRows) -> torch.Tensor:
        """Logits of the wanted rows, span by span, [n, head_vocab]; they are there when it returns."""
        ...

    def move(self, sources: Listed[int], destinations: Listed[int]) -> None:
        """Copies the keys and values of slots to other slots, as if all at once: the two may overlap."""
        ...


class Executor:
    """A Device with a model, or one rank's part of it, and its KV cache.

    Args:
        settings: sizes and shapes.
        model: the loaded model; its shape says which heads are here.
    """

    def __init__(self, settings: EngineSettings, model: LanguageModel) -> None:
        self._settings, self.model = settings, model
        self.shape, self.head_token_ids = (shape := model.shape), model.head_token_ids
        self.device = torch.device(settings.device)
        self.cache = KVCache(
            shape.num_layers,
            settings.num_blocks * settings.block_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=getattr(torch, settings.dtype),
            device=self.device,
        )
        self.attention, self._attend = choose_attention(settings.attention, self.device, shape.num_heads)
        _log.info("%s: attention %s, %d KV blocks", settings.model_name, self.attention, settings.num_blocks)

    def forward(self, step: StepRows) -> torch.Tensor:
        shapes = self._settings.shapes
        batch = build_batch(step, self._settings.block_size, self.device, fixed=shapes is not None)
        logits = self.model.forward(batch, self.cache, self._attend, shapes.generated_rows if shapes else None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return logits

    @torch.inference_mode()
    def move(self, sources: Listed[int], destinations: Listed[int]) -> None:
        self.cache.move(torch.tensor(sources, device=self.device), torch.tensor(destinations, device=self.device))


class Runner:
    """Plans and runs forwards for whoever holds the sequences.

    Args:
        settings: sizes and shapes.
        device: what forwards run on.
        clock: seconds, monotonic.
        parallel: the group this process leads, if the model is spread over one.
    """

    def __init__(
        self,
        settings: EngineSettings,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
        parallel: TensorParallel | None = None,
    ) -> None:
        self.settings, self.device, self._clock, self._parallel = settings, device, clock, parallel
        self.pool = BlockPool(settings.num_blocks, settings.block_size)
        pad_to = CPU_ROW_MULTIPLE if device.device.type == "cpu" else 1
        self.budget = RowBudget(settings.max_num_batched_tokens, settings.shapes, pad_to)
        self._last_kind = Kind.GENERATED
        self.forwards, self.forward_s = 0, 0.0

    @property
    def vocab_size(self) -> int:
        return min(self.device.shape.vocab_size, self.settings.vocab_size or self.device.shape.vocab_size)

    @property
    def num_slots(self) -> int:
        """Tokens the pool could hold."""
        return (self.pool.num_blocks - 1) * self.pool.block_size

    @property
    def max_context_length(self) -> int:
        """Most tokens of one session: the configured limit, the model's window, and what the pool could hold."""
        configured = self.settings.max_context_length or self.device.shape.max_context_length
        return min(configured, self.device.shape.max_context_length, self.num_slots)

    def info(self, running_sessions: int) -> EngineInfo:
        return EngineInfo(
            model=self.settings.model_name or self.settings.model_path.name,
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_length,
            eos_token_ids=self.device.shape.eos_token_ids,
            max_proposal_tokens=self.budget.max_proposal_tokens,
            num_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            block_size=self.pool.block_size,
            running_sessions=running_sessions,
            forwards=self.forwards,
            forward_s=self.forward_s,
            tokenizer=self.settings.tokenizer,
        )

    def plan(self, demands: Listed[Demand], sequences: Mapping[int, Sequence]) -> StepPlan | None:
        """The next forward for `demands`; None when there are none, or those there are have to wait for blocks.

        Args:
            demands: who wants rows, in turn.
            sequences: of every open session; the lower the key, the longer it has been open.
        """
        now = self._clock()
        for demand in demands:
            demand.sequence.wanted_at = now
        ranking = sorted(sequences.items(), key=lambda each: (now - each[1].wanted_at > PARKED_AFTER_S, each[0]))
        return plan_step(demands, self.budget, self.pool, dict(ranking), last_kind=self._last_kind)

    def forward(self, plan: StepPlan) -> tuple[torch.Tensor, float]:
        """Logits of the plan's wanted rows, span by span, and the seconds it took.

        Raises:
            Unavailable: another rank of the group is gone or hangs.
        """
        began = self._clock()
        logits = self._execute(StepRows.of(plan))
        ended = self._clock()
        seconds = ended - began
        for span in plan.spans:
            span.sequence.wanted_at = ended
        self._last_kind = plan.kind
        self.forwards += 1
        self.forward_s += seconds
        return logits, seconds

    def _execute(self, step: StepRows) -> torch.Tensor:
        if self._parallel is None:
            return self.device.forward(step)
        with self._parallel.together("forward"):
            self._parallel.send_step(step.packed())
            return self.device.forward(step)
