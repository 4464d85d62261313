"""What a configuration names beside itself travels in serveConfigV2 too, and a change of it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments import cli
from deployments.config_file import load_config, parse_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import

SERVER = {"host": "0.0.0.0"}
OWN = "legal: {draft_acceptance: [0.7, 0.6]}\n"


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """An overlay whose classes of requests stand in a file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "own.yaml").write_text(OWN)
    speculation = {"max_draft_tokens": 3, "workloads": str(tmp_path / "own.yaml")}
    (folder / "outrider.yaml").write_text(yaml.safe_dump({"speculation": speculation, "server": SERVER}))
    return folder


def render(overlay: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as exited:
        cli.main(["render", "--overlay", overlay.name, "--overlays", str(overlay.parent), *options])
    return int(exited.value.code or 0)


def test_the_content_of_a_workload_file_travels(overlay: Path) -> None:
    assert render(overlay) == 0
    expected = load_config(overlay / "outrider.yaml").speculation
    (overlay.parent / "own.yaml").unlink()
    patch = yaml.safe_load((overlay / "serve-config.yaml").read_text())
    (application,) = yaml.safe_load(patch["spec"]["serveConfigV2"])["applications"]
    given = application["args"]["config"]
    assert given["speculation"] == {"max_draft_tokens": 3, "workloads": yaml.safe_load(OWN)}
    assert parse_config(given, "config").speculation == expected


def test_a_change_of_the_workload_file_is_one_of_the_overlay(overlay: Path) -> None:
    assert render(overlay) == 0
    assert render(overlay, "--check") == 0
    (overlay.parent / "own.yaml").write_text(OWN.replace("0.6", "0.5"))
    assert render(overlay, "--check") == 1
