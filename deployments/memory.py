"""Owns telling an operator, before anything is loaded, where a target's memory will go."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deployments.config import OutriderConfig
from deployments.engine_settings import target_settings
from engine.memory import RankMemory, available_bytes, plan_memory


def target_memory(config: OutriderConfig, copies_here: int = 1) -> tuple[RankMemory, ...]:
    """What each rank of a copy of the target will hold.

    Args:
        config: the whole configuration.
        copies_here: copies of the target that share this machine's memory; without meaning for GPUs, which are not
            shared.

    Raises:
        ModelNotFound: no model there.
        InvalidArgument: the model cannot be cut so, or does not fit; the message says what would.
    """
    settings, size = target_settings(config), config.target.tensor_parallel_size
    sharing = 1 if settings.device.startswith("cuda") else size * copies_here
    return plan_memory(settings, size, available_bytes(settings.device) // sharing)


def memory_table(ranks: Sequence[RankMemory]) -> Table:
    """One line for each rank, in GiB."""
    table = Table("rank", title="Target memory, GiB per rank", title_justify="left", title_style="bold")
    for name in ("weights", "KV blocks", "activations", "free", "of"):
        table.add_column(name, justify="right")
    for rank in ranks:
        sizes = (rank.weights, rank.kv_blocks, rank.activations, rank.free, rank.available)
        table.add_row(str(rank.rank), *(f"{size / 2**30:.2f}" for size in sizes))
    return table
