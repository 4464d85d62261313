"""The workload file: what it leads to, and that every fault names file, class and field."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from deployments.config_file import ConfigError, parse_config
from deployments.router_settings import router_config
from deployments.workloads import PACKAGED, read_workloads
from router.acceptance import DRAFT_MODEL, AcceptancePriors, SessionAcceptance

DRAFT_COST = 0.11  # of a verification, a token: what the packaged file says its numbers are for

MATRIX = {
    "code": (5, 6),
    "sql": (5, 6),
    "tool_call": (4, 5),
    "reasoning": (3, 4),
    "chat": (2, 3),
    "creative": (1, 2),
}


@pytest.mark.parametrize("name", MATRIX)
def test_the_packaged_numbers_lead_to_the_k_of_the_matrix(name: str) -> None:
    priors = AcceptancePriors({each: workload.draft_acceptance for each, workload in read_workloads(PACKAGED).items()})
    accepted = SessionAcceptance(priors, name).arm(DRAFT_MODEL).expected_lengths(16)
    speeds = [(1.0 + tokens) / (1.0 + DRAFT_COST * size) for size, tokens in enumerate(accepted, start=1)]
    least, most = MATRIX[name]
    assert least <= 1 + speeds.index(max(speeds)) <= most


def test_the_packaged_file_has_the_classes_of_the_matrix() -> None:
    assert set(read_workloads(PACKAGED)) == set(MATRIX)
    assert set(router_config(parse_config({}, "test")).sessions.workloads) == set(MATRIX)


def test_a_file_of_ones_own_takes_the_place_of_the_packaged_one_and_travels_with_the_configuration(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("legal: {draft_acceptance: [0.7, 0.6]}\n")
    config = parse_config({"speculation": {"workloads": str(path)}}, "test")
    path.unlink()
    assert router_config(pickle.loads(pickle.dumps(config))).sessions.workloads == {"legal": (0.7, 0.6)}


def test_an_empty_file_has_no_classes(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# none\n")
    config = parse_config({"speculation": {"workloads": str(path)}}, "test")
    assert router_config(config).sessions.workloads == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("code: {draft_acceptance: [0.8, 1.2]}", "code.draft_acceptance.1: input should be less than or equal to 1"),
        ("code: {draft_acceptance: []}", "code.draft_acceptance: tuple should have at least 1 item"),
        ("code: {}", "code.draft_acceptance: field required"),
        ("code: {draft_aceptance: [0.8]}", "code.draft_aceptance: unknown key; did you mean `draft_acceptance`?"),
        ("code: 0.8", "code: input should be a valid dictionary"),
        ("- code", "input should be a valid dictionary"),
        ("code: [", "not YAML: "),
    ],
)
def test_a_fault_names_file_class_and_field(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_config({"speculation": {"workloads": str(path)}}, "test")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: {expected}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        parse_config({"speculation": {"workloads": str(tmp_path / "nowhere.yaml")}}, "test")


def test_what_a_file_would_hold_may_stand_in_its_place() -> None:
    config = parse_config({"speculation": {"workloads": {"legal": {"draft_acceptance": [0.7, 1]}}}}, "test")
    assert router_config(config).sessions.workloads == {"legal": (0.7, 1.0)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, "speculation.workloads: give the path of a file, or its content, found 7"),
        (["code"], "speculation.workloads: give the path of a file, or its content, found ['code']"),
        ({"code": 0.8}, "speculation.workloads.code: input should be a valid dictionary"),
        ({"code": {"draft_acceptance": [2]}}, "speculation.workloads.code.draft_acceptance.0: input should be less"),
        (
            {"code": {"draft_aceptance": [0.8]}},
            "speculation.workloads.code.draft_aceptance: unknown key; did you mean `draft_acceptance`?",
        ),
    ],
)
def test_what_is_neither_a_path_nor_its_content_is_refused(given: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"speculation": {"workloads": given}}, "test")
    assert str(caught.value).startswith(f"test: {expected}")
