"""Owns `outrider bench-engine` and `outrider bench-memory`: the engine without servers, memory over many requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from bench.memory import Reading, measure
from bench.prompts import Prompt, read_prompts
from cluster.local import free_port
from deployments.client import Ask, Client
from deployments.commands.serve import with_port
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.models import DEFAULT_TARGET, resolve_model
from deployments.system import local_system

MAX_TOKENS = 12
GIB = 2**30


def engine(
    target: Annotated[str, typer.Option(help="A Hugging Face folder or a built-in name.")] = DEFAULT_TARGET,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are over them.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Measure the engine alone: plain decoding against transformers, and what verifying rows costs."""
    folder = resolve_model(target)
    from bench import engine_speed

    with Progress(console=err) as progress:
        task = progress.add_task("measuring", total=engine_speed.num_measurements(rounds))
        rows = engine_speed.report(engine_speed.measure(folder, rounds, lambda: progress.advance(task)))
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    table = Table(box=None, header_style="bold")
    table.add_column("what")
    for name in ("median ms", "min–max", "÷ base"):
        table.add_column(name, justify="right")
    table.add_column("base")
    for row in rows:
        spread = f"{row['min_ms']:.1f}–{row['max_ms']:.1f}"
        table.add_row(row["what"], f"{row['ms']:.1f}", spread, f"{row['times_base']:.2f}", row["base"])
    out.print(table)


def memory(
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, class, messages or prompt.")],
    config: Annotated[str, typer.Option(help="Configuration to start.")] = "demo",
    requests: Annotated[int, typer.Option(min=10, help="Requests to make.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
) -> None:
    """Start the system, make many short requests, and watch its resident memory."""
    chosen = read_prompts(prompts)
    with local_system(with_port(load_config(config), free_port())) as address:
        for reading in measure(lambda index: _ask(address, chosen, index), requests, concurrency):
            out.print(_line(reading), soft_wrap=True)


def _ask(address: str, prompts: list[Prompt], index: int) -> None:
    """One short request; every fifth is decoded plainly and every seventh is sampled."""
    prompt = prompts[index % len(prompts)]
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.7 if index % 7 == 0 else 0.0}
    speculation = "off" if index % 5 == 0 else "auto"
    with Client(address) as client:
        client.generate(Ask(prompt=prompt.text, messages=prompt.messages, sampling=sampling, speculation=speculation))


def _line(reading: Reading) -> str:
    parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in reading.resident.items())
    return f"{reading.requests:5d} requests: {reading.total / GIB:.2f} GiB resident ({parts})"
