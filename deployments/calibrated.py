"""Owns the files that `outrider calibrate` leaves: a profile that emulates the pair, and its classes of requests.

What the policy is to begin with, `workloads` and `costs`, stands in the profile's section `speculation`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from bench.calibration import Calibration
from bench.comparison import EVERY_KIND
from bench.emulated_model import EMULATED
from deployments.config import Engine, OutriderConfig
from deployments.config_file import parse_config
from engine.info import EngineInfo
from router.acceptance import DRAFT_MODEL
from router.costs import CostDefaults

PROFILE, WORKLOADS = "profile.yaml", "workloads.yaml"
_DIGITS = 4


def write(
    folder: Path, about: str, calibration: Calibration, config: OutriderConfig, engines: tuple[EngineInfo, EngineInfo]
) -> list[Path]:
    """Writes both files and returns them.

    Args:
        about: what was measured, for people who open them.
        config: of the system that was measured.
        engines: what its target and its draft said of themselves.
    """
    profile, workloads = folder / PROFILE, folder / WORKLOADS
    content = profile_of(calibration, config, engines)
    content["speculation"]["workloads"] = str(workloads.resolve())
    classes = workloads_of(calibration)
    workloads.write_text(
        f"# {about}\n# Acceptance of the draft's first, second, … token of a round; for `speculation.workloads`.\n"
        f"{_dumped(classes)}",
        encoding="utf-8",
    )
    profile.write_text(
        f"# MEASURED, then emulated. {about}\n# {simulate_command(folder, calibration)}\n{_dumped(content)}",
        encoding="utf-8",
    )
    parse_config(content, str(profile))  # what is written can be read
    return [profile, workloads]


def workloads_of(calibration: Calibration) -> dict[str, Any]:
    """The classes that were tried often enough. All of them together are one only where there are no others."""
    rates = calibration.acceptance
    chosen = {kind: each for kind, each in rates.items() if kind != EVERY_KIND} or dict(rates)
    return {kind: {"draft_acceptance": list(each)} for kind, each in chosen.items()}


def profile_of(
    calibration: Calibration, config: OutriderConfig, engines: tuple[EngineInfo, EngineInfo]
) -> dict[str, Any]:
    """The configuration of the same system on emulated devices; the same shapes, sizes and limits."""
    target, draft = engines
    emulation = calibration.emulation.model_dump(include={"target", "draft", "alpha", "recall", "num_ranked"})
    return {
        "emulation": emulation,
        "target": _section(config.target, target),
        "draft": _section(config.draft, draft),
        "speculation": {
            "drafters": [DRAFT_MODEL],
            "max_draft_tokens": config.speculation.max_draft_tokens,
            "costs": costs_of(calibration),
        },
        "router": {"max_concurrent": config.router.max_concurrent},
    }


def costs_of(calibration: Calibration) -> dict[str, float]:
    """For `speculation.costs`: a round of one session that waits for a proposal of middle length takes as long as it
    does in the simulator.
    """
    load = calibration.setup().load(1)
    verify_s = load.target.seconds(1, 1 + (calibration.max_draft_tokens + 1) // 2)
    costs = CostDefaults.measured(verify_s, load.draft.seconds(1, 1), load.wait_s + load.gap_s)
    return {name: float(f"{seconds:.{_DIGITS}g}") for name, seconds in asdict(costs).items()}


def simulate_command(folder: Path, calibration: Calibration) -> str:
    """What a person types to go on from here."""
    words = ["outrider", "simulate", "--profile", str(folder / PROFILE), "--workloads", str(folder / WORKLOADS)]
    words += ["--acceptance", ",".join(f"{rate:g}" for rate in calibration.rates)]
    if calibration.hit_rate is not None:
        words += ["--hit-rate", f"{calibration.hit_rate:.3g}"]
    words += ["--context", str(calibration.context), "--max-draft-tokens", str(calibration.max_draft_tokens)]
    for name, value in calibration.assumptions.items():
        words += ["--assume", f"{name}={value:g}"]
    return shlex.join(words)


def _section(engine: Engine, info: EngineInfo) -> Mapping[str, Any]:
    return {
        "model": EMULATED,
        "reproducible": engine.reproducible.model_dump(),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_sessions": engine.max_sessions,
        "kv_cache": {"num_blocks": info.num_blocks, "block_size": info.block_size},
    }


def _dumped(content: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None, width=110)
    return text
