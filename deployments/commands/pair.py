"""Owns `outrider check-pair`."""

from __future__ import annotations

import typer

from deployments import pairs
from deployments.console import out
from deployments.models import resolve_model


def check_pair(
    draft: str = typer.Argument(help="Draft: a Hugging Face folder or a built-in name."),
    target: str = typer.Argument(help="Target: a Hugging Face folder or a built-in name."),
) -> None:
    """Do a draft and a target share one vocabulary?"""
    pair = pairs.check_pair(resolve_model(draft), resolve_model(target))
    out.print(f"[green]pair fits[/]: {pair.vocab_size} token ids, fingerprint {pair.fingerprint[:16]}", soft_wrap=True)
    if {pair.draft_rows, pair.target_rows} != {pair.vocab_size}:
        out.print(
            f"embeddings are padded to {pair.draft_rows} (draft) and {pair.target_rows} (target) rows; "
            "ids past the tokenizer are masked on both sides",
            soft_wrap=True,
        )
