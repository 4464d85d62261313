"""Owns `outrider simulate`: what speculation should bring on devices that nobody has bought yet."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.emulation import Emulation
from bench.simulation.assumptions import Assumptions
from bench.simulation.hardware import Gpu, pick_gpu
from bench.simulation.memory import MemoryPlan, plan_gpu
from bench.simulation.models import Model, check_pair, pick_model
from bench.simulation.montecarlo import Replies, replies
from bench.simulation.plot import draw
from bench.simulation.report import Report
from bench.simulation.roofline import Device, ProfiledDevice, RooflineDevice
from bench.simulation.scenario import AtLoad, Setup, at_load, matrix
from deployments.commands.pictures import png
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.workloads import PACKAGED, read_workloads
from engine.errors import InvalidArgument

_SEED = 1  # of the Monte Carlo runs, so that the same command says the same
_DEFAULT_ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True)
class _Named:
    """Models and GPUs that were named."""

    target: Model
    gpu: Gpu
    num_gpus: int
    draft: Model
    draft_gpu: Gpu


def simulate(
    target: Annotated[str | None, typer.Option(help="Target: a name such as llama-3-70b, or a model folder.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Each GPU of the target, e.g. h100-80gb.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs the target is spread over.")] = 1,
    draft: Annotated[str | None, typer.Option(help="Draft: a name, or a model folder.")] = None,
    draft_gpu: Annotated[
        str | None, typer.Option(help="The draft's GPU, or MIG slice such as a100-40gb-1g.5gb. Default: like --gpu.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="YAML with a section `emulation`: times of a forward instead of those worked out."),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(help="Of the first, second, … draft token; the last holds on. Default: the profile's, or 0.8."),
    ] = "",
    workloads: Annotated[Path, typer.Option(help="Acceptance by class of request.")] = PACKAGED,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions side by side, e.g. 1,8,64.")] = "1,8,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens a session has.")] = 2048,
    max_draft_tokens: Annotated[int, typer.Option(min=1, max=64, help="Largest K.")] = 8,
    hit_rate: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of running ahead, where measured. Default: worked out.")
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, several times: another assumption than those printed.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=png, help="Draw PNGs: FILE, speed against K; FILE-map, K × acceptance.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Work out the best K, the speed and the memory of a target and a draft, before buying or starting anything."""
    emulation = _emulation(profile)
    assumptions = _assumptions(emulation).replaced(assume or ())
    named = _named((target, gpu, draft, draft_gpu), tensor_parallel, context)
    devices = _devices(emulation, named, context, assumptions)
    setup = Setup(*devices, assumptions, max_draft_tokens, hit_rate)
    rates = _rates(acceptance) if acceptance else (emulation.alpha if emulation else _DEFAULT_ACCEPTANCE,)
    counts = _counts(sessions)
    classes = {name: each.draft_acceptance for name, each in read_workloads(workloads).items()}
    loads = tuple(at_load(setup, number, rates) for number in counts)
    report = Report(
        setup=setup,
        acceptance=rates,
        context=context,
        memory=_memory(named, (max(counts), context + max_draft_tokens), assumptions),
        loads=loads,
        matrix=matrix(setup, counts, classes),
        luck=_luck(rates, loads[0]),
    )
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        for part in report.parts():
            out.print(part)
    for written in draw(setup, counts, plot) if plot is not None else ():
        err.print(f"drew {written}", markup=False, soft_wrap=True)


def _emulation(profile: Path | None) -> Emulation | None:
    if profile is None:
        return None
    emulation = load_config(profile).emulation
    if emulation is None:
        raise typer.BadParameter(f"{profile} has no section `emulation`", param_hint="--profile")
    return emulation


def _assumptions(emulation: Emulation | None) -> Assumptions:
    """What is assumed where nobody says otherwise; a profile says some of it."""
    if emulation is None:
        return Assumptions()
    link_s = emulation.target.rtt_s + emulation.draft.rtt_s
    return Assumptions(recall=emulation.recall, num_ranked=emulation.num_ranked, link_s=link_s)


def _named(names: tuple[str | None, ...], num_gpus: int, context: int) -> _Named | None:
    """Looks up target, GPU, draft and the draft's GPU; None where nothing of them was named.

    A name that is wrong is said before one that is missing.
    """
    if not any(names):
        return None
    target, draft = (_model(names[at], field, context) for at, field in ((0, "--target"), (2, "--draft")))
    gpu, draft_gpu = (_gpu(names[at], field) for at, field in ((1, "--gpu"), (3, "--draft-gpu")))
    if target is None or gpu is None or draft is None:
        found = {"--target": target, "--gpu": gpu, "--draft": draft}
        missing = " and ".join(option for option, value in found.items() if value is None)
        raise typer.BadParameter(f"--target, --gpu and --draft go together; {missing} not given")
    check_pair(target, draft, "--draft")
    return _Named(target, gpu, num_gpus, draft, draft_gpu or gpu)


def _gpu(name: str | None, field: str) -> Gpu | None:
    return pick_gpu(name, field) if name else None


def _model(name: str | None, field: str, context: int) -> Model | None:
    """A model that takes so long a context; None where none was named."""
    if not name:
        return None
    found = pick_model(name, field)
    longest = found.sizes.max_context_length
    if context > longest:
        raise InvalidArgument("--context", context, f"at most {longest} with {found.name}")
    return found


def _devices(
    emulation: Emulation | None, named: _Named | None, context: int, assumptions: Assumptions
) -> tuple[Device, Device]:
    """Target and draft, with the profile's times if there is one."""
    if emulation is not None:
        return ProfiledDevice(emulation.target, context), ProfiledDevice(emulation.draft, context)
    if named is None:
        raise typer.BadParameter("give --target, --gpu and --draft, or a --profile, which has times of its own")
    return (
        RooflineDevice(named.target, named.gpu, named.num_gpus, context, assumptions),
        RooflineDevice(named.draft, named.draft_gpu, 1, context, assumptions),
    )


def _memory(named: _Named | None, demand: tuple[int, int], assumptions: Assumptions) -> tuple[MemoryPlan, ...]:
    if named is None:
        return ()
    share = assumptions.memory_share
    return (
        plan_gpu(named.target, named.gpu, named.num_gpus, demand, share),
        plan_gpu(named.draft, named.draft_gpu, 1, demand, share),
    )


def _luck(acceptance: tuple[float, ...], load: AtLoad) -> Replies | None:
    """At the best K that waits; None where plain decoding is best."""
    size = round(load.waiting.num_speculative_tokens)
    return replies(acceptance, size, np.random.default_rng(_SEED)) if size else None


def _rates(asked: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in asked.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
        allowed = "one number from 0 to 1, or one for each position, separated by commas"
        raise typer.BadParameter(f"found {asked!r}, allowed is {allowed}", param_hint="--acceptance")
    return rates


def _counts(asked: str) -> tuple[int, ...]:
    parts = [part.strip() for part in asked.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        allowed = "numbers from 1 on, separated by commas"
        raise typer.BadParameter(f"found {asked!r}, allowed are {allowed}", param_hint="--sessions")
    return tuple(dict.fromkeys(map(int, parts)))
