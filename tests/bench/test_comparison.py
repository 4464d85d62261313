"""How samples become rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.comparison import Sample, differing, short_of_k, summarize
from bench.counts import Counts
from bench.plot import draw


def sample(
    prompt_id: str, kind: str, mode: str, num_tokens: int, decode_s: float, counts: Counts | None = None
) -> Sample:
    counts = Counts(rounds=num_tokens - 1) if counts is None else counts
    return Sample(prompt_id, kind, mode, tuple(range(num_tokens)), decode_s, counts)


def drafting(rounds: int, *positions: tuple[int, int], **rest: int) -> Counts:
    """Counts of `rounds` rounds in which so many tokens were drafted and accepted at each position."""
    drafted, accepted = zip(*positions, strict=True)
    return Counts(
        rounds, sum(drafted), sum(accepted), **rest, drafted_per_position=drafted, accepted_per_position=accepted
    )


def test_speed_is_all_tokens_over_all_seconds() -> None:
    rows = summarize(
        [
            sample("a", "code", "off", 101, 10.0),
            sample("b", "code", "off", 11, 1.0),
            sample("a", "code", "auto", 101, 4.0, drafting(40, (40, 35), (40, 25), rounds_ahead=30, early_hits=24)),
            sample("b", "code", "auto", 11, 1.0, drafting(10, (10, 0), (10, 0), rounds_ahead=10, early_hits=6)),
        ]
    )
    plain, auto = rows
    assert plain.speedup == 1.0
    assert auto.tokens_per_s == pytest.approx(22.0)
    assert auto.speedup == pytest.approx(2.2)
    assert (auto.speedup_p10, auto.speedup_p90) == pytest.approx((1.0, 2.5))
    assert auto.acceptance_rate == 0.6
    assert auto.mean_acceptance_length == pytest.approx(110 / 50)
    assert auto.acceptance_by_position == (0.7, 0.5)
    assert auto.hit_rate == 0.75


def test_classes_come_in_order_and_then_all_together() -> None:
    rows = summarize([sample(kind, kind, mode, 3, 1.0) for mode in ("off", "auto") for kind in ("tool", "code")])
    assert [(row.kind, row.mode) for row in rows] == [
        ("tool", "off"), ("tool", "auto"), ("code", "off"), ("code", "auto"), ("all", "off"), ("all", "auto"),
    ]  # fmt: skip
    assert rows[-1].num_prompts == 2


@pytest.mark.parametrize(
    ("tokens", "plain", "expected"), [([1, 2, 3], [1, 2, 3], 0), ([1, 9, 3], [1, 2, 3], 1), ([1], [1, 2, 3], 2)]
)
def test_differing_counts_positions_and_missing_tokens(tokens: list[int], plain: list[int], expected: int) -> None:
    assert differing(tokens, plain) == expected


def test_counts_of_requests_with_proposals_of_different_length_add_up_by_position() -> None:
    total = Counts.total([drafting(4, (4, 3)), drafting(5, (5, 2), (3, 1)), Counts(rounds=1)])
    assert (total.rounds, total.draft_tokens, total.accepted_tokens) == (10, 12, 6)
    assert (total.drafted_per_position, total.accepted_per_position) == ((9, 3), (5, 1))
    assert total.draft_tokens_per_round == 1.2
    assert Counts.total([]) == Counts()
    assert (Counts().acceptance_rate, Counts().hit_rate, Counts().wasted_per_accepted) == (0.0, 0.0, 0.0)


def test_a_fixed_k_that_the_server_does_not_allow_is_told() -> None:
    samples = [
        sample("a", "code", mode, 11, 1.0, drafting(5, (5, 4), (5, 3)))
        for mode in ("sync:2", "sync:3", "ahead:4", "auto")
    ]
    assert short_of_k(samples) == [f"{mode}: no round had more than 2 draft tokens" for mode in ("sync:3", "ahead:4")]


@pytest.mark.parametrize(
    ("modes", "files"),
    [
        (("off", "auto", "ngram"), ["speed.png"]),
        (("off", "auto", "sync:1", "sync:2", "ahead:2"), ["speed.png", "speed-k.png", "speed-acceptance.png"]),
    ],
)
def test_pictures_are_png_and_those_over_k_need_modes_of_fixed_k(
    modes: tuple[str, ...], files: list[str], tmp_path: Path
) -> None:
    samples = [
        sample(kind, kind, mode, 11, 1.0 if mode == "off" else 0.5, drafting(5, (5, 4), (5, 2)))
        for kind in ("code", "tool")
        for mode in modes
    ]
    written = draw([row.mark() for row in summarize(samples)], tmp_path / "speed.png")
    assert [path.name for path in written] == files
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
