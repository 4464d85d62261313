"""Owns the distillation loss: the target's most probable tokens against the draft's reduced head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 512
"""Rows whose logits exist at one time; they stay in the processor's cache."""


def target_weights(
    top_log_probs: Tensor, top_ids: Tensor, target_to_draft: Tensor, hard_share: float
) -> tuple[Tensor, Tensor]:
    """Head rows and weights of the loss at each position.

    ``top_log_probs`` float [rows, k] and ``top_ids`` int [rows, k] come from the corpus, best first;
    ``target_to_draft`` int64 [vocabulary] gives a token's head row or -1. The weight of a token is its probability,
    mixed with ``hard_share`` of a one on the best token; tokens outside the head weigh nothing, so that a position
    the draft cannot get right counts less. Returns int64 [rows, k] and float32 [rows, k].
    """
    weights = top_log_probs.float().exp() * (1.0 - hard_share)
    weights[:, 0] += hard_share
    rows = target_to_draft[top_ids.long()]
    return rows.clamp_min(0), weights.masked_fill(rows < 0, 0.0)


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy through a frozen head that computes its gradient on the way forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, head: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(features)
        total = torch.zeros((), dtype=torch.float64)
        agreed = torch.zeros((), dtype=torch.int64)
        for start in range(0, len(features), CHUNK):
            span = slice(start, start + CHUNK)
            logits = F.linear(features[span], head).float()
            best = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, rows[span]) - best
            agreed += ((picked[:, 0] >= 0) & (weights[span, 0] > 0)).sum()
            share = logits.sub_(best).exp_()
            normaliser = share.sum(-1, keepdim=True)
            total += (weights[span] * (normaliser.log() - picked)).sum()
            share.mul_(weights[span].sum(-1, keepdim=True) / normaliser)
            share.scatter_add_(1, rows[span], -weights[span])
            gradient[span] = share.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.rows = len(features)
        ctx.mark_non_differentiable(agreed)
        return (total / len(features)).float(), agreed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grads[0] / ctx.rows), None, None, None


def head_loss(features: Tensor, head: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean weighted cross-entropy, and at how many rows the draft's best token is the target's.

    ``features`` [rows, hidden] and the frozen ``head`` [head vocabulary, hidden] share a type; ``rows`` and
    ``weights`` come from :func:`target_weights`.
    """
    loss, agreed = _HeadLoss.apply(features, head, rows, weights)  # type: ignore[no-untyped-call]
    return loss, agreed
