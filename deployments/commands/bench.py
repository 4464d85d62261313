"""Owns `outrider bench`: every prompt under every mode, one after the other, against plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.comparison import PLAIN, Row, Sample, as_json, summarize
from bench.plot import draw_speedups
from bench.prompts import Prompt, read_prompts
from cluster.local import free_port
from deployments.client import Ask, Client, Result
from deployments.commands.serve import with_port
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.system import local_system

AUTO, BASELINE = "auto", "baseline"


def bench(
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, class, messages or prompt, max_tokens.")],
    config: Annotated[str, typer.Option(help="Configuration to start when no --address is given.")] = "demo",
    address: Annotated[str | None, typer.Option(help="host:port of a running server to measure instead.")] = None,
    modes: Annotated[str, typer.Option(help="Comma-separated: off, auto, draft_model, ngram; default all.")] = "",
    baseline: Annotated[
        str | None, typer.Option(help="host:port of another server, whose plain decoding is measured beside.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each class.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the speedups, as a PNG file.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Measure speculation against plain decoding, by class of prompt."""
    chosen = _first_of_each(read_prompts(prompts), limit)
    with _server(address, config) as where, ExitStack() as stack:
        client = stack.enter_context(Client(where))
        info = client.model_info()
        clients = dict.fromkeys(_modes(modes, list(info.drafters)), client)
        if baseline is not None:
            clients[BASELINE] = stack.enter_context(Client(baseline))
        samples = _measure(clients, chosen)
    if plot is not None:
        draw_speedups(summarize(samples), plot)
    if as_json_:
        about = {"prompts": str(prompts), "model": info.model, "draft_model": info.draft_model, "modes": list(clients)}
        sys.stdout.write(json.dumps(as_json(samples, about)) + "\n")
    else:
        out.print(_table(summarize(samples)))


def _modes(asked: str, drafters: list[str]) -> list[str]:
    """Modes to measure, plain decoding first. Raises BadParameter for one the server does not have."""
    known = [PLAIN, AUTO, *sorted(drafters)]
    chosen = [mode.strip() for mode in asked.split(",")] if asked else known
    for mode in chosen:
        if mode not in known:
            raise typer.BadParameter(f"found {mode!r}, allowed is {', '.join(known)}", param_hint="--modes")
    return [PLAIN, *(mode for mode in chosen if mode != PLAIN)]


@contextmanager
def _server(address: str | None, config: str) -> Iterator[str]:
    if address is not None:
        yield address
        return
    with local_system(with_port(load_config(config), free_port())) as started:
        yield started


def _first_of_each(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if limit is None or seen[prompt.kind] <= limit:
            kept.append(prompt)
    return kept


def _measure(clients: Mapping[str, Client], prompts: list[Prompt]) -> list[Sample]:
    """Interleaved, so that what else the machine does falls on all modes alike; the order turns with each prompt."""
    samples, modes = [], list(clients)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("measuring", total=len(prompts) * len(modes))
        for mode in modes:  # caches and estimates are warm before anything counts
            clients[mode].generate(_ask(prompts[0], mode))
        for turn, prompt in enumerate(prompts):
            first = turn % len(modes)
            for mode in [*modes[first:], *modes[:first]]:
                samples.append(_sample(prompt, mode, clients[mode].generate(_ask(prompt, mode))))
                progress.advance(task)
    return sorted(samples, key=lambda sample: modes.index(sample.mode))


def _ask(prompt: Prompt, mode: str) -> Ask:
    return Ask(
        prompt=prompt.text,
        messages=prompt.messages,
        sampling=prompt.sampling,
        speculation="off" if mode in (PLAIN, BASELINE) else "auto",
        drafter="" if mode in (PLAIN, BASELINE, AUTO) else mode,
    )


def _sample(prompt: Prompt, mode: str, result: Result) -> Sample:
    stats, speed = result.complete.speculation, result.complete.timing.decode_tokens_per_s
    return Sample(
        prompt_id=prompt.id,
        kind=prompt.kind,
        mode=mode,
        token_ids=result.token_ids,
        decode_s=(len(result.token_ids) - 1) / speed if speed else 0.0,
        drafted=stats.draft_tokens,
        accepted=stats.accepted_tokens,
        rounds=stats.rounds,
        router_ms=result.complete.timing.router_ms_p50,
    )


def _table(rows: list[Row]) -> Table:
    """Fits 80 columns; "ms" is what a round spends in router and transport."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("class", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for name in ("tok/s", "×", "median", "p10–p90", "accept", "length", "ms", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        plain = row.mode == PLAIN
        table.add_row(
            row.kind if plain else "",
            row.mode,
            f"{row.tokens_per_s:.1f}",
            "" if plain else f"{row.speedup:.2f}",
            "" if plain else f"{row.speedup_median:.2f}",
            "" if plain else f"{row.speedup_p10:.2f}–{row.speedup_p90:.2f}",
            f"{row.acceptance_rate:.0%}" if row.acceptance_rate else "",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.router_ms:.2f}",
            "" if plain else str(row.differing_tokens),
        )
    return table
