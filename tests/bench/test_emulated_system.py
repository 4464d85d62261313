"""`outrider bench --emulate` on a whole system: Ray, gRPC, router and engines are real, and every token is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments import cli

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

PROFILE = Path(__file__).parents[2] / "bench" / "profiles" / "70b-1b.yaml"
MODES = ["off", "sync:3", "draft_model"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Runs the command as a shell would, to its end, and reads the JSON object it prints."""
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", "--emulate", str(PROFILE), "--json", *arguments])
    captured = capsys.readouterr()
    assert exited.value.code == 0, captured.err
    content: dict[str, Any] = json.loads(captured.out)
    return content


def test_every_mode_at_every_load_writes_the_reference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quick = ("--dilation", "0.2", "--sessions", "2,1", "--tokens", "24", "--repeats", "1", "--rtt", "0.002")
    content = bench(capsys, *quick, "--modes", ",".join(MODES), "--plot", str(tmp_path / "speed.png"))
    assert (content["emulated"], content["profile"], content["dilation"]) == (True, "70b-1b", 0.2)
    assert (content["target"]["rtt_s"], content["draft"]["rtt_s"]) == (0.0, 0.002)
    rows = content["rows"]
    assert [(row["num_sessions"], row["mode"]) for row in rows] == [(n, mode) for n in (2, 1) for mode in MODES]
    for row, run in zip(rows, content["runs"], strict=True):
        assert row["wrong_tokens"] == 0
        assert run["decoded_tokens"] == row["num_sessions"] * 23
        assert run["forwards"] > 0
        assert 0.0 <= row["bubble"] < 1.0
        assert set(row["cpu_us"]) >= {"router", "target", "draft", "client"}
        counts = run["counts"]
        if row["mode"] == "off":
            assert counts["draft_tokens"] == 0
        if row["mode"] == "sync:3":
            assert 1 <= len(counts["drafted_per_position"]) <= 3
        if row["mode"] != "draft_model":
            assert counts["rounds_ahead"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed-acceptance.png", "speed-k.png", "speed.png"]
