"""Owns training the draft: optimiser, schedule, checkpoints and the curves.

The schedule follows the time trained so far, not the step count, so that a run ends when its budget ends whatever
the machine; the time is part of the checkpoint, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import nn

from engine.distill.acceptance import HeldOutText, agreement, first_token_agreement, measure
from engine.distill.batches import TrainingBatch, epoch, target_to_draft
from engine.distill.corpus import Continuation
from engine.distill.loss import head_loss
from engine.distill.model import DraftModel
from engine.distill.progress import ProgressReport
from engine.distill.settings import DistillSettings

STAGE = "training"
WARM_UP_STEPS = 12
"""Steps over which the learning rate rises; the draft starts from useful weights, which a hasty start destroys."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the training curves."""

    seconds: float
    """Time trained so far."""
    step: int
    """Optimiser steps so far."""
    tokens: int
    """Predicted tokens trained on so far, repeats counted."""
    loss: float
    """Mean loss since the point before."""
    agreement: float
    """Share of those tokens at which draft and target agreed."""
    held_out_agreement: float
    """The same on the held-out answers; nan without any."""
    held_out_acceptance: float
    """Acceptance rate on the held-out answers at the longest chain; nan without any."""


@dataclass
class TrainingState:
    """How far a run is."""

    seconds: float = 0.0
    """Time trained."""
    step: int = 0
    """Optimiser steps done."""
    tokens: int = 0
    """Predicted tokens trained on."""
    epoch: int = 0
    """Passes over the corpus begun and finished."""
    batch: int = 0
    """Batches of the current pass already used."""
    curve: list[CurvePoint] = field(default_factory=list)
    """The curves so far."""


def make_optimiser(draft: DraftModel, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only.

    Muon was tried for the layers' matrices: the same progress a step at four fifths of the steps in equal time.
    """
    matrices = [parameter for parameter in draft.parameters() if parameter.ndim == 2]
    scales = [parameter for parameter in draft.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)


def schedule(share_done: float, step: int) -> float:
    """Share of the peak learning rate: a linear rise over ``WARM_UP_STEPS``, and a half cosine over the time."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(share_done, 1.0)))
    return cosine * min((step + 1) / WARM_UP_STEPS, 1.0)


class Trainer:
    """One training run over a corpus held in memory."""

    def __init__(
        self,
        draft: DraftModel,
        settings: DistillSettings,
        held_out: Sequence[HeldOutText],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = TrainingState()
        self.draft = draft
        self._settings = settings
        self._held_out = held_out
        self._clock = clock
        self._optimiser = make_optimiser(draft, settings.learning_rate)
        self._checkpoint = settings.work / "checkpoint.pt"
        if self._checkpoint.exists():
            self._restore()

    def run(self, corpus: Sequence[Continuation], progress: ProgressReport) -> None:
        """Trains until the time is up; does nothing where a checkpoint says it was."""
        budget = self._settings.training_minutes * 60
        progress.begin(STAGE, budget)
        if self.state.seconds >= budget:
            return
        inverse = target_to_draft(self.draft.draft_to_target, self.draft.config.vocab_size)
        losses: list[float] = []
        agreed = seen = 0
        saved = evaluated = self._clock()
        for batch in self._batches(corpus, inverse):
            started = self._clock()
            loss, hits = self._step(batch, schedule(self.state.seconds / budget, self.state.step))
            losses.append(loss)
            agreed += hits
            seen += len(batch.rows)
            self.state.seconds += self._clock() - started
            over = self.state.seconds >= budget
            if over or self._clock() - evaluated >= self._settings.evaluate_seconds:
                point = self._evaluate(sum(losses) / len(losses), agreed / seen)
                self.state.curve.append(point)
                progress.say(describe(point))
                losses, agreed, seen, evaluated = [], 0, 0, self._clock()
            if over or self._clock() - saved >= self._settings.checkpoint_seconds:
                self._save()
                saved = self._clock()
            progress.reach(STAGE, min(self.state.seconds, budget), f"loss {loss:.3f}")
            if over:
                return

    def _batches(self, corpus: Sequence[Continuation], inverse: torch.Tensor) -> Iterator[TrainingBatch]:
        settings = self._settings
        while True:
            seed = settings.seed * 1_000_003 + self.state.epoch
            found = False
            for number, batch in enumerate(epoch(corpus, inverse, settings.batch_tokens, settings.hard_share, seed)):
                found = True
                if number >= self.state.batch:
                    self.state.batch = number + 1
                    yield batch
            if not found:
                raise ValueError("the corpus is smaller than one batch")
            self.state.epoch += 1
            self.state.batch = 0

    def _step(self, batch: TrainingBatch, share: float) -> tuple[float, int]:
        draft = self.draft
        loss, agreed = head_loss(draft.features(batch.packed), draft.head, batch.rows, batch.weights)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.learning_rate * share
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.tokens += len(batch.rows)
        return loss.item(), int(agreed)

    def _evaluate(self, loss: float, agreed: float) -> CurvePoint:
        place, rate = math.nan, math.nan
        if self._held_out:
            flags = agreement(self.draft, self._held_out)
            place = first_token_agreement(flags)
            kinds = [text.kind for text in self._held_out]
            rate = measure(flags, kinds, max(self._settings.draft_tokens))["all"].rate
        state = self.state
        return CurvePoint(state.seconds, state.step, state.tokens, loss, agreed, place, rate)

    def _save(self) -> None:
        content = {
            "draft": self.draft.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "state": asdict(self.state),
            "torch": torch.get_rng_state(),
        }
        temporary = self._checkpoint.with_suffix(".part")
        torch.save(content, temporary)
        os.replace(temporary, self._checkpoint)

    def _restore(self) -> None:
        content = torch.load(self._checkpoint, weights_only=True)
        self.draft.load_state_dict(content["draft"])
        self._optimiser.load_state_dict(content["optimiser"])
        kept = dict(content["state"])
        curve = [CurvePoint(**point) for point in kept.pop("curve")]
        self.state = TrainingState(**kept, curve=curve)


def describe(point: CurvePoint) -> str:
    """One line for people who watch a run."""
    return (
        f"{point.seconds / 60:5.1f} min  step {point.step}  {point.tokens / 1e6:.2f}M tokens  loss {point.loss:.3f}  "
        f"agreement {point.agreement:.3f}  held out {point.held_out_agreement:.3f}  "
        f"acceptance {point.held_out_acceptance:.3f}"
    )
