"""Owns the `outrider` command: which subcommands there are, and how a failure ends it: one line, a status."""

from __future__ import annotations

import os
import sys

import typer

from deployments.commands import (
    api_key,
    bench,
    bench_grid,
    calibrate,
    demo,
    generate,
    measure,
    pair,
    peers,
    render,
    serve,
    simulate,
    top,
    trace,
    train,
)
from deployments.config_file import ConfigError
from deployments.console import fail
from engine.errors import OutriderError

app = typer.Typer(
    help="Lossless speculative decoding, served: a small draft model rides ahead of a large target model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("api-key")(api_key.api_key)
app.command("check-pair")(pair.check_pair)
app.add_typer(train.app, name="train")
app.command("bench")(bench.bench)
app.command("bench-grid")(bench_grid.bench_grid)
app.command("bench-peers")(peers.bench_peers)
app.command("bench-engine")(measure.engine)
app.command("bench-memory")(measure.memory)
app.command("render")(render.render)
app.command("trace")(trace.trace)
app.command("simulate")(simulate.simulate)
app.command("calibrate")(calibrate.calibrate)
app.command("top")(top.top)
app.command("demo")(demo.demo)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        status = app(args=arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        fail(error.format_message())
        return 2
    if isinstance(error, OutriderError):
        fail(error)
        return 2 if isinstance(error, ConfigError) else 1
    if os.environ.get("OUTRIDER_DEBUG"):
        raise error
    fail(f"unexpected {type(error).__name__}: {error} (OUTRIDER_DEBUG=1 shows where)")
    return 1
