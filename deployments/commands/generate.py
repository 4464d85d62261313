"""Owns `outrider generate`: one request to a running server."""

from __future__ import annotations

import enum
import json
import sys
from typing import Annotated

import typer

from deployments.channels import API_KEY
from deployments.client import Ask, Client, Result, default_address
from deployments.console import err


class Speculating(enum.StrEnum):
    """What a caller may ask of speculation."""

    AUTO = "auto"
    OFF = "off"


def generate(
    prompt: Annotated[str | None, typer.Option(help="Raw prompt text; - reads standard input.")] = None,
    message: Annotated[str | None, typer.Option(help="User message, put through the chat template.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
    speculation: Annotated[Speculating, typer.Option(help="Speculate, or decode plainly.")] = Speculating.AUTO,
    drafter: Annotated[str, typer.Option(help="auto, draft_model or ngram.")] = "",
    max_draft_tokens: Annotated[int | None, typer.Option(min=0, help="Most draft tokens a round (K).")] = None,
    workload: Annotated[str, typer.Option(help="Class of the request: code, sql, tool_call, reasoning, chat, …")] = "",
    smooth_stream: Annotated[bool, typer.Option(help="Deliver tokens one by one, at an even pace.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling, in (0, 1].")] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text, whatever else runs.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Most tokens to generate.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Least tokens to generate.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-sequence token.")] = False,
    request_id: Annotated[str, typer.Option(help="What replies, logs and traces call it; made if not given.")] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds after which to give up.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="host:port, or https://host:port for TLS; default is what `outrider serve` printed."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY, help="API key or token; others on this machine see what is typed here."),
    ] = None,
) -> None:
    """Send one request and stream its text."""
    if (prompt is None) == (message is None):
        raise typer.BadParameter("give exactly one of --prompt and --message")
    chosen = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
        "max_tokens": max_tokens, "min_tokens": min_tokens, "stop": stop or [], "ignore_eos": ignore_eos,
    }  # fmt: skip
    ask = Ask(
        prompt=_standard_input() if prompt == "-" else prompt,
        messages=None if message is None else [{"role": "user", "content": message}],
        speculation=speculation.value,
        drafter=drafter,
        max_draft_tokens=max_draft_tokens,
        workload=workload,
        smooth_stream=smooth_stream,
        request_id=request_id,
        sampling={name: value for name, value in chosen.items() if value is not None},
    )
    with Client(address or default_address(), api_key=api_key) as client:
        if as_json:
            result = client.generate(ask, timeout_s=timeout)
            sys.stdout.write(json.dumps(result.as_dict(), ensure_ascii=False) + "\n")
        else:
            result = client.generate(ask, write_text, timeout)
            write_text("\n")
            err.print(f"[dim]{summary(result)}[/]", soft_wrap=True)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"--prompt -: standard input is not UTF-8 at byte {error.start}") from error


def write_text(text: str) -> None:
    """Text as it comes, unbuffered and unstyled."""
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(result: Result) -> str:
    """One line on how a request went."""
    complete = result.complete
    stats, timing = complete.speculation, complete.timing
    parts = [
        complete.finish_reason,
        f"{complete.usage.prompt_tokens}+{complete.usage.completion_tokens} tokens",
        f"first after {timing.ttft_ms:.0f} ms",
        f"{timing.decode_tokens_per_s:.1f} tokens/s",
    ]
    if stats.draft_tokens:
        parts.append(f"{stats.acceptance_rate:.0%} accepted, {stats.mean_acceptance_length:.2f} tokens a round")
    if stats.switched_off_reason:
        parts.append(f"speculation off: {stats.switched_off_reason}")
    return " · ".join([*parts, f"request {result.request_id}"])
