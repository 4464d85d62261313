"""What the names of modes ask for, and the order that modes take turns in."""

from __future__ import annotations

import pytest

from bench.modes import Mode, family, fixed_k, in_turn, parse_modes
from engine.errors import InvalidArgument

DRAFTERS = ("draft_model", "ngram")


def names(asked: str) -> list[str]:
    return [mode.name for mode in parse_modes(asked, DRAFTERS)]


def test_every_name_asks_for_what_it_says() -> None:
    assert parse_modes("off,auto,ngram,draft_model,sync,sync:4,ahead:5", DRAFTERS) == [
        Mode("off", speculation="off"),
        Mode("auto"),
        Mode("ngram", drafter="ngram"),
        Mode("draft_model", drafter="draft_model"),
        Mode("sync", drafter="draft_model", run_ahead=False),
        Mode("sync:4", drafter="draft_model", num_speculative_tokens=4, run_ahead=False),
        Mode("ahead:5", drafter="draft_model", num_speculative_tokens=5),
    ]


def test_plain_decoding_comes_first_and_every_mode_once() -> None:
    assert names("auto, sync:2-3,sync:3-4,off") == ["off", "auto", "sync:2", "sync:3", "sync:4"]


def test_without_a_list_every_drafter_has_a_mode() -> None:
    assert names("") == ["off", "auto", "draft_model", "ngram"]


@pytest.mark.parametrize(
    "name", ["fast", "", "sync:", "sync:0", "sync:x", "sync:5-3", "sync:1-", "sync:65", "ahead", "auto:3", "ngram:3"]
)
def test_what_is_no_mode_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(
        InvalidArgument, match="allowed is off, auto, draft_model, ngram, sync, sync:K, ahead:K"
    ) as found:
        parse_modes(f"auto,{name}", DRAFTERS)
    assert (found.value.field, found.value.found) == ("modes", name)


@pytest.mark.parametrize("name", ["draft_model", "sync", "sync:3", "ahead:3"])
def test_modes_of_the_draft_model_need_one(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"allowed is off, auto, ngram$"):
        parse_modes(name, ["ngram"])


def test_modes_of_fixed_k_are_told_by_their_name() -> None:
    assert [(family(name), fixed_k(name)) for name in ("sync:12", "ahead:3", "sync", "auto")] == [
        ("sync", 12), ("ahead", 3), ("sync", None), ("auto", None),
    ]  # fmt: skip


def test_each_turn_begins_with_another_one() -> None:
    assert [in_turn("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
