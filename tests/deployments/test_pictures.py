"""What an option that draws takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from deployments import cli
from deployments.commands.pictures import png


def test_a_png_in_a_folder_that_exists(tmp_path: Path) -> None:
    assert png(None) is None
    for name in ("a.png", "a.b.PNG"):
        assert png(tmp_path / name) == tmp_path / name


@pytest.mark.parametrize("name", ["a.svg", "a.pdf", "a", "a.png.svg", "nowhere/a.png"])
def test_others_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"allowed is a \.png file in a folder that exists"):
        png(tmp_path / name)


@pytest.mark.parametrize("command", ["bench", "bench-grid", "simulate"])
def test_a_command_refuses_them_before_it_looks_at_anything_else(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main([command, "--emulate" if command != "simulate" else "--profile", "nowhere.yaml", "--plot", "a.svg"])
    assert exited.value.code == 2
    assert "'--plot': found a.svg, allowed is a .png file in a folder that exists" in capsys.readouterr().err
