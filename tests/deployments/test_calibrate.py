"""What `outrider calibrate` writes can be read by all that read such files, and what it cannot measure it refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.calibration import Calibration, Ranks
from bench.emulation import DeviceTimes
from bench.prompts import Prompt
from bench.simulation.speedup import waiting
from deployments import calibrated, cli
from deployments.commands import calibrate as command
from deployments.commands.calibrate import Measured, plan_of
from deployments.config import OutriderConfig
from deployments.config_file import load_config, parse_config
from deployments.router_settings import router_config
from deployments.workloads import read_workloads
from engine.info import EngineInfo
from router.costs import CostModel

Cli = Callable[..., tuple[int, str, str]]

INFO = EngineInfo(
    model="model",
    vocab_size=512,
    max_context_length=4096,
    eos_token_ids=(2,),
    max_proposal_tokens=7,
    num_blocks=2048,
    free_blocks=2047,
    block_size=16,
    running_sessions=0,
)
CALIBRATION = Calibration(
    target=DeviceTimes(step_s=0.045, row_share=0.001, prompt_row_share=0.03, context_token_s=3e-6),
    draft=DeviceTimes(step_s=0.003, row_share=0.02),
    acceptance={"code": (0.6, 0.5), "tool": (0.7,), "all": (0.65, 0.55)},
    ranks=Ranks(60, 20, 100),
    wait_s=0.0031,
    gap_s=0.0015,
    hit_rate=0.52,
    context=240,
    max_draft_tokens=7,
)


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command as a shell would: status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


def test_the_files_are_read_as_what_was_written(tmp_path: Path) -> None:
    config = load_config("demo")
    profile, workloads = calibrated.write(tmp_path, "a pair.", CALIBRATION, config, (INFO, INFO))
    read = load_config(profile)
    assert read.emulation == CALIBRATION.emulation
    assert read.target.reproducible == config.target.reproducible
    assert read.target.kv_cache.num_blocks == 2048
    expected = {"code": (0.6, 0.5), "tool": (0.7,)}
    assert {name: each.draft_acceptance for name, each in read_workloads(workloads).items()} == expected
    assert read.speculation.workloads == read_workloads(workloads)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_the_policy_begins_with_the_rounds_that_were_measured(tmp_path: Path, size: int) -> None:
    config = load_config("demo")
    profile, _ = calibrated.write(tmp_path, "a pair.", CALIBRATION, config, (INFO, INFO))
    section = yaml.safe_load(profile.read_text())["speculation"]
    mine = {"speculation": {name: section[name] for name in ("costs", "workloads")}}
    sessions = router_config(parse_config(mine, "mine")).sessions
    load = CALIBRATION.setup().load(1)
    measured_s = waiting(load, CALIBRATION.rates, size).round_s
    assert CostModel(sessions.costs).drafted_round_s(size, size) == pytest.approx(measured_s, rel=0.01)
    assert sessions.workloads == {"code": (0.6, 0.5), "tool": (0.7,)}


def test_without_classes_all_prompts_are_one() -> None:
    assert calibrated.workloads_of(replace(CALIBRATION, acceptance={"all": (0.5,)})) == {
        "all": {"draft_acceptance": [0.5]}
    }


def test_the_simulator_takes_what_it_is_handed(tmp_path: Path, outrider: Cli) -> None:
    calibrated.write(tmp_path, "a pair.", CALIBRATION, load_config("demo"), (INFO, INFO))
    _, *arguments = shlex.split(calibrated.simulate_command(tmp_path, CALIBRATION))
    status, out, err = outrider(*arguments, "--sessions", "1", "--json")
    assert (status, err) == (0, "")
    best = max(waiting(CALIBRATION.setup().load(1), CALIBRATION.rates, size).speedup for size in range(1, 8))
    (load,) = json.loads(out)["loads"]
    assert load["waiting"]["speedup"] == pytest.approx(best, rel=1e-3)


def test_what_is_timed_has_room() -> None:
    plan = plan_of(load_config("demo"), (INFO, INFO), (8, 1024, 3))
    assert (plan.rows, plan.sessions, plan.contexts) == ((1, 2, 4, 8), (1, 2, 4, 8), (64, 1024))
    assert (plan.prompt_rows, plan.num_drafted) == ((64, 256), 4)
    small = replace(INFO, num_blocks=160, max_context_length=1024)
    plan = plan_of(load_config("demo"), (INFO, small), (8, 2048, 3))
    assert (plan.sessions, plan.contexts) == ((1, 2), (64, 896))


def test_the_command_writes_and_says_what_to_do_next(
    outrider: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.bench.test_calibration import DRAFT, TARGET, Devices, samples, timed

    def measure(config: OutriderConfig, prompts: list[Prompt], size: tuple[int, int, int]) -> Measured:
        assert (len(prompts), size) == (1, (4, 1024, 3))
        return Measured((INFO, INFO), Devices(timed(TARGET), timed(DRAFT), 0.001), samples(), Ranks(6, 2, 10), 500.0)

    monkeypatch.setattr(command, "_measure", measure)
    monkeypatch.setenv("COLUMNS", "80")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "class": "code", "prompt": "x"}\n{"id": "b", "class": "code", "prompt": "y"}\n')
    folder = tmp_path / "new" / "out"
    arguments = ("--prompts", str(prompts), "--limit", "1", "--sessions", "4", "--out", str(folder))
    status, out, _ = outrider("calibrate", *arguments)
    assert status == 0
    tables, _, following = out.partition("next: ")
    assert max(map(len, tables.splitlines())) <= 80
    assert following.startswith(f"outrider simulate --profile {folder}/profile.yaml")
    assert {path.name for path in folder.iterdir()} == {
        "profile.yaml", "workloads.yaml", "speed.png", "speed-k.png", "speed-acceptance.png"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [("draft: {enabled: false}", "has no draft model of its own"), ("speculation: {drafters: [ngram]}", "no draft")],
)
def test_a_system_without_a_draft_is_not_measured(outrider: Cli, tmp_path: Path, content: str, said: str) -> None:
    (config := tmp_path / "c.yaml").write_text(content)
    (prompts := tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    status, _, err = outrider("calibrate", "--prompts", str(prompts), "--config", str(config))
    assert (status, err.count("\n")) == (2, 1)
    assert said in err


def test_a_file_that_holds_no_prompts_is_named(outrider: Cli, tmp_path: Path) -> None:
    (prompts := tmp_path / "p.jsonl").write_text("")
    status, _, err = outrider("calibrate", "--prompts", str(prompts))
    assert status == 1
    assert str(prompts) in err


def test_a_profile_is_a_configuration_whatever_the_pair(tmp_path: Path) -> None:
    nothing = replace(CALIBRATION, acceptance={}, ranks=Ranks(), hit_rate=None)
    content = calibrated.profile_of(nothing, load_config("demo"), (INFO, INFO))
    assert parse_config(content, "made").emulation == nothing.emulation
    assert "--hit-rate" not in calibrated.simulate_command(tmp_path, nothing)
