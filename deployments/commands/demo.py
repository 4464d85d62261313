"""Owns `outrider demo`: the whole system started, four kinds of prompt answered, and stopped again."""

from __future__ import annotations

from dataclasses import dataclass

import typer
from rich.table import Table

from cluster.local import free_port
from deployments.client import Ask, Client, Result
from deployments.commands.generate import write_text
from deployments.config import OutriderConfig
from deployments.config_file import load_config
from deployments.console import out, stage
from deployments.system import local_system

MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Showing:
    """A prompt of the demo: its kind, what is asked, and what was said before."""

    kind: str
    message: str
    before: tuple[tuple[str, str], ...] = ()
    temperature: float = 0.0

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in (*self.before, ("user", self.message))]


_TOOLS = """You call tools. These are yours:
[{"name": "get_tide", "description": "Next high or low tide of a harbour", "parameters": {"harbour": "string", \
"which": "high or low"}}, {"name": "get_wind", "description": "Wind at a place", "parameters": {"place": "string", \
"unit": "knots or m/s"}}]
Answer with exactly one JSON object {"name": TOOL, "arguments": {...}} and nothing else."""

SHOWINGS = (
    Showing("code", "Write a Python function that counts how often each word occurs in a text file."),
    Showing(
        "tool call",
        "How strong is the wind in Bergen, in m/s? Reply with the JSON object only.",
        before=(
            ("system", _TOOLS),
            ("user", "When is the next high tide in Ostend? Reply with the JSON object only."),
            ("assistant", '{"name": "get_tide", "arguments": {"harbour": "Ostend", "which": "high"}}'),
        ),
    ),
    Showing("reasoning", "A tram has 6 rows of 4 seats. 15 seats are taken. How many are free? Think step by step."),
    Showing("story", "Tell a short story about a clockmaker who is always late.", temperature=1.0),
)


def demo(
    config: str = typer.Option("demo", help="YAML file, or a bundled configuration."),
    max_tokens: int = typer.Option(MAX_TOKENS, min=2, help="Most tokens of each answer."),
) -> None:
    """Start everything, answer one prompt of each of four kinds, show what speculation did, stop everything."""
    with local_system(_on_free_ports(load_config(config))) as address, Client(address) as client:
        client.generate(_ask(SHOWINGS[0], 8, "auto"))  # the first request also touches every page of the weights
        results = [(showing, *_show(client, showing, max_tokens)) for showing in SHOWINGS]
    out.print()
    out.print(_table(results))


def _on_free_ports(config: OutriderConfig) -> OutriderConfig:
    """A demo must not care what else listens on this machine."""
    ports = {"grpc_port": free_port(), "http_port": free_port()}
    return config.model_copy(update={"server": config.server.model_copy(update=ports)})


def _show(client: Client, showing: Showing, max_tokens: int) -> tuple[Result, Result]:
    """The answer, streamed, and the same prompt decoded plainly, in silence."""
    at = f", temperature {showing.temperature:g}" if showing.temperature else ""
    out.print(f"\n[bold]{showing.kind}{at}[/]  [dim]{showing.message}[/]", soft_wrap=True)
    result = client.generate(_ask(showing, max_tokens, "auto"), write_text)
    write_text("\n")
    with stage("the same prompt without speculation"):
        plain = client.generate(_ask(showing, max_tokens, "off"))
    return result, plain


def _ask(showing: Showing, max_tokens: int, speculation: str) -> Ask:
    return Ask(
        messages=showing.messages,
        speculation=speculation,
        sampling={"temperature": showing.temperature, "max_tokens": max_tokens},
    )


def _table(results: list[tuple[Showing, Result, Result]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("prompt")
    for name in ("tokens/s", "plain", "×", "accepted", "per round", "K"):
        table.add_column(name, justify="right")
    table.add_column("off because")
    for showing, result, plain in results:
        stats = result.complete.speculation
        speed, plain_speed = (each.complete.timing.decode_tokens_per_s for each in (result, plain))
        table.add_row(
            showing.kind,
            f"{speed:.1f}",
            f"{plain_speed:.1f}",
            f"{speed / plain_speed:.2f}" if plain_speed else "–",
            f"{stats.acceptance_rate:.0%}" if stats.draft_tokens else "–",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.mean_num_speculative_tokens:.1f}" if stats.draft_tokens else "0",
            stats.switched_off_reason or "–",
        )
    return table
