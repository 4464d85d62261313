"""Owns `outrider render`: the Serve part of a Kubernetes overlay, out of its configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.console import fail, out
from deployments.yaml_file import ConfigError, read_yaml

CONFIGURATION, PATCH = "outrider.yaml", "serve-config.yaml"


def render(
    overlay: Annotated[str, typer.Option(help="Overlay, a folder of --overlays: demo-cpu, llama-3-70b, qwen2.5-72b.")],
    overlays: Annotated[Path, typer.Option(help="Folder with the overlays.")] = Path("k8s/overlays"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the file is not what it should be.")
    ] = False,
) -> None:
    """Write an overlay's serve-config.yaml out of its outrider.yaml."""
    configuration = _configuration(overlays, overlay)
    from deployments.render import render_patch  # imports Ray

    patch, content = configuration.with_name(PATCH), read_yaml(configuration, str(configuration))
    rendered = render_patch({} if content is None else content, overlay, str(configuration))
    if not check:
        patch.write_text(rendered, encoding="utf-8")
        out.print(f"wrote {patch}", soft_wrap=True)
    elif not patch.is_file() or patch.read_text(encoding="utf-8") != rendered:
        fail(f"{patch} is not what {configuration.name} says: run outrider render --overlay {overlay}")
        raise typer.Exit(1)
    else:
        out.print(f"{patch} is in step", soft_wrap=True)


def _configuration(overlays: Path, overlay: str) -> Path:
    """Where an overlay's configuration lies. Raises ConfigError."""
    configuration = overlays / overlay / CONFIGURATION
    if not configuration.is_file():
        names = ", ".join(sorted(each.parent.name for each in overlays.glob(f"*/{CONFIGURATION}")))
        raise ConfigError(f"{configuration}: no such file; overlays are {names or 'nowhere here: see --overlays'}")
    return configuration
