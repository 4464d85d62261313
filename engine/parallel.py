"""Owns the process group of a tensor-parallel target: how its ranks find each other, and how rank 0 leads a step.

There are two groups. The *data* group carries activations (NCCL between GPUs, gloo between CPUs) under a timeout of
tens of seconds: a rank that hangs in a forward raises on the others. The *control* group (gloo) carries what rank 0
plans; followers answer nothing, and wait in it for as long as nothing is asked. A leader that dies is noticed all the
same, because its connections end and that raises at once; one that hangs while nothing is asked harms nobody, and is
found by whoever watches its health. A group is never repaired: after a failure its processes are to be replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but re-exported by a star

from engine.errors import Unavailable

_log = logging.getLogger(__name__)

LEADER = 0
_CONTROL_TIMEOUT = timedelta(days=3650)
_PLAN_INTS = 8192  # one broadcast carries so many; a longer plan takes a second one
_END = 0  # a plan's length is above 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process belongs; what it needs to join.

    Attributes:
        rank, size: this process, and how many there are; rank 0 leads.
        host, port: where rank 0 holds the rendezvous.
        timeout_s: after which a rank that keeps the others waiting in a forward counts as hung.
        join_timeout_s: after which ranks that have not come make joining fail; it covers the start of processes.
    """

    rank: int
    size: int
    host: str
    port: int
    timeout_s: float
    join_timeout_s: float


class Rendezvous:
    """Where the ranks meet: a TCPStore on a free port, bound once and held, so that nobody else can take the port.

    Args:
        host: a name or address of this machine that the other ranks can reach.
        size: how many ranks there will be, at least 2.
        timeout_s, join_timeout_s: as in Place.
    """

    def __init__(self, host: str, size: int, timeout_s: float = 20.0, join_timeout_s: float = 120.0) -> None:
        if size < 2:
            raise ValueError(f"a group of {size} has nobody to meet")
        self.host, self.size = host, size
        self._timeouts = (timeout_s, join_timeout_s)
        self.store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=join_timeout_s)
        )
        self.port: int = self.store.port

    def place(self, rank: int) -> Place:
        return Place(rank, self.size, self.host, self.port, *self._timeouts)


def join(place: Place, device: str, rendezvous: Rendezvous | None = None) -> TensorParallel:
    """Joins the group; returns when all ranks have.

    Args:
        place: of this process.
        device: the torch device it computes on.
        rendezvous: rank 0's own, which the group then holds; None elsewhere.

    Raises:
        Unavailable: rank 0 cannot be reached, or ranks are missing when the time to join is over.
    """
    at = torch.device(device)
    is_cuda = at.type == "cuda"
    if is_cuda:
        at = torch.device("cuda", at.index or 0)
        os.environ["LOCAL_RANK"] = str(at.index)  # transformers binds to this device; a process sees one, as a rule
        torch.cuda.set_device(at)
    try:
        store = rendezvous.store if rendezvous else _reach(place)
        _await_ranks(store, place)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=place.timeout_s),
            device_id=at if is_cuda else None,
        )
        control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    except RuntimeError as error:
        raise Unavailable(f"rank {place.rank} of {place.size} could not join: {_first_line(error)}") from error
    assert control is not None
    return TensorParallel(place, control, rendezvous)


def _reach(place: Place) -> Store:
    return TCPStore(place.host, place.port, is_master=False, timeout=timedelta(seconds=place.join_timeout_s))


def _await_ranks(store: Store, place: Place) -> None:
    """Waits here for processes that start slowly, so that the group's own short timeout need not."""
    keys = {rank: f"outrider/joined/{rank}" for rank in range(place.size)}
    store.set(keys[place.rank], "")
    try:
        store.wait(list(keys.values()), timedelta(seconds=place.join_timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise Unavailable(
            f"ranks {missing} of {place.size} have not joined within {place.join_timeout_s:g} s"
        ) from error


class TensorParallel:
    """This process's membership in a joined group.

    Args:
        place: of this process.
        control: the gloo group that carries plans. The data group is torch's default group.
        rendezvous: rank 0's, kept for as long as the group is, because subgroups are made through it.
    """

    def __init__(self, place: Place, control: dist.ProcessGroup, rendezvous: Rendezvous | None = None) -> None:
        self.rank, self.size = place.rank, place.size
        self._timeout = timedelta(seconds=place.timeout_s)
        self._control, self._rendezvous = control, rendezvous
        self._plan = torch.zeros(_PLAN_INTS, dtype=torch.int32)
        self._leading, self._closed, self._lost = False, False, ""

    # The control group.

    def wait_until_loaded(self) -> None:
        """Returns when every rank has come here; reading a shard may take one much longer than another."""
        with self.together("loading"):
            dist.barrier(group=self._control)
        self._leading = self.rank == LEADER

    def send_step(self, plan: Sequence[int]) -> None:
        """Tells the followers what to compute next. Rank 0 only.

        Args:
            plan: at least one integer, each within int32.
        """
        kept = _PLAN_INTS - 1
        self._plan[0] = len(plan)
        self._plan[1 : 1 + len(plan[:kept])] = torch.tensor(plan[:kept], dtype=torch.int32)
        self._send(self._plan)
        if len(plan) > kept:
            self._send(torch.tensor(plan[kept:], dtype=torch.int32))

    def next_step(self) -> list[int] | None:
        """Waits, without limit, for what rank 0 sends next; None when it has closed. Followers only.

        Raises:
            Unavailable: rank 0 is gone.
        """
        with self.together("waiting for rank 0"):
            dist.broadcast(self._plan, LEADER, group=self._control)
            length = int(self._plan[0])
            plan: list[int] = self._plan[1 : 1 + length].tolist()
            if length > len(plan):
                rest = torch.empty(length - len(plan), dtype=torch.int32)
                dist.broadcast(rest, LEADER, group=self._control)
                plan += rest.tolist()
        return plan if length != _END else None

    def _send(self, values: torch.Tensor) -> None:
        # Long plans do not fit the sockets' buffers: unlike followers, the leader must not wait for ever.
        work = dist.broadcast(values, LEADER, group=self._control, async_op=True)
        assert work is not None
        work.wait(self._timeout)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Around whatever all ranks do together. A failure in it leaves the ranks out of step: nothing more is done.

        Raises:
            Unavailable: this or another rank failed, is gone, or hung for longer than the timeout.
        """
        if self._lost:
            raise Unavailable(self._lost)
        try:
            yield
        except Exception as error:
            self._lost = f"rank {self.rank} of {self.size}, {doing}: {_first_line(error)}"
            if not isinstance(error, RuntimeError):
                raise
            _log.error("the tensor-parallel group is lost: %s", self._lost, exc_info=error)
            raise Unavailable(f"the tensor-parallel group is lost: {self._lost}") from error

    # The data group. All ranks call these in the same order with the same shapes.

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, which is overwritten. The order of addition may differ between elements."""
        dist.all_reduce(part)
        return part

    def ordered_sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part` in order of rank, in float32, so that equal parts have equal sums.

        A ring all-reduce starts each segment of the tensor at another rank: with three ranks or more, the last bit of
        a row's sum would depend on where in the batch the row stands.
        """
        parts = self.gather(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' `part` [...] as [size, ...]."""
        part = part.contiguous()
        parts = part.new_empty((self.size, *part.shape))
        dist.all_gather(list(parts.unbind()), part)
        return parts

    def close(self) -> None:
        """Leaves the group; rank 0 first tells the followers to end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._leading and not self._lost:
            self._plan[0] = _END
            try:
                self._send(self._plan)
            except RuntimeError as error:
                _log.warning("a follower was gone before the end: %s", _first_line(error))
        self._lost = self._lost or "it was closed"
        dist.destroy_process_group()
        del self._control  # the last reference closes its connections, which is how others learn of it


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
