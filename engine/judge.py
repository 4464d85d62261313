"""Owns the decision which draft tokens stand and which token follows: losslessness (docs/design.md §5).

`judge` walks the proposal's tree from the last committed token. At each node the target's distribution of the
next token is known, and the node's children are tried against it:

* Greedy: the token is the argmax; the child that holds it is accepted.
* Seeded: the token is argmax(log target_probs + Gumbel noise of seed and position), whatever was proposed;
  the child that holds it is accepted. So the output depends on the seed and the target alone.
* Sampled: a child's token x is accepted with probability min(1, target_probs[x] / draft_probs[x]). On
  rejection target_probs becomes normalize(max(0, target_probs - draft_probs)) over the whole vocabulary, and
  the next child is tried against that. (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
  2302.01318; for several children the multi-round rule of SpecInfer, Miao et al. 2023, arXiv 2305.09781.)

Where no child is accepted the next token is recovered from what remains of target_probs; after an accepted
node without children it is the bonus token, drawn from target_probs itself. Either way each token has the
distribution it would have had if drawn plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributions import greedy_tokens, sample, target_probs
from engine.noise import gumbel
from engine.proposal import Proposal, SparseProbs, State
from engine.sampling import SamplingParams

# Less mass than this in a residual is rounding of float64 sums, not probability.
_EMPTY_RESIDUAL = 1e-12

_ROOT = -1
_NOTHING = Proposal(State())

# (node, depth) → the target's distribution of the token after that node, float64 [vocab].
TargetRow = Callable[[int, int], Tensor]

# (node, depth, children of the node) → the accepted child, if any, and the token that follows the node.
Verify = Callable[[int, int, Iterable[int]], tuple[int | None, int]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the target made of a proposal.

    Attributes:
        accepted: indices of the accepted proposal tokens, from the root down.
        tokens: the accepted tokens, then exactly one recovered or bonus token.
    """

    accepted: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """The target's side of one verification: its rows, as distributions on demand."""

    logits: Tensor
    sampling: SamplingParams
    position: int
    ending_ids: Collection[int]
    banned_until: int

    def probs(self, node: int, depth: int) -> Tensor:
        return target_probs(self._row(node), self.sampling, self._banned(depth))[0]

    def best_token(self, best: list[int], node: int, depth: int) -> int:
        """The argmax of a row, given the argmax of every row when nothing is banned."""
        token, banned = best[node + 1], self._banned(depth)
        if token not in banned:
            return token
        return greedy_tokens(self._row(node), banned)[0]

    def _row(self, node: int) -> Tensor:
        return self.logits[node + 1 : node + 2]

    def _banned(self, depth: int) -> Collection[int]:
        return self.ending_ids if self.position + depth < self.banned_until else ()


def judge(
    logits: Tensor,
    proposal: Proposal | None,
    sampling: SamplingParams,
    *,
    position: int,
    vocab_size: int,
    generator: torch.Generator,
    ending_ids: Collection[int] = (),
    banned_until: int = 0,
) -> Judgement:
    """Verifies a proposal; without one, or with an empty one, this is plain decoding.

    Args:
        logits: [1 + num_tokens, >= vocab_size], floating point; row 0 follows the last committed token, row
            i + 1 proposal token i.
        proposal: a well-formed tree (`Proposal.flaw`). Children of one node that carry draft_probs must have
            been drawn independently, each from its own draft_probs (so an id may come twice).
            A drafter may stop after any token, but one that withholds a token for what it is bends the output.
        sampling: the request's.
        position: absolute index, prompt included, of the token that row 0 predicts.
        vocab_size: ids from here on are padding and cannot be drawn.
        generator: a CPU generator; only unseeded sampling takes from it.
        ending_ids: EOS and stop token ids of the request.
        banned_until: position before which ending ids cannot be drawn (prompt length + min_tokens).

    Raises:
        NotADistribution: a row holds NaN or +inf, or no allowed token is possible. Sampling looks only at rows on
            its way, greedy at all.
    """
    proposal = proposal or _NOTHING
    target = _Target(logits[:, :vocab_size], sampling, position, ending_ids, banned_until)
    if sampling.greedy:
        best = greedy_tokens(target.logits)
        return walk_chosen(proposal, lambda node, depth: target.best_token(best, node, depth))
    if sampling.seed is not None:
        seed = sampling.seed
        return walk_chosen(
            proposal, lambda node, depth: shared_choice(target.probs(node, depth), seed, position + depth)
        )
    return walk_sampled(proposal, target.probs, generator)


def walk_chosen(proposal: Proposal, choose: Callable[[int, int], int]) -> Judgement:
    """Follows the tree while it holds the token that `choose(node, depth)` names, whatever was proposed."""

    def verify(node: int, depth: int, children: Iterable[int]) -> tuple[int | None, int]:
        token = choose(node, depth)
        return next((child for child in children if proposal.tokens[child] == token), None), token

    return _walk(proposal, verify)


def walk_sampled(proposal: Proposal, target_row: TargetRow, generator: torch.Generator) -> Judgement:
    """Follows the tree by rejection sampling; `target_row` is asked only for nodes on the way."""

    def verify(node: int, depth: int, children: Iterable[int]) -> tuple[int | None, int]:
        remaining = target_row(node, depth)
        for child in children:
            token, draft = proposal.tokens[child], _draft_probs(proposal, child)
            draft_prob = draft.probs[draft.ids.index(token)] / sum(draft.probs)
            # Strictly below: a token of target probability 0 is rejected even by a uniform of exactly 0.
            if _uniform(generator) * draft_prob < remaining[token].item():
                return child, token
            remaining = residual(remaining, draft)
        return None, int(sample(remaining.unsqueeze(0), generator))

    return _walk(proposal, verify)


def residual(probs: Tensor, draft: SparseProbs) -> Tensor:
    """normalize(max(0, probs - draft_probs)) over the whole vocabulary; `probs` where that is empty.

    Empty means that the two are the same but for rounding, so a rejection had next to no probability and
    `probs` itself is right to go on with. A token the target never draws has probability 0 either way.

    Args:
        probs: float64 [vocab], sum 1.
        draft: the distribution the rejected token was drawn from; its sum is made 1.
    """
    draft_probs = torch.tensor(draft.probs, dtype=torch.float64, device=probs.device) / sum(draft.probs)
    ids = torch.tensor(draft.ids, dtype=torch.int64, device=probs.device)
    left = probs.index_add(0, ids, draft_probs, alpha=-1).clamp_(min=0.0)
    mass = left.sum().item()
    return left / mass if mass > _EMPTY_RESIDUAL else probs


def shared_choice(probs: Tensor, seed: int, position: int, token_ids: Tensor | None = None) -> int:
    """The index that shared noise picks from float64 [n]; one of probability 0 is never picked.

    Args:
        probs: a distribution.
        seed: the request's.
        position: absolute index of the token to pick.
        token_ids: int64 [n], the token of each index, which is what noise is keyed by; None where index is token.
    """
    kept = probs.nonzero().squeeze(-1)
    noise = gumbel(seed, position, kept if token_ids is None else token_ids[kept])
    return int(kept[(probs[kept].log() + noise).argmax()])


def _walk(proposal: Proposal, verify: Verify) -> Judgement:
    """From the root to the first node of which no child is accepted."""
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(index)
    accepted: list[int] = []
    tokens: list[int] = []
    node: int | None = _ROOT
    while node is not None:
        node, token = verify(node, len(accepted), children.get(node, ()))
        tokens.append(token)
        if node is not None:
            accepted.append(node)
    return Judgement(tuple(accepted), tuple(tokens))


def _draft_probs(proposal: Proposal, index: int) -> SparseProbs:
    """What token `index` was drawn from; a deterministic drafter's choice is a point mass."""
    if proposal.draft_probs is None:
        return SparseProbs((proposal.tokens[index],), (1.0,))
    return proposal.draft_probs[index]


def _uniform(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator, dtype=torch.float64).item()
