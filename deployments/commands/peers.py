"""Owns `outrider bench-peers`: this system and others on the same prompts, each against its own plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.comparison import Row
from bench.emulated_model import EMULATED
from bench.modes import AUTO, PLAIN
from bench.peers.measuring import PeerSample, measure, num_measurements, summarize_systems, systems_as_json
from bench.peers.openai_peer import OpenAIPeer
from bench.peers.peer import Arrivals, Output, Peer, Skipped, max_tokens
from bench.prompts import Prompt, first_of_each, read_prompts
from deployments.client import Ask, Client
from deployments.commands.bench_prompts import server
from deployments.config import OutriderConfig
from deployments.config_file import load_config
from deployments.console import err, out, stage
from deployments.engine_settings import target_settings
from deployments.models import resolve_model
from deployments.pairs import check_pair, is_distilled, read_config
from router.tokenizer import Tokenizer

Peers = tuple[list[Peer], list[Skipped]]  # those to measure, and what is left out


def bench_peers(
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, class, messages or prompt, max_tokens.")],
    config: Annotated[str, typer.Option(help="Whose target all decode; started when no --address is given.")] = "demo",
    address: Annotated[str | None, typer.Option(help="host:port of a running outrider to measure instead.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each class.")] = None,
    assistant: Annotated[
        str | None, typer.Option(help="Folder of a draft for transformers' assisted generation.")
    ] = None,
    prompt_lookup_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that transformers' prompt lookup proposes at once.")
    ] = 10,
    vllm_plain: Annotated[str | None, typer.Option(help="URL of a vLLM server without speculation.")] = None,
    vllm_spec: Annotated[str | None, typer.Option(help="URL of one with speculation.")] = None,
    llama_cpp_plain: Annotated[str | None, typer.Option(help="URL of a llama.cpp server without a draft.")] = None,
    llama_cpp_spec: Annotated[str | None, typer.Option(help="URL of one with a draft.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Measure this system and others, greedily: each one's speculation ÷ its own plain decoding."""
    chosen = first_of_each(read_prompts(prompts), limit)
    settings = load_config(config)
    urls = {"vllm": (vllm_plain, vllm_spec), "llama.cpp": (llama_cpp_plain, llama_cpp_spec)}
    servers, skipped = _servers(urls, Tokenizer(resolve_model(settings.target.model)))
    in_process, also_skipped = _transformers(settings, assistant, prompt_lookup_tokens)
    with server(address, config) as where, Client(where) as client:
        samples = _measured([OutriderPeer(client), *in_process, *servers], chosen)
    skipped += also_skipped
    if as_json:
        about = {"prompts": str(prompts), "model": settings.target.model, "systems": systems_as_json(samples)}
        left_out = [{"system": each.system, "mode": each.mode, "reason": each.reason} for each in skipped]
        sys.stdout.write(json.dumps({**about, "skipped": left_out}) + "\n")
        return
    out.print(_table(summarize_systems(samples)))
    for each in skipped:
        err.print(f"[dim]not measured: {' '.join((each.system, each.mode)).strip()}: {each.reason}[/]", soft_wrap=True)


class OutriderPeer:
    """This system, as a caller sees it."""

    name = "outrider"
    modes = (PLAIN, AUTO)

    def __init__(self, client: Client) -> None:
        self._client = client

    def generate(self, prompt: Prompt, mode: str) -> Output:
        sampling = {"max_tokens": max_tokens(prompt), "temperature": 0.0}
        ask = Ask(prompt=prompt.text, messages=prompt.messages, sampling=sampling, speculation=mode)
        arrivals = Arrivals()
        stream = self._client.stream(ask)
        try:
            for response in stream:
                arrivals.came(response.delta.token_ids)
        finally:
            stream.cancel()
        return arrivals.output()


def _transformers(config: OutriderConfig, assistant: str | None, prompt_lookup_tokens: int) -> Peers:
    name, target = "transformers", config.target
    if target.model == EMULATED:
        return [], [Skipped(name, "", "the target is emulated, and has no weights to decode with")]
    if target.tensor_parallel_size > 1:
        return [], [Skipped(name, "", f"the target takes {target.tensor_parallel_size} processes, and this is one")]
    settings = target_settings(config)
    draft = None if assistant is None else _assistant(assistant, settings.model_path)
    with stage("Loading the target into transformers"):
        from transformers.utils import logging

        from bench.peers.transformers_peer import ASSISTED, TransformersPeer

        logging.disable_progress_bar()  # it would write into the stage's line
        peer = TransformersPeer(settings, prompt_lookup_tokens, draft)
    reason = "no --assistant; transformers cannot load a draft that `outrider train draft` made"
    return [peer], [] if draft else [Skipped(name, ASSISTED, reason)]


def _assistant(name: str, target: Path) -> Path:
    """Raises BadParameter for outrider's own drafts, PairMismatch for one of another vocabulary."""
    folder = resolve_model(name)
    if is_distilled(read_config(folder)):
        raise typer.BadParameter(
            f"{name} was made by `outrider train draft`, and transformers cannot load it", param_hint="--assistant"
        )
    check_pair(folder, target)
    return folder


def _servers(urls: Mapping[str, tuple[str | None, str | None]], tokenizer: Tokenizer) -> Peers:
    """A peer for each system of which both servers are given. Raises BadParameter where only one is."""
    peers, skipped = list[Peer](), list[Skipped]()
    for name, (plain, speculative) in urls.items():
        option = f"--{name.replace('.', '-')}"
        if plain and speculative:
            peers.append(OpenAIPeer(name, plain, speculative, tokenizer.encode))
        elif plain or speculative:
            raise typer.BadParameter(f"{option}-plain and {option}-spec are given together", param_hint=option)
        else:
            skipped.append(Skipped(name, "", f"no {option}-plain and {option}-spec"))
    return peers, skipped


def _measured(peers: Sequence[Peer], prompts: Sequence[Prompt]) -> list[PeerSample]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("measuring", total=num_measurements(peers, prompts))
        return measure(peers, prompts, lambda: progress.advance(task))


def _table(rows: Sequence[tuple[str, Row]]) -> Table:
    """Fits 80 columns; "×" is over the system's own plain decoding, and "median" and "p10–p90" are over prompts."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("class", "system", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("tok/s", "× own", "median", "p10–p90", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = ""
    for system, row in rows:
        plain = row.mode == PLAIN
        table.add_row(
            "" if row.kind == shown else row.kind,
            system if plain else "",
            row.mode,
            f"{row.tokens_per_s:.1f}",
            "" if plain else f"{row.speedup:.2f}",
            "" if plain else f"{row.speedup_median:.2f}",
            "" if plain else f"{row.speedup_p10:.2f}–{row.speedup_p90:.2f}",
            "" if plain else str(row.differing_tokens),
        )
        shown = row.kind
    return table
