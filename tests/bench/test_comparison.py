"""How samples become rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.comparison import Sample, differing, summarize
from bench.plot import draw_speedups


def sample(prompt_id: str, kind: str, mode: str, num_tokens: int, decode_s: float, **rest: int) -> Sample:
    counts = {"drafted": 0, "accepted": 0, "rounds": num_tokens - 1, **rest}
    return Sample(prompt_id, kind, mode, tuple(range(num_tokens)), decode_s, **counts)


def test_speed_is_all_tokens_over_all_seconds() -> None:
    rows = summarize(
        [
            sample("a", "code", "off", 101, 10.0),
            sample("b", "code", "off", 11, 1.0),
            sample("a", "code", "auto", 101, 4.0, drafted=80, accepted=60, rounds=40),
            sample("b", "code", "auto", 11, 1.0, drafted=20, accepted=0, rounds=10),
        ]
    )
    plain, auto = rows
    assert plain.speedup == 1.0
    assert auto.tokens_per_s == pytest.approx(22.0)
    assert auto.speedup == pytest.approx(2.2)
    assert (auto.speedup_p10, auto.speedup_p90) == pytest.approx((1.0, 2.5))
    assert auto.acceptance_rate == 0.6
    assert auto.mean_acceptance_length == pytest.approx(110 / 50)


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


def test_the_picture_is_a_png_with_a_bar_for_each_mode(tmp_path: Path) -> None:
    samples = [
        Sample(f"p{n}", kind, mode, tuple(range(11)), 1.0 if mode == "off" else 0.5, 20, 10, 5)
        for n, kind in enumerate(("code", "tool"))
        for mode in ("off", "auto", "ngram")
    ]
    draw_speedups(summarize(samples), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
