"""Owns which targets and drafts a router can use now, and how many sessions it has on each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from engine.errors import DeadlineExceeded, Unavailable
from router.placement import least_loaded, nearest_with_room
from router.ports import DraftPort, TargetPort

PortT = TypeVar("PortT")


def _look_nowhere() -> None:
    """Nobody discovers peers: they are what they were last said to be."""


class Pool(Generic[PortT]):
    """Replicas of one kind, by name. Whoever discovers peers replaces them; sessions on a lost one see its errors.

    Attributes:
        look: asks whoever discovers peers to look at once, because a replica is missed; set by them.
        arrivals: replicas that have come so far; whoever was let down by one may try the next.
    """

    def __init__(self) -> None:
        self._ports: dict[str, PortT] = {}
        self._listed: dict[str, PortT] = {}
        self._load: Counter[str] = Counter()
        self._replaced = asyncio.Event()
        self.look: Callable[[], None] = _look_nowhere
        self.arrivals = 0

    def replace(self, ports: Mapping[str, PortT]) -> None:
        # One that was lost and is still listed has not come anew.
        self.arrivals += sum(1 for name, port in ports.items() if self._listed.get(name) is not port)
        self._listed, self._ports = dict(ports), dict(ports)
        self._replaced.set()
        self._replaced = asyncio.Event()

    def lose(self, name: str, port: PortT) -> None:
        """A session's stream to the replica broke: nobody picks it before it has been discovered anew."""
        if self._ports.get(name) is port:
            del self._ports[name]
        self.look()

    def pick(self) -> tuple[str, PortT] | None:
        """The replica with the fewest of this router's sessions; None when there is none."""
        if not self._ports:
            return None
        name = least_loaded(self._ports, self._load)
        return name, self._ports[name]

    def pick_near(self, key: int) -> tuple[str, PortT] | None:
        """The replica where sessions of this key are wont to go, unless it is crowded; None when there is none."""
        if not self._ports:
            return None
        name = nearest_with_room(self._ports, self._load, key)
        return name, self._ports[name]

    async def available(self, patience_s: float) -> bool:
        """Waits until there is a replica; False when none came within `patience_s`."""
        if self._ports or patience_s <= 0.0:
            return bool(self._ports)
        self.look()
        try:
            async with asyncio.timeout(patience_s):
                while not self._ports:
                    await self._replaced.wait()
        except TimeoutError:
            return False
        return True

    def took(self, name: str) -> None:
        """A session was opened on the replica."""
        self._load[name] += 1

    def gave_back(self, name: str) -> None:
        """A session that `took` counted is closed."""
        self._load[name] -= 1
        if not self._load[name]:
            del self._load[name]

    def any(self) -> PortT | None:
        """Some replica, to ask what all have in common."""
        return next(iter(self._ports.values()), None)

    @property
    def open_sessions(self) -> int:
        return self._load.total()


class PeerSet:
    """The targets and drafts of one router."""

    def __init__(self) -> None:
        self.targets: Pool[TargetPort] = Pool()
        self.drafts: Pool[DraftPort] = Pool()

    async def target_ready(self, wait_s: float, time_left_s: float) -> None:
        """Returns once there is a target.

        Args:
            wait_s: longest wait.
            time_left_s: seconds to the request's deadline; infinite without one.

        Raises:
            Unavailable: none came within wait_s.
            DeadlineExceeded: none came before the deadline.
        """
        if await self.targets.available(min(wait_s, time_left_s)):
            return
        if time_left_s <= wait_s:
            raise DeadlineExceeded("the deadline passed before a target was ready")
        raise Unavailable("no target is ready")
