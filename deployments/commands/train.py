"""Owns `outrider train`: making a draft for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.console import err, out
from deployments.models import DEFAULT_TARGET, home, resolve_model
from engine.errors import InvalidArgument, ModelNotFound

app = typer.Typer(help="Make models.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Make models."""


@app.command("draft")
def draft(
    output: Annotated[Path, typer.Option(help="Folder for the finished draft, replaced as a whole.")],
    target: Annotated[str, typer.Option(help="Target: a Hugging Face folder or a built-in name.")] = DEFAULT_TARGET,
    work: Annotated[Path | None, typer.Option(help="Corpus and checkpoints; a stopped run goes on from it.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="JSON lines on which acceptance is measured.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens the corpus should reach.")] = 1_000_000,
    generation_minutes: Annotated[float, typer.Option(min=0, help="Most minutes of generation.")] = 60.0,
    training_minutes: Annotated[float, typer.Option(min=0, help="Minutes of training.")] = 60.0,
    head_vocabulary: Annotated[int, typer.Option(min=1, help="Tokens the draft can propose.")] = 8192,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and training order.")] = 1,
) -> None:
    """Distil a draft from a target, on the target's own continuations. Resumes; writes a card with curves."""
    folder = resolve_model(target)
    from engine.distill import DistillSettings, train_draft
    from engine.distill.progress import RichProgress

    settings = DistillSettings(
        target=folder,
        target_name=target,
        output=output,
        work=work or home() / "distill" / output.name,
        held_out=held_out,
        tokens=tokens,
        generation_minutes=generation_minutes,
        training_minutes=training_minutes,
        head_vocabulary=head_vocabulary,
        threads=threads,
        seed=seed,
    )
    with RichProgress(err) as progress:
        try:
            made = train_draft(settings, progress)
        except FileNotFoundError as error:
            raise ModelNotFound(f"{error.filename or error}: no such file") from error
        except ValueError as error:
            raise InvalidArgument("train draft", str(error), "a target and a work folder that fit") from error
    out.print(f"draft in {made}; check it with: outrider check-pair {made} {target}", soft_wrap=True)
