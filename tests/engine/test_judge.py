"""The walk: greedy, seeded and sampled verdicts on chains and trees, and the faults that must not come back."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.distributions import target_probs
from engine.judge import Judgement, judge, residual, shared_choice, walk_sampled
from engine.proposal import Proposal, SparseProbs, State
from engine.sampling import SamplingParams

VOCAB = 12
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_for(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=generator(seed))


def verdict(logits: torch.Tensor, proposal: Proposal | None, sampling: SamplingParams, **rest: object) -> Judgement:
    kwargs = {"position": 3, "vocab_size": VOCAB, "generator": generator()} | rest
    return judge(logits, proposal, sampling, **kwargs)


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    size = draw(st.integers(0, 8))
    tokens = tuple(draw(st.integers(0, 3)) for _ in range(size))
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(size))
    return Proposal(State(), tokens, parents)


@given(trees(), st.integers(0, 1000))
def test_greedy_is_the_argmax_walk(proposal: Proposal, seed: int) -> None:
    logits = logits_for(1 + len(proposal.tokens), seed)
    logits[:, 4:] -= 100.0
    node, accepted, tokens = -1, [], []
    while True:
        tokens.append(int(logits[node + 1].argmax()))
        matching = [
            i
            for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True))
            if parent == node and token == tokens[-1]
        ]
        if not matching:
            break
        node = matching[0]
        accepted.append(node)
    assert verdict(logits, proposal, GREEDY) == Judgement(tuple(accepted), tuple(tokens))


@given(st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 1000))
def test_greedy_chains_commit_what_plain_decoding_would(tokens: list[int], seed: int) -> None:
    """Whatever is proposed, the committed tokens are the plain ones; only their number varies."""
    table = logits_for(VOCAB, seed)
    plain = [5]
    for _ in range(8):
        plain.append(int(table[plain[-1]].argmax()))
    judged = verdict(table[[5, *tokens]], Proposal.chain(State(), tokens), GREEDY)
    assert list(judged.tokens) == plain[1 : 1 + len(judged.tokens)]
    assert judged.accepted == tuple(range(len(judged.tokens) - 1))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.8, seed=4)])
@pytest.mark.parametrize("proposal", [None, Proposal(State())])
def test_without_tokens_it_is_plain_decoding(sampling: SamplingParams, proposal: Proposal | None) -> None:
    judged = verdict(logits_for(1), proposal, sampling)
    assert judged.accepted == ()
    assert len(judged.tokens) == 1


def test_greedy_goes_on_below_the_second_sibling() -> None:
    logits = torch.full((5, VOCAB), 0.0)
    logits[0, 2] = logits[2, 7] = logits[4, 9] = 1.0
    proposal = Proposal(State(), (1, 2, 7, 7), (-1, -1, 0, 1))
    assert verdict(logits, proposal, GREEDY) == Judgement((1, 3), (2, 7, 9))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.8, seed=4)])
def test_padded_ids_are_never_drawn(sampling: SamplingParams) -> None:
    logits = torch.cat((logits_for(4), torch.full((4, 4), 50.0)), dim=1)
    for seed in range(20):
        judged = verdict(logits, Proposal.chain(State(), (1, 2, 3)), sampling, generator=generator(seed))
        assert max(judged.tokens) < VOCAB


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.8, seed=4)])
def test_ending_ids_cannot_come_before_min_tokens(sampling: SamplingParams) -> None:
    """Positions 3 and 4 are banned, 5 is not: a proposal of the ending id stands from there on only."""
    logits = torch.zeros(4, VOCAB)
    logits[:, 6] = 100.0
    logits[:, 2] = 60.0
    rules = {"ending_ids": frozenset({6}), "banned_until": 5}
    assert verdict(logits[:2], Proposal.chain(State(), (6,)), sampling, **rules).tokens == (2,)
    judged = verdict(logits, Proposal.chain(State(), (2, 2, 6)), sampling, **rules)
    assert judged == Judgement((0, 1, 2), (2, 2, 6, 6))


def test_greedy_prefers_the_lower_id_on_a_tie() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    assert verdict(logits, None, GREEDY).tokens == (0,)


@given(st.data())
def test_seeded_output_does_not_depend_on_the_proposal(data: st.DataObject) -> None:
    """Any drafter, any K, chain or tree: the sequence is the one that plain decoding gives."""
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    sampling = SamplingParams(temperature=1.0, top_k=4, seed=seed)
    table = logits_for(VOCAB, data.draw(st.integers(0, 50)))
    table[:, 4:] -= 100.0
    prompt = [5, 1]

    def decode(proposals: bool) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < 10:
            proposal = data.draw(trees()) if proposals else Proposal(State())
            rows = table[[tokens[-1], *proposal.tokens]]
            tokens += verdict(rows, proposal, sampling, position=len(tokens)).tokens
        return tokens[:10]

    assert decode(True) == decode(False)


def test_seeded_draft_with_the_same_noise_is_accepted_whole() -> None:
    table = logits_for(VOCAB)
    sampling = SamplingParams(temperature=1.0, seed=9)
    tokens = [0]
    for position in range(3, 8):
        tokens.append(shared_choice(target_probs(table[tokens[-1:]], sampling)[0], 9, position))
    judged = verdict(table[tokens], Proposal.chain(State(), tokens[1:]), sampling)
    assert judged.accepted == (0, 1, 2, 3, 4)


def test_rows_off_the_path_are_never_computed() -> None:
    asked: list[tuple[int, int]] = []

    def row(node: int, depth: int) -> torch.Tensor:
        asked.append((node, depth))
        return torch.eye(VOCAB, dtype=torch.float64)[4]

    proposal = Proposal(State(), (1, 4, 1, 4), (-1, -1, 0, 1))
    assert walk_sampled(proposal, row, generator()) == Judgement((1, 3), (4, 4, 4))
    assert asked == [(-1, 0), (1, 1), (3, 2)]


def test_the_bonus_token_is_sampled() -> None:
    """First published fault: an argmax in place of a draw after full acceptance."""
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = 100.0
    proposal = Proposal.chain(State(), (3,))
    source = generator()
    bonus = {verdict(logits, proposal, SAMPLED, generator=source).tokens[1] for _ in range(400)}
    assert bonus == set(range(VOCAB))


def test_the_residual_takes_the_draft_off_the_whole_vocabulary() -> None:
    """Second published fault: subtracting the draft probability of the rejected token only."""
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    draft = SparseProbs((0, 1, 3), (0.2, 0.3, 0.5))
    torch.testing.assert_close(
        residual(probs, draft), torch.tensor([0.6, 0.0, 0.4, 0.0], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_an_empty_residual_goes_back_to_the_target() -> None:
    """Third published fault: emitting the token that was just rejected when nothing remains."""
    probs = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    assert residual(probs, SparseProbs((0, 1), (0.25, 0.75))) is probs
    almost = SparseProbs((0, 1, 2), (0.25, 0.75, 1e-14))
    for seed in range(50):
        proposal = Proposal.chain(State(), (2,), draft_probs=(almost,))
        judged = walk_sampled(proposal, lambda node, depth: probs, generator(seed))
        assert judged.accepted == ()
        assert judged.tokens[0] in (0, 1)


@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from(["drawn", "fixed"]))
def test_siblings_bring_back_the_target_exactly(seed: int, num_siblings: int, kind: str) -> None:
    """Sum over all outcomes of the multi-round rule, not a sample of them: equal to the target within 1e-12."""
    rng = random.Random(seed)

    def distribution(size: int) -> torch.Tensor:
        weights = torch.tensor([rng.choice((0.0, rng.random(), rng.random() ** 6)) for _ in range(size)])
        weights[rng.randrange(size)] += 0.1
        return (weights / weights.sum()).double()

    target = distribution(6) / 1.0
    target /= target.sum()
    output, remaining, reach = torch.zeros(6, dtype=torch.float64), target, 1.0
    for _ in range(num_siblings):
        draft = distribution(6) if kind == "drawn" else torch.eye(6, dtype=torch.float64)[rng.randrange(6)]
        draft /= draft.sum()
        accepted = torch.minimum(remaining, draft)
        output += reach * accepted
        reach *= 1.0 - accepted.sum().item()
        remaining = residual(remaining, SparseProbs(tuple(range(6)), tuple(draft.tolist())))
    output += reach * remaining
    torch.testing.assert_close(output, target, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.8, top_k=3, seed=4)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_logits_are_an_error_in_words(sampling: SamplingParams, poison: float) -> None:
    logits = logits_for(1)
    logits[0, 5] = poison
    with pytest.raises(RuntimeError, match="not finite"):
        verdict(logits, None, sampling)


def test_inputs_are_left_as_they_were() -> None:
    logits = logits_for(4)
    before = logits.clone()
    proposal = Proposal.chain(State(), (1, 2, 3))
    for sampling in (GREEDY, SAMPLED, SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)):
        verdict(logits, proposal, sampling, ending_ids=(0, 1), banned_until=9)
    assert torch.equal(logits, before)
