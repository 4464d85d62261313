"""Owns the part of `outrider bench` that measures prompts: each under every mode, one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.comparison import Row, Sample, short_of_k, summarize
from bench.comparison import as_json as to_json
from bench.counts import Counts
from bench.modes import PLAIN, Mode, in_turn, plain
from bench.plot import Mark
from bench.prompts import Prompt, first_of_each, read_prompts
from cluster.local import free_port
from deployments.client import Ask, Client, Result
from deployments.commands.callers import ask, decode_s
from deployments.commands.serve import with_port
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.system import local_system

BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Source:
    """What is measured.

    Attributes:
        prompts: a file of them.
        limit: only so many of each class.
        config: what to start where there is no address.
        address: of a running server.
        baseline: address of another one, whose plain decoding is measured beside.
    """

    prompts: Path
    limit: int | None
    config: str
    address: str | None
    baseline: str | None


def bench(source: Source, modes: Callable[[Sequence[str]], list[Mode]], *, as_json: bool) -> list[Mark]:
    """Measures and reports; `modes` chooses among what the server's drafters allow. Returns what can be drawn."""
    chosen = first_of_each(read_prompts(source.prompts), source.limit)
    with server(source.address, source.config) as where, ExitStack() as stack:
        client = stack.enter_context(Client(where))
        info = client.model_info()
        clients = dict.fromkeys(modes(info.drafters), client)
        if source.baseline is not None:
            clients[plain(BASELINE)] = stack.enter_context(Client(source.baseline))
        samples = measure(clients, chosen)
    rows = summarize(samples)
    if as_json:
        about = {"prompts": str(source.prompts), "model": info.model, "draft_model": info.draft_model}
        names = [mode.name for mode in clients]
        sys.stdout.write(json.dumps(to_json(samples, {**about, "modes": names})) + "\n")
    else:
        out.print(_table(rows))
        for note in short_of_k(samples):
            out.print(note)
    return [row.mark() for row in rows]


@contextmanager
def server(address: str | None, config: str) -> Iterator[str]:
    """Yields the address of a running server: `address`, or that of one started for the block."""
    if address is not None:
        yield address
        return
    with local_system(with_port(load_config(config), free_port())) as started:
        yield started


def measure(clients: Mapping[Mode, Client], prompts: list[Prompt]) -> list[Sample]:
    """Interleaved, so that what else the machine does falls on all modes alike; the order turns with each prompt."""
    samples, modes = [], list(clients)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("measuring", total=len(prompts) * len(modes))
        for mode in modes:  # caches and estimates are warm before anything counts
            clients[mode].generate(_ask(prompts[0], mode))
        for turn, prompt in enumerate(prompts):
            for mode in in_turn(modes, turn):
                samples.append(_sample(prompt, mode.name, clients[mode].generate(_ask(prompt, mode))))
                progress.advance(task)
    names = [mode.name for mode in modes]
    return sorted(samples, key=lambda sample: names.index(sample.mode))


def _ask(prompt: Prompt, mode: Mode) -> Ask:
    return ask(mode, prompt=prompt.text, messages=prompt.messages, sampling=prompt.sampling)


def _sample(prompt: Prompt, mode: str, result: Result) -> Sample:
    return Sample(
        prompt_id=prompt.id,
        kind=prompt.kind,
        mode=mode,
        token_ids=result.token_ids,
        decode_s=decode_s(result),
        counts=Counts.of(result.complete.speculation),
        router_ms=result.complete.timing.router_ms_p50,
    )


def _table(rows: list[Row]) -> Table:
    """Fits 80 columns; "ms" is what a round spends in router and transport."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("class", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for name in ("tok/s", "×", "median", "p10–p90", "accept", "length", "hit", "ms", "differ"):
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
            f"{row.hit_rate:.0%}" if row.hit_rate else "",
            f"{row.router_ms:.2f}",
            "" if plain else str(row.differing_tokens),
        )
    return table
