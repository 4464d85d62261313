"""The grid that the policy is held against fixed K on: its cells and systems, what runs come to, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.counts import Counts
from bench.emulated_runs import Run
from bench.emulation import DeviceTimes, Emulation
from bench.grid import Alpha, Cell, Grid, Outcome, in_order, summarize_cell, tokens_of, usual_dilation, verdict
from bench.grid_plot import draw_grid
from bench.modes import Mode, fixed_k
from deployments import cli
from deployments.commands import bench_grid
from deployments.commands.bench_emulated import Demand, Profile
from engine.errors import Unavailable

TARGET = DeviceTimes(step_s=0.02, row_share=0.01)
BASE = Emulation(target=TARGET, draft=TARGET)
PROFILE = str(Path(__file__).parents[2] / "bench" / "profiles" / "70b-1b.yaml")
CELL = Cell(1, Alpha(0.8), 0.0, 4.0, 64)


def run(mode: str, decode_s: float, repeat: int = 0, num_sessions: int = 1, **rest: Any) -> Run:
    """100 tokens in 50 rounds."""
    counts = Counts(rounds=50, draft_tokens=50 * (fixed_k(mode) or 0))
    given = {"counts": counts, "wrong_tokens": 0, "reasons": (), **rest}
    return Run(
        num_sessions, mode, repeat, 100, decode_s, 64.0, forward_s=1.0, bubble_s=0.0, forwards=50, router_ms=0.1,
        cpu_s={"router": 0.0}, **given,
    )  # fmt: skip


def outcome(cell: Cell, auto_s: float, fixed_s: float) -> Outcome:
    """Plain decoding takes 8 s."""
    return summarize_cell(cell, [run("off", 8.0), run("auto", auto_s), run("ahead:3", fixed_s)], TARGET)


def test_many_sessions_are_dilated_more_and_write_less() -> None:
    assert [usual_dilation(number) for number in (1, 32, 64, 128)] == [4.0, 4.0, 4.0, 8.0]
    assert [tokens_of(number, 96) for number in (1, 32, 64, 128, 1000)] == [96, 96, 48, 24, 16]
    assert tokens_of(128, 8) == 8


def test_alphas_and_dilations_have_a_system_each_and_all_else_shares_one() -> None:
    grid = Grid(((1, 4.0), (8, 4.0), (128, 16.0)), (Alpha(0.3), Alpha(0.8, 0.1)), (0.0, 0.8), 64)
    systems = grid.systems(BASE)
    assert [
        (devices.alpha, devices.alpha_changes, devices.dilation, [cell.num_sessions for cell in cells])
        for devices, cells in systems
    ] == [
        (0.3, {}, 4.0, [1, 1, 8, 8]),
        (0.3, {}, 16.0, [128, 128]),
        (0.8, {40: 0.1}, 4.0, [1, 1, 8, 8]),
        (0.8, {16: 0.1}, 16.0, [128, 128]),
    ]
    measured = [cell for _, cells in systems for cell in cells]
    assert sorted(measured, key=grid.cells().index) == grid.cells()
    assert [(cell.num_sessions, str(cell.alpha), cell.temperature) for cell in grid.cells()[:5]] == [
        (1, "0.3", 0.0), (1, "0.3", 0.8), (1, "0.8→0.1", 0.0), (1, "0.8→0.1", 0.8), (8, "0.3", 0.0),
    ]  # fmt: skip


def test_the_best_fixed_mode_is_picked_in_hindsight_and_compared_within_repeats() -> None:
    runs = [
        run("off", 8.0, 0), run("auto", 4.2, 0, reasons=("load",)), run("ahead:3", 4.0, 0), run("sync:2", 2.0, 0),
        run("off", 8.0, 1), run("auto", 4.0, 1), run("ahead:3", 4.4, 1), run("sync:2", 8.0, 1),
        run("off", 4.0, 2), run("auto", 2.0, 2), run("ahead:3", 1.8, 2), run("sync:2", 4.0, 2),
    ]  # fmt: skip
    found = summarize_cell(CELL, runs, TARGET)
    assert (found.best, found.best_to_plain, found.auto_to_plain) == ("ahead:3", 2.0, 2.0)
    assert (found.auto_to_best_min, found.auto_to_best, found.auto_to_best_max) == pytest.approx(
        (1.8 / 2.0, 4.0 / 4.2, 4.4 / 4.0)
    )
    assert (found.reasons, found.wrong_tokens) == (("load",), 0)
    assert not found.loses_to_best
    assert [row.mode for row in found.rows] == ["off", "auto", "ahead:3", "sync:2"]


def test_where_no_k_pays_the_best_fixed_mode_is_plain_decoding() -> None:
    found = outcome(CELL, auto_s=8.0 / 0.97, fixed_s=10.0)
    assert (found.best, found.best_to_plain) == ("off", 1.0)
    assert found.auto_to_best == pytest.approx(0.97)
    assert (found.loses_to_plain, found.loses_to_best) == (True, False)


def test_modes_that_leave_k_open_are_no_candidates() -> None:
    found = summarize_cell(CELL, [run("off", 8.0), run("auto", 4.0), run("draft_model", 2.0)], TARGET)
    assert found.best == "off"


def test_wrong_tokens_are_those_of_all_modes_and_unknown_where_sampled() -> None:
    runs = [run("off", 8.0, wrong_tokens=1), run("auto", 4.0, wrong_tokens=2)]
    assert summarize_cell(CELL, runs, TARGET).wrong_tokens == 3
    assert summarize_cell(CELL, [*runs, run("ahead:1", 4.0, wrong_tokens=None)], TARGET).wrong_tokens is None


def test_the_verdict_counts_cells_and_they_are_listed_as_the_grid_does() -> None:
    grid = Grid(((1, 4.0),), (Alpha(0.3), Alpha(0.6), Alpha(0.9)), (0.0,), 64)
    first, second, third = grid.cells()
    outcomes = [outcome(third, 4.0, 3.0), outcome(first, 8.2, 9.0), outcome(second, 4.0, 4.0)]
    assert verdict(outcomes) == (
        "auto ÷ off is 0.98 or more in 2 of 3 cells, auto ÷ best fixed mode 0.95 or more in 2."
    )
    assert [each.cell for each in in_order(outcomes, grid)] == [first, second, third]


def test_a_half_measured_grid_can_be_drawn(tmp_path: Path) -> None:
    cells = Grid(((1, 4.0), (128, 16.0)), (Alpha(0.3), Alpha(0.8, 0.3)), (0.0, 0.8), 64).cells()
    path = draw_grid([outcome(cell, 7.0, 8.0) for cell in cells[:3]], tmp_path / "grid.png")
    assert path.read_bytes().startswith(b"\x89PNG")


class ScriptedStand:
    """The policy is as fast as plain decoding, K = 1 a tenth faster, K = 2 half as fast. Breaks on run `breaks_at`."""

    def __init__(self, breaks_at: int | None) -> None:
        self.breaks_at = breaks_at
        self.seconds = {"off": 8.0, "auto": 8.0, "ahead:1": 8.0 / 1.1, "ahead:2": 16.0}
        self.warmed_up: list[tuple[Demand, str]] = []
        self.turns: list[tuple[Demand, str, int]] = []

    def warm_up(self, demand: Demand, mode: Mode) -> None:
        self.warmed_up.append((demand, mode.name))

    def run(self, demand: Demand, mode: Mode, repeat: int) -> Run:
        self.turns.append((demand, mode.name, repeat))
        if len(self.turns) == self.breaks_at:
            raise Unavailable("the target is gone")
        wrong = None if demand.temperature else 0
        return run(mode.name, self.seconds[mode.name], repeat, demand.num_sessions, wrong_tokens=wrong)


Grids = Callable[..., tuple[int, str, str]]


class Systems:
    """Stands in for systems that run; has every one that was started."""

    def __init__(self) -> None:
        self.breaks_at: int | None = None
        self.started: list[tuple[Emulation, list[str], int]] = []
        self.stands: list[ScriptedStand] = []
        self.running = 0

    @contextmanager
    def start(self, profile: Profile, modes: Sequence[Mode], most: int) -> Iterator[ScriptedStand]:
        self.started.append((profile.emulation, [mode.name for mode in modes], most))
        self.stands.append(ScriptedStand(self.breaks_at))
        self.running += 1
        try:
            yield self.stands[-1]
        finally:
            self.running -= 1


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Systems:
    systems = Systems()
    monkeypatch.setattr(bench_grid, "running_stand", systems.start)
    return systems


@pytest.fixture
def grid(capsys: pytest.CaptureFixture[str], systems: Systems) -> Grids:
    """Runs the command as a shell would: status, stdout, stderr."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main(["bench-grid", "--emulate", PROFILE, *arguments])
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run_command


def test_the_command_measures_every_cell_on_a_system_of_its_alpha(grid: Grids, systems: Systems) -> None:
    status, out, _ = grid(
        "--sessions", "1,128", "--alpha", "0.3", "--shift", "0.8:0.1", "--temperature", "0,0.8", "--modes",
        "off,auto,ahead:1-2", "--repeats", "2", "--json",
    )  # fmt: skip
    assert status == 0
    content = json.loads(out)
    assert (content["emulated"], content["profile"], content["num_cells_asked"]) == (True, "70b-1b", 8)
    assert [
        (cell["cell"]["num_sessions"], cell["label"], cell["cell"]["temperature"], cell["cell"]["dilation"],
         cell["cell"]["num_tokens"], cell["wrong_tokens"]) for cell in content["cells"]
    ] == [
        (number, label, temperature, dilation, tokens, wrong)
        for number, dilation, tokens in ((1, 4.0, 40), (128, 8.0, 16))
        for label in ("0.3", "0.8→0.1")
        for temperature, wrong in ((0.0, 0), (0.8, None))
    ]  # fmt: skip
    for cell in content["cells"]:
        assert (cell["best"], cell["reaches_aims"]) == ("ahead:1", False)
        assert cell["auto_to_best"] == pytest.approx(1 / 1.1)
        assert len(cell["runs"]) == 8
    assert [(devices.alpha, devices.dilation) for devices, _, _ in systems.started] == [
        (0.3, 4.0), (0.3, 8.0), (0.8, 4.0), (0.8, 8.0),
    ]  # fmt: skip
    assert {tuple(modes) for _, modes, _ in systems.started} == {("off", "auto", "ahead:1", "ahead:2")}
    stand = systems.stands[1]
    assert stand.warmed_up == [(Demand(128, 16, temperature, 8), "auto") for temperature in (0.0, 0.8)]
    assert [(mode, repeat) for demand, mode, repeat in stand.turns if not demand.temperature] == [
        ("off", 0), ("auto", 0), ("ahead:1", 0), ("ahead:2", 0),
        ("auto", 1), ("ahead:1", 1), ("ahead:2", 1), ("off", 1),
    ]  # fmt: skip


def test_the_table_has_a_line_a_cell_fits_80_columns_and_marks_what_is_below(
    grid: Grids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "grid.png"
    status, out, err = grid(
        "--sessions", "128", "--alpha", "0.3", "--shift", "0.95:0.05", "--modes", "auto,ahead:1", "--plot", str(path)
    )  # fmt: skip
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["128", "0.3", "0", "8", "ahead:1", "1.10", "1.00", "0.91!", "0.0", "0"] in lines
    assert ["128", "0.95→0.05", "0", "8", "ahead:1", "1.10", "1.00", "0.91!", "0.0", "0"] in lines
    assert max(map(len, out.splitlines())) <= 80
    assert "EMULATED devices, profile 70b-1b" in out
    assert f"drew {path}" in err
    assert path.exists()


def test_a_system_that_fails_ends_the_grid_and_what_was_measured_is_reported(grid: Grids, systems: Systems) -> None:
    systems.breaks_at = 7
    status, out, err = grid("--sessions", "1,8", "--alpha", "0.3", "--modes", "auto,ahead:1", "--json")
    assert status == 1
    (cell,) = json.loads(out)["cells"]
    assert cell["cell"]["num_sessions"] == 1
    assert "only 1 of 2 cells were measured" in err
    assert err.endswith("error: the target is gone\n")
    assert systems.running == 0


def test_nothing_is_reported_where_nothing_was_measured(grid: Grids, systems: Systems) -> None:
    systems.breaks_at = 1
    status, out, err = grid("--sessions", "1", "--alpha", "0.3")
    assert (status, out) == (1, "")
    assert err.endswith("error: the target is gone\n")


@pytest.mark.parametrize(
    ("given", "dilations"),
    [((), [4.0, 8.0]), (("--dilation", "3"), [3.0, 3.0]), (("--dilation", "2, 8"), [2.0, 8.0])],
)
def test_dilation_goes_with_the_load(grid: Grids, given: tuple[str, ...], dilations: list[float]) -> None:
    _, out, _ = grid("--sessions", "1,128", "--alpha", "0.3", "--modes", "auto,ahead:1", "--json", *given)
    assert [cell["cell"]["dilation"] for cell in json.loads(out)["cells"]] == dilations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sessions", "0"), "--sessions: found '0', allowed are numbers from 1 on"),
        (("--sessions", "8,129"), "--sessions: found 129, allowed are at most 128"),
        (("--alpha", "0.3,1.2"), "--alpha: found '0.3,1.2', allowed are numbers from 0 to 1"),
        (("--shift", "0.3"), "--shift: found '0.3', allowed are pairs such as 0.8:0.3 of numbers from 0 to 1"),
        (("--temperature", "-1"), "--temperature: found '-1', allowed are numbers from 0 on"),
        (("--temperature", "inf"), "--temperature: found 'inf', allowed are numbers from 0 on"),
        (("--dilation", "4,8"), "--dilation: found 2, allowed are one or 4, as many as --sessions"),
        (("--modes", "off,fast"), "--modes: found 'fast', allowed is off, auto, draft_model"),
        (("--modes", "off,ahead:3"), "--modes: found 'off,ahead:3', allowed are auto, which is needed, off, ahead:K"),
        (("--modes", "auto,sync"), "--modes: found 'auto,sync', allowed are auto, which is needed, off, ahead:K"),
    ],
)
def test_what_is_no_grid_is_refused_before_anything_starts(
    grid: Grids, systems: Systems, arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = grid(*arguments)
    assert (status, out, systems.started) == (2, "", [])
    assert err.startswith("error: ")
    assert said in err
