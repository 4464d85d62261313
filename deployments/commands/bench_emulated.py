"""Owns the part of `outrider bench` that measures emulated devices: sessions at once, checked token by token."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.progress import Progress
from rich.table import Table

from bench.comparison import differing
from bench.counts import Counts
from bench.emulated_model import NUM_WORDS
from bench.emulated_runs import EmulatedRow, Run, about, summarize_runs, title
from bench.emulated_runs import as_json as as_rows
from bench.emulation import Emulation
from bench.modes import PLAIN, Mode, in_turn
from bench.plot import Mark
from bench.processes import cpu_seconds
from cluster.local import free_port
from deployments.client import Result
from deployments.commands.callers import Callers, ask, decode_s
from deployments.config import OutriderConfig
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.system import local_system

NUM_PROMPT = 24
WARM_UP_TOKENS = 48
CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the system.

    Attributes:
        sessions: numbers of requests at once, each measured by itself.
        num_tokens: of every output.
        repeats: how often every mode has its turn.
        temperature: above 0 requests are sampled without a seed and have no reference.
    """

    sessions: tuple[int, ...]
    num_tokens: int
    repeats: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What the requests of one run have in common.

    Attributes:
        num_sessions: requests at once.
        num_tokens: of every output.
        temperature: see Load.
        num_prompt: tokens of every prompt.
    """

    num_sessions: int
    num_tokens: int
    temperature: float
    num_prompt: int = NUM_PROMPT


@dataclass(frozen=True, slots=True)
class Profile:
    """A configuration that emulates, under the name of its file."""

    name: str
    config: OutriderConfig

    @property
    def emulation(self) -> Emulation:
        assert self.config.emulation is not None  # read_profile() has seen to it
        return self.config.emulation

    def with_devices(self, emulation: Emulation) -> Profile:
        """The same with others in their place."""
        return Profile(self.name, self.config.model_copy(update={"emulation": emulation}))


def read_profile(path: Path, **varied: float | None) -> Profile:
    """Reads `path`; `varied` are arguments of Emulation.varied(), of which None leaves the file's.

    Raises:
        ConfigError: it cannot be used.
        BadParameter: it is a configuration, but emulates nothing.
    """
    config = load_config(path)
    if config.emulation is None:
        raise typer.BadParameter(f"{path} has no section `emulation`", param_hint="--emulate")
    emulation = config.emulation.varied(**{name: value for name, value in varied.items() if value is not None})
    return Profile(path.stem, config).with_devices(emulation)


def bench(profile: Profile, load: Load, modes: Sequence[Mode], *, as_json: bool) -> list[Mark]:
    """Measures and reports; returns what can be drawn."""
    check_places(profile.config, max(load.sessions))
    runs = measure(profile, load, modes)
    rows = summarize_runs(runs, profile.emulation.target)
    if as_json:
        content = about(profile.name, profile.emulation, load.temperature)
        sys.stdout.write(json.dumps({**content, **as_rows(rows, runs)}) + "\n")
    else:
        _print(profile, load, rows)
    return [row.mark() for row in rows]


def measure(profile: Profile, load: Load, modes: Sequence[Mode]) -> list[Run]:
    """Runs every mode `load.repeats` times at every number of sessions; the order turns with each repeat."""
    runs = []
    with running_stand(profile, modes, max(load.sessions)) as stand, Progress(console=err) as progress:
        task = progress.add_task("measuring", total=len(load.sessions) * len(modes) * load.repeats)
        for num_sessions in load.sessions:
            demand = Demand(num_sessions, load.num_tokens, load.temperature)
            for mode in modes:  # estimates are those of this load before anything counts
                stand.warm_up(demand, mode)
            for repeat in range(load.repeats):
                for mode in in_turn(modes, repeat):
                    runs.append(stand.run(demand, mode, repeat))
                    progress.advance(task)
    names = [mode.name for mode in modes]
    return sorted(runs, key=lambda run: (load.sessions.index(run.num_sessions), names.index(run.mode)))


@contextmanager
def running_stand(profile: Profile, modes: Sequence[Mode], most: int) -> Iterator[Stand]:
    """Runs a system of `profile`'s devices on this machine for as long as the block runs.

    Args:
        modes: those that will be asked of it.
        most: requests at once.
    """
    config = _on_free_ports(_allowing(profile.config, modes))
    with local_system(config) as address, Callers(address, most) as callers:
        yield Stand(profile.emulation, callers)


def check_places(config: OutriderConfig, most: int) -> None:
    """Raises BadParameter where sessions would have to wait for a place: they are to be measured side by side."""
    places = min(config.router.max_concurrent, config.target.max_sessions, config.draft.max_sessions)
    if most > places:
        raise typer.BadParameter(f"found {most}, allowed are at most {places} in this profile", param_hint="--sessions")


def _allowing(config: OutriderConfig, modes: Sequence[Mode]) -> OutriderConfig:
    """The same, with room for the largest K that a mode fixes."""
    largest = max(config.speculation.max_draft_tokens, *(mode.num_speculative_tokens or 0 for mode in modes))
    speculation = config.speculation.model_copy(update={"max_draft_tokens": largest})
    return config.model_copy(update={"speculation": speculation})


def _on_free_ports(config: OutriderConfig) -> OutriderConfig:
    server = config.server.model_copy(update={"grpc_port": free_port(), "http_port": free_port()})
    return config.model_copy(update={"server": server})


@dataclass(frozen=True, slots=True)
class _Reading:
    """What target and processes have spent so far, in this machine's seconds."""

    forwards: int
    forward_s: float
    bubble_s: float
    cpu_s: Mapping[str, float]

    @classmethod
    def take(cls) -> _Reading:
        """Asks every target replica of the running system."""
        from ray import serve

        from deployments.app import APPLICATION

        answers = serve.get_deployment_handle("Target", APPLICATION).broadcast("endpoint").results(timeout_s=30.0)
        infos = [answer.info for answer in answers]
        return cls(
            forwards=sum(info.forwards for info in infos),
            forward_s=sum(info.forward_s for info in infos),
            bubble_s=sum(info.bubble_s for info in infos),
            cpu_s=cpu_seconds(),
        )


class Stand:
    """Runs one mode at a time on the running system."""

    def __init__(self, emulation: Emulation, callers: Callers) -> None:
        self._emulation, self._callers = emulation, callers

    def warm_up(self, demand: Demand, mode: Mode) -> None:
        """Runs what does not count."""
        short = replace(demand, num_tokens=min(WARM_UP_TOKENS, demand.num_tokens))
        self._generate(short, _prompts(short, "warm-up"), mode)

    def run(self, demand: Demand, mode: Mode, repeat: int) -> Run:
        """Runs and checks it."""
        prompts = _prompts(demand, str(repeat))
        before, client_before = _Reading.take(), time.process_time()
        results = self._generate(demand, prompts, mode)
        client_s, after = time.process_time() - client_before, _Reading.take()
        dilation = self._emulation.dilation
        decoded = sum(len(result.token_ids) - 1 for result in results)
        cpu_s = {kind: after.cpu_s[kind] - before.cpu_s[kind] for kind in after.cpu_s}
        return Run(
            num_sessions=demand.num_sessions,
            mode=mode.name,
            repeat=repeat,
            decoded_tokens=decoded,
            decode_s=sum(map(decode_s, results)) / dilation,
            context=demand.num_prompt + demand.num_tokens / 2,
            counts=Counts.total(Counts.of(result.complete.speculation) for result in results),
            wrong_tokens=self._wrong_tokens(demand, prompts, results),
            forward_s=(after.forward_s - before.forward_s) / dilation,
            bubble_s=(after.bubble_s - before.bubble_s) / dilation,
            forwards=after.forwards - before.forwards,
            router_ms=statistics.median(result.complete.timing.router_ms_p50 for result in results),
            cpu_s={**cpu_s, CLIENT: client_s},
            reasons=tuple(sorted({result.complete.speculation.switched_off_reason for result in results} - {""})),
        )

    def _generate(self, demand: Demand, prompts: Sequence[list[int]], mode: Mode) -> list[Result]:
        sampling = {"max_tokens": demand.num_tokens, "ignore_eos": True, "temperature": demand.temperature}
        return self._callers.generate([ask(mode, token_ids=prompt, sampling=sampling) for prompt in prompts])

    def _wrong_tokens(self, demand: Demand, prompts: Sequence[list[int]], results: Sequence[Result]) -> int | None:
        if demand.temperature > 0.0:
            return None
        expected = (self._emulation.reference(prompt, demand.num_tokens) for prompt in prompts)
        return sum(differing(result.token_ids, right) for result, right in zip(results, expected, strict=True))


def _prompts(demand: Demand, turn: str) -> list[list[int]]:
    """Random words, the same for every mode in one turn, others for every session and turn."""
    rng = random.Random(f"{demand.num_sessions} sessions, {turn}")
    return [[rng.randrange(NUM_WORDS) for _ in range(demand.num_prompt)] for _ in range(demand.num_sessions)]


def _print(profile: Profile, load: Load, rows: Sequence[EmulatedRow]) -> None:
    """A table for each number of sessions."""
    head = title(profile.name, profile.emulation, load.temperature)
    for num_sessions in load.sessions:
        out.print(_table(f"{head}; sessions {num_sessions}", [row for row in rows if row.num_sessions == num_sessions]))
    if load.temperature > 0.0:
        out.print("Sampled without a seed: there is no reference to compare tokens with.")


def _table(head: str, rows: Sequence[EmulatedRow]) -> Table:
    """Fits 80 columns; "µs" is the router's CPU for each round of a session."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), title=head, title_justify="left")
    table.add_column("mode", no_wrap=True)
    for name in ("tok/s", "× off", "min–max", "bound", "length", "K", "hit", "bubble", "waste", "wrong", "µs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        plain = row.mode == PLAIN
        table.add_row(
            row.mode,
            f"{row.tokens_per_s:.0f}",
            "" if plain else f"{row.speedup:.2f}",
            "" if plain else f"{row.speedup_min:.2f}–{row.speedup_max:.2f}",
            f"{row.bound:.2f}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.draft_tokens_per_round:.1f}",
            f"{row.hit_rate:.0%}" if row.hit_rate else "",
            f"{row.bubble:.1%}",
            f"{row.wasted_per_accepted:.1f}" if row.wasted_per_accepted else "",
            "" if row.wrong_tokens is None else str(row.wrong_tokens),
            f"{row.cpu_us['router']:.0f}",
        )
    return table
