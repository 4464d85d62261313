"""`outrider simulate` as a person uses it: tables, JSON, pictures, and what it says to a wrong option."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments import cli

PROFILE = str(Path(__file__).parents[3] / "bench" / "profiles" / "70b-1b.yaml")
NAMED = ("--target", "llama-3-70b", "--gpu", "h100-80gb", "--tensor-parallel", "4", "--draft", "llama-3.2-1b")
Simulate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Runs the command as a shell with 80 columns would: status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main(["simulate", *arguments])
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


def test_everything_fits_80_columns_and_says_what_it_is(simulate: Simulate) -> None:
    status, out, err = simulate(*NAMED, "--draft-gpu", "l40s", "--sessions", "1,8,64,128")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert text.startswith("A model, not a measurement. It leaves out")
    for part in (
        "Forwards, ms",
        "Memory of each GPU",
        "Best K and speed",
        "Drawn, 1000 replies",
        "Workloads",
        "Assumed",
    ):
        assert part in text
    assert "creative .40/.38/.36" in text


def test_json_has_all_of_it(simulate: Simulate) -> None:
    status, out, _ = simulate(*NAMED, "--json", "--assume", "wait_s=0.003", "--acceptance", "0.9,0.7")
    content = json.loads(out)
    assert status == 0
    assert content["simulated"] is True
    assert content["assumptions"]["wait_s"] == 0.003
    assert content["acceptance"] == [0.9, 0.7]
    assert [load["num_sessions"] for load in content["loads"]] == [1, 8, 64]
    assert [plan["model"] for plan in content["memory"]] == ["llama-3-70b", "llama-3.2-1b"]
    assert {row["workload"] for row in content["workloads"]} >= {"code", "creative"}
    first = content["forwards"][0]
    parts = sum(first[name] for name in ("memory_s", "launch_s", "communication_s"))
    assert first["plain_s"] == pytest.approx(parts)


def test_a_profile_has_times_and_acceptance_of_its_own(simulate: Simulate) -> None:
    status, out, _ = simulate("--profile", PROFILE, "--json", "--sessions", "1")
    content = json.loads(out)
    assert (status, content["memory"], content["acceptance"]) == (0, [], [0.8])
    assert content["assumptions"]["recall"] == 0.95
    assert content["forwards"][0]["plain_s"] == pytest.approx(0.0183)


def test_classes_come_from_the_workload_file(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("forms: {draft_acceptance: [0.95]}\nverse: {draft_acceptance: [0.01]}\n")
    _, out, _ = simulate("--profile", PROFILE, "--workloads", str(path), "--sessions", "8", "--assume", "in_time=0")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("forms", "verse"))}
    assert rows["verse"] == [".01", "off", "1.00", "off", "1.00"]
    assert float(rows["forms"][2]) > 1.5


def test_a_matrix_of_many_loads_has_one_title(simulate: Simulate) -> None:
    _, out, _ = simulate("--profile", PROFILE, "--sessions", "1,2,4,8,16")
    assert out.count("Workloads: ") == 1
    assert out.count("\nclass ") == 2
    assert "8 wait 8 ahead" in " ".join(out.split())


def test_a_best_k_that_is_only_the_largest_allowed_is_called_so(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("verse: {draft_acceptance: [0.01]}\n")
    usual = ("--profile", PROFILE, "--workloads", str(path), "--sessions", "1", "--assume", "in_time=0")
    said = {}
    for cap in ("2", "20"):
        _, out, _ = simulate(*usual, "--max-draft-tokens", cap)
        said[cap] = [line for line in out.splitlines() if "--max-draft-tokens" in line]
    assert said == {"2": ["K 2 is the most that --max-draft-tokens allows here; more may be better"], "20": []}
    _, out, _ = simulate(*usual, "--acceptance", "0.01", "--max-draft-tokens", "1")
    assert "--max-draft-tokens" not in out


def test_pictures_are_drawn(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    status, _, err = simulate("--profile", PROFILE, "--sessions", "1,8", "--plot", str(path))
    assert (status, err.count("drew ")) == (0, 2)
    for written in (path, tmp_path / "out-map.png"):
        assert written.read_bytes().startswith(b"\x89PNG")


def test_too_little_memory_is_said_with_what_would_do(simulate: Simulate) -> None:
    _, out, _ = simulate(*NAMED, "--draft-gpu", "a100-40gb-1g.5gb")
    assert "llama-3.2-1b does not fit; what would: 29 sessions of this context or a context of 960 tokens" in " ".join(
        out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "give --target, --gpu and --draft, or a --profile"),
        (("--target", "llama-3-8b"), 2, "--target, --gpu and --draft go together; --gpu and --draft not given"),
        (("--target", "llama-4", "--gpu", "h100-80gb"), 1, "--target: found 'llama-4'"),
        (("--draft-gpu", "tpu"), 1, "--draft-gpu: found 'tpu'"),
        (
            (*NAMED[:-1], "qwen2.5-0.5b"),
            1,
            "--draft: found 'qwen2.5-0.5b', allowed is a model with the vocabulary of llama-3-70b: llama-3-8b, ",
        ),
        (("--gpu", "h100-80gb", "--target", "llama-4", "--draft", "llama-3.2-1b"), 1, "--target: found 'llama-4'"),
        ((*NAMED, "--draft-gpu", "tpu"), 1, "--draft-gpu: found 'tpu', allowed is h100-80gb"),
        ((*NAMED, "--context", "9000"), 1, "--context: found 9000, allowed is at most 8192 with llama-3-70b"),
        ((*NAMED, "--tensor-parallel", "5"), 1, "target.tensor_parallel_size: found 5"),
        ((*NAMED, "--acceptance", "0.8,1.2"), 2, "found '0.8,1.2', allowed is one number from 0 to 1"),
        ((*NAMED, "--sessions", "0"), 2, "found '0', allowed are numbers from 1 on"),
        ((*NAMED, "--assume", "x=1"), 1, "--assume: found 'x=1'"),
        ((*NAMED, "--plot", "/nowhere/out.png"), 2, "'--plot': found /nowhere/out.png, allowed is a .png file in a"),
        ((*NAMED, "--plot", "out.svg"), 2, "'--plot': found out.svg, allowed is a .png file in a folder that exists"),
        (("--target", "llama-4", "--plot", "out"), 2, "'--plot': found out, allowed is a .png file"),
        (("--profile", "demo"), 2, "demo has no section `emulation`"),
    ],
)
def test_a_wrong_option_is_one_line(simulate: Simulate, arguments: tuple[str, ...], status: int, message: str) -> None:
    found, out, err = simulate(*arguments)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert message in err


def test_two_runs_say_the_same(simulate: Simulate) -> None:
    first, second = (simulate("--profile", PROFILE, "--json", "--sessions", "8")[1] for _ in range(2))
    assert first == second


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, bench.simulation.report, bench.simulation.plot; "
        "sys.exit(', '.join({'torch', 'ray', 'transformers', 'matplotlib'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
