"""Owns what a simulation says, to a terminal of 80 columns or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.simulation.memory import BLOCK_SIZE, MemoryPlan
from bench.simulation.montecarlo import Replies
from bench.simulation.roofline import RooflineDevice
from bench.simulation.scenario import AtLoad, Setup, WorkloadRow
from bench.simulation.speedup import Speed, tokens_per_round

if TYPE_CHECKING:
    from rich.table import Table

MODEL = "A model, not a measurement."
LEFT_OUT = (
    "prompts and their prefill, arrivals and queues, the n-gram drafter, trees, requests that differ from each other, "
    "acceptance that changes within a reply, KV read unevenly, preemption, and a host too slow for its GPUs"
)
_LOADS_SIDE_BY_SIDE = 3  # in the matrix
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Report:
    """All that a simulation says.

    Attributes:
        acceptance: by position, of the requests that `loads` are about.
        memory: of a GPU of the target and one of the draft; empty where neither was named.
        luck: tokens per round of single replies; None where no K pays.
    """

    setup: Setup
    acceptance: tuple[float, ...]
    context: int
    memory: tuple[MemoryPlan, ...]
    loads: tuple[AtLoad, ...]
    matrix: tuple[WorkloadRow, ...]
    luck: Replies | None

    def as_json(self) -> dict[str, Any]:
        """All of it, in seconds and bytes."""
        return {
            "simulated": True,
            "left_out": LEFT_OUT,
            "assumptions": self.setup.assumptions.model_dump(),
            "acceptance": self.acceptance,
            "context": self.context,
            "forwards": [self._forwards(load) for load in self.loads],
            "memory": [
                {**asdict(p), "headroom": p.headroom, "fits": p.fits, "advice": p.advice()} for p in self.memory
            ],
            "loads": [asdict(load) for load in self.loads],
            "workloads": [asdict(row) for row in self.matrix],
            "luck": None if self.luck is None else asdict(self.luck),
        }

    def parts(self) -> Iterator[Table | str]:
        """Tables and paragraphs, in order."""
        yield f"[bold]{MODEL}[/] It leaves out {LEFT_OUT}.\n"
        yield self._times()
        if self.memory:
            yield self._memory()
            yield from (f"{p.model} does not fit; what would: {p.advice()}" for p in self.memory if not p.fits)
        yield self._speeds()
        yield from self._cap(self.loads)
        if self.luck is not None:
            yield self._luck(self.luck)
        for first in range(0, len(self.loads), _LOADS_SIDE_BY_SIDE):
            yield self._matrix(range(len(self.loads))[first : first + _LOADS_SIDE_BY_SIDE])
        yield from self._cap([load for row in self.matrix for load in row.loads])
        assumed = ", ".join(f"{name} {value:g}" for name, value in self.setup.assumptions.model_dump().items())
        yield f"[dim]Assumed (--assume NAME=VALUE changes it): {assumed}[/]"

    def _forwards(self, load: AtLoad) -> dict[str, float]:
        """Seconds of the forwards of one load; those of the parts of a plain one where they are known."""
        setup, number = self.setup, load.num_sessions
        seconds = {
            "sessions": number,
            "plain_s": setup.target.seconds(number, 1.0),
            "verify_s": setup.target.seconds(number, 1.0 + load.ahead.num_speculative_tokens),
            "draft_s": setup.draft.seconds(number, 1.0),
        }
        if isinstance(setup.target, RooflineDevice):
            seconds |= asdict(setup.target.forward(number, 1.0))
        return seconds

    def _times(self) -> Table:
        """Milliseconds of forwards."""
        by_load = [self._forwards(load) for load in self.loads]
        is_roofline = isinstance(self.setup.target, RooflineDevice)
        parts = ("memory_s", "compute_s", "launch_s", "communication_s") if is_roofline else ()
        heads = ("memory", "compute", "launches", "all-reduce") if is_roofline else ()
        source = "worked out from data sheets" if is_roofline else "from the profile"
        title = f"Forwards, ms, at a context of {self.context} ({source})"
        table = _table(title, "sessions", "plain", *(f"{head}" for head in heads), "K+1 rows", "draft step")
        for each in by_load:
            names = ("plain_s", *parts, "verify_s", "draft_s")
            table.add_row(f"{each['sessions']:g}", *(f"{1e3 * each[name]:.2f}" for name in names))
        return table

    def _memory(self) -> Table:
        most = max(load.num_sessions for load in self.loads)
        title = f"Memory of each GPU, GB of 10^9 bytes, with {most} sessions of {self.context} tokens"
        table = _table(title, "model", "GPUs", "usable", "weights", "KV blocks", "KV", "headroom", "most sessions")
        for p in self.memory:
            sizes = (p.usable, p.weights)
            table.add_row(
                p.model,
                f"{p.num_gpus}",
                *(f"{size / _GB:.1f}" for size in sizes),
                f"{p.num_blocks} × {BLOCK_SIZE}",
                f"{p.kv_blocks / _GB:.1f}",
                f"[{'green' if p.fits else 'red'}]{p.headroom / _GB:.1f}[/]",
                f"{p.most_sessions}",
            )
        return table

    def _speeds(self) -> Table:
        title = f"Best K and speed, all sessions together, at an acceptance of {_rates(self.acceptance)}"
        table = _table(title, "sessions", "plain tok/s", "waiting K", "×", "ahead K", "×", "tok/s", "hits", "a miss")
        for load in self.loads:
            ahead = load.ahead
            table.add_row(
                f"{load.num_sessions}",
                f"{load.plain.tokens_per_s:.0f}",
                *_choice(load.waiting),
                *_choice(ahead),
                f"{ahead.tokens_per_s:.0f}",
                f"{ahead.hit_rate:.0%}" if ahead.hit_rate else "",
                {"wait": "waits", "plain": "goes on"}.get(ahead.misses, ""),
            )
        return table

    def _cap(self, loads: Sequence[AtLoad]) -> Iterator[str]:
        """A line, where a K that stands above it is only the largest that was allowed."""
        if any(load.is_capped for load in loads):
            size = self.setup.max_draft_tokens
            yield f"K {size} is the most that --max-draft-tokens allows here; more may be better"

    def _luck(self, luck: Replies) -> str:
        size = round(self.loads[0].waiting.num_speculative_tokens)
        return (
            f"Drawn, {luck.num_replies} replies of {luck.num_tokens} tokens at K {size}: {luck.mean:.2f} tokens per "
            f"round (formula {tokens_per_round(self.acceptance, size):.2f}); single replies, by luck alone, "
            f"{luck.low:.2f} to {luck.high:.2f} (p10–p90)\n"
        )

    def _matrix(self, numbers: Sequence[int]) -> Table:
        """Classes of requests against some loads; the title stands above the first of them."""
        heads = [f"{self.loads[n].num_sessions} {how}" for n in numbers for how in ("wait", "ahead")]
        title = None if numbers[0] else "Workloads: best K and × plain, by sessions"
        table = _table(title, "class", "acceptance", *heads)
        for row in self.matrix:
            cells = [speed for n in numbers for speed in (row.loads[n].waiting, row.loads[n].ahead)]
            table.add_row(row.workload, _rates(row.acceptance), *(" ".join(_choice(speed)) for speed in cells))
        return table


def _choice(speed: Speed) -> tuple[str, str]:
    """K and × plain; "off" where it does not pay."""
    size = speed.num_speculative_tokens
    if not size:
        return "off", "1.00"
    return (f"{size:.0f}" if size == int(size) else f"{size:.1f}"), f"{speed.speedup:.2f}"


def _rates(acceptance: Sequence[float]) -> str:
    return "/".join(f"{rate:.2f}".lstrip("0") if rate < 1.0 else "1" for rate in acceptance)


def _table(title: str | None, first: str, *heads: str) -> Table:
    """As those of `outrider bench`."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table
