"""Owns `outrider calibrate`: a pair measured on the user's own prompts, and the profile that comes of it."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from bench import probing
from bench.calibration import NUM_RANKED, Calibration, Devices, Ranks, worst_miss
from bench.calibration import calibrate as put_together
from bench.comparison import Sample, summarize
from bench.modes import PLAIN, parse_modes
from bench.plot import draw
from bench.probing import Plan, Prompts, Text
from bench.prompts import Prompt, first_of_each, read_prompts
from cluster.local import free_port
from deployments import calibrated
from deployments.client import Client
from deployments.commands import bench_prompts
from deployments.commands.serve import with_port
from deployments.config import Engine, OutriderConfig
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.models import resolve_model
from deployments.system import local_system
from deployments.tls_settings import mutual_tls
from engine.info import EngineInfo
from router.acceptance import DRAFT_MODEL
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.security import Role

PLOT = "speed.png"
AIM = 0.10
"""How far the simulator may be off, on the prompts it was calibrated with."""

_SHORT_CONTEXT = 64
_SPARE = 128  # tokens of a session besides its context, while it is timed


@dataclass(frozen=True, slots=True)
class Measured:
    """What a running system was asked for.

    Attributes:
        engines: what target and draft say of themselves.
        devices: as they were timed.
        samples: of the prompts, under all modes.
        ranks: of the plain outputs under the draft.
        context: mean tokens of a session while it decodes.
    """

    engines: tuple[EngineInfo, EngineInfo]
    devices: Devices
    samples: list[Sample]
    ranks: Ranks
    context: float


def calibrate(
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, class, messages or prompt, max_tokens.")],
    config: Annotated[str, typer.Option(help="Configuration of the pair, to start and measure.")] = "demo",
    folder: Annotated[Path, typer.Option("--out", help="Folder for the profile, the workload file and plots.")] = Path(
        "calibration"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each class.")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Most sessions side by side in a timed forward.")] = 8,
    context: Annotated[int, typer.Option(min=128, help="Tokens of the longer of two contexts that are timed.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every timed forward.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure a pair on your own prompts, and write a profile that the simulator, the bench and the policy read."""
    chosen = first_of_each(read_prompts(prompts), limit)
    settings = with_port(load_config(config), free_port())
    if not settings.draft.has_replicas or DRAFT_MODEL not in settings.speculation.drafters:
        raise typer.BadParameter(f"{config} has no draft model of its own to measure", param_hint="--config")
    folder.mkdir(parents=True, exist_ok=True)
    measured = _measure(settings, chosen, (sessions, context, repeats))
    result = put_together(measured.devices, measured.samples, measured.ranks, measured.context)
    target, draft = measured.engines
    about = f"{target.model} with {draft.model}, on {len(chosen)} prompts of {prompts.name}."
    written = calibrated.write(folder, about, result, settings, measured.engines)
    written += draw([row.mark() for row in summarize(measured.samples)], folder / PLOT)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(result, measured, written)) + "\n")
    else:
        _print(result, measured)
        err.print(f"wrote {', '.join(map(str, written))}", markup=False, soft_wrap=True)
        out.print(f"next: {calibrated.simulate_command(folder, result)}", markup=False, soft_wrap=True)


def _measure(config: OutriderConfig, prompts: Sequence[Prompt], size: tuple[int, int, int]) -> Measured:
    """Starts the system, times its devices while nothing else runs, then runs the prompts."""
    tokenizer = Tokenizer(resolve_model(config.target.model))
    encoded = [_encoded(tokenizer, prompt) for prompt in prompts]
    with local_system(config) as address:
        peers = _address_of("Target"), _address_of("Draft")
        engines, devices = asyncio.run(_timed(config, peers, encoded, size))
        with Client(address) as client:
            modes = parse_modes(f"{PLAIN},sync:1-{config.speculation.max_draft_tokens},{DRAFT_MODEL}", [DRAFT_MODEL])
            samples = bench_prompts.measure(dict.fromkeys(modes, client), list(prompts))
        plain = [sample for sample in samples if sample.mode == PLAIN]
        texts = [Text(tuple(ids), sample.token_ids) for ids, sample in zip(encoded, plain, strict=True)]
        ranks = asyncio.run(_ranked(config, peers[1], texts))
    context = statistics.mean(len(text.prompt) + len(text.output) / 2 for text in texts)
    return Measured(engines, devices, samples, ranks, context)


def _encoded(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if prompt.messages is not None:
        return tokenizer.encode_chat(prompt.messages)
    return tokenizer.encode_prompt(prompt.text or "")


def _address_of(deployment: str) -> str:
    """Of one replica of the running system."""
    from ray import serve

    from deployments.app import APPLICATION

    answers = serve.get_deployment_handle(deployment, APPLICATION).broadcast("endpoint").results(timeout_s=30.0)
    address: str = answers[0].address
    return address


async def _timed(
    config: OutriderConfig, peers: tuple[str, str], encoded: Sequence[Sequence[int]], size: tuple[int, int, int]
) -> tuple[tuple[EngineInfo, EngineInfo], Devices]:
    tls = mutual_tls(config, Role.ROUTER)
    target, draft = await TargetClient.connect(peers[0], tls=tls), await DraftClient.connect(peers[1], tls=tls)
    prompts = Prompts([token for ids in encoded for token in ids])
    plan = plan_of(config, (target.info, draft.info), size)
    try:
        with Progress(console=err) as progress:
            task = progress.add_task("timing forwards", total=plan.num_cells)
            devices = await probing.time_devices(target, draft, prompts, plan, lambda: progress.advance(task))
        return (target.info, draft.info), devices
    finally:
        await target.close()
        await draft.close()


async def _ranked(config: OutriderConfig, address: str, texts: Sequence[Text]) -> Ranks:
    draft = await DraftClient.connect(address, tls=mutual_tls(config, Role.ROUTER))
    try:
        with Progress(console=err) as progress:
            task = progress.add_task("ranking what was written", total=len(texts))
            return await probing.ranks(draft, texts, NUM_RANKED, lambda: progress.advance(task))
    finally:
        await draft.close()


def plan_of(config: OutriderConfig, engines: tuple[EngineInfo, EngineInfo], size: tuple[int, int, int]) -> Plan:
    """What these engines have room for.

    Args:
        size: most sessions, tokens of the longer context, repeats.
    """
    most, context, repeats = size
    longest = config.speculation.max_draft_tokens + 1
    window = min(info.max_context_length for info in engines) - _SPARE
    rows_room = engines[0].max_proposal_tokens + 1
    contexts = tuple(sorted({min(_SHORT_CONTEXT, window), min(context, window)}))
    kv_room = min((info.num_blocks - 1) * info.block_size for info in engines) // (contexts[-1] + _SPARE)
    most = min(most, rows_room, kv_room, config.target.max_sessions, config.draft.max_sessions)
    doubled = [2**power for power in range(max(most, 1).bit_length())]
    return Plan(
        rows=tuple(sorted({1, 2, (longest + 1) // 2, longest} & set(range(1, rows_room + 1)))),
        sessions=tuple(doubled),
        contexts=contexts,
        prompt_rows=(_prompt_rows(config.target), _prompt_rows(config.draft)),
        num_drafted=(longest + 1) // 2,
        repeats=repeats,
    )


def _prompt_rows(engine: Engine) -> int:
    """Tokens of a prompt that are computed in one forward."""
    return engine.reproducible.prompt_rows if engine.reproducible.enabled else engine.max_num_batched_tokens


def _as_dict(result: Calibration, measured: Measured, written: Sequence[Path]) -> dict[str, Any]:
    """The object that `--json` prints: seconds, and shares of one."""
    return {
        "models": [info.model for info in measured.engines],
        "emulation": result.emulation.model_dump(),
        "acceptance": result.acceptance,
        "first_token_agreement": result.ranks.first / max(result.ranks.total, 1),
        "assumptions": result.assumptions,
        "hit_rate": result.hit_rate,
        "context": result.context,
        "worst_miss": {
            "target": worst_miss(result.target, measured.devices.target.generated),
            "draft": worst_miss(result.draft, measured.devices.draft.generated),
        },
        "forwards": {
            "target": [asdict(each) for each in measured.devices.target.generated],
            "draft": [asdict(each) for each in measured.devices.draft.generated],
        },
        "checks": [{**asdict(check), "miss": check.miss} for check in result.checks(measured.samples)],
        "rows": [row.as_dict() for row in summarize(measured.samples)],
        "files": [str(path) for path in written],
    }


def _print(result: Calibration, measured: Measured) -> None:
    out.print(_times(result, measured))
    out.print()
    out.print(_acceptance(result))
    hits = "" if result.hit_rate is None else f"; running ahead hits {result.hit_rate:.0%}"
    out.print(
        f"Where the draft's first token is not the target's, the target's is among its first {NUM_RANKED} in "
        f"{result.ranks.recall:.0%}{hits}. A round spends {1e3 * result.wait_s:.1f} ms besides forwards, a plain "
        f"token {1e3 * result.gap_s:.1f}.\n"
    )
    out.print(_checks(result, measured.samples))


def _times(result: Calibration, measured: Measured) -> Table:
    title = f"Forwards, ms: {' with '.join(info.model for info in measured.engines)}"
    table = _table(title, "device", "one row", "further row", "prompt row", "1000 tokens of context", "off by")
    devices = measured.devices
    for name, times, timed in (("target", result.target, devices.target), ("draft", result.draft, devices.draft)):
        table.add_row(
            name,
            f"{1e3 * times.step_s:.2f}",
            f"{1e3 * times.step_s * times.row_share:.3f}",
            f"{1e3 * times.step_s * (times.prompt_row_share or 0.0):.3f}",
            f"{1e6 * times.context_token_s:.2f}",
            f"≤ {worst_miss(times, timed.generated):.0%}",
        )
    return table


def _acceptance(result: Calibration) -> Table:
    table = _table("Accepted if those before it were, by position", "class", *map(str, range(1, 9)), "…")
    for kind, rates in result.acceptance.items():
        table.add_row(kind, *(f"{rate:.2f}" for rate in rates[:8]))
    return table


def _checks(result: Calibration, samples: Sequence[Sample]) -> Table:
    title = f"One session that waits for the draft, context {result.context}: measured, and simulated with all this"
    table = _table(title, "K", "tokens/s", "× plain", "simulated", "off by")
    for check in result.checks(samples):
        style = "" if abs(check.miss) <= AIM else "yellow"
        table.add_row(
            str(check.num_speculative_tokens),
            f"{check.tokens_per_s:.1f}",
            f"{check.measured:.2f}",
            f"{check.simulated:.2f}",
            f"[{style}]{check.miss:+.0%}[/]" if style else f"{check.miss:+.0%}",
        )
    return table


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table
