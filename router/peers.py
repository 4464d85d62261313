"""Owns which targets and drafts a router can use now, and how many sessions it has on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from engine.errors import Unavailable
from router.ports import DraftPort, TargetPort

PortT = TypeVar("PortT")


class Pool(Generic[PortT]):
    """Replicas of one kind, by name. Whoever discovers peers replaces them; sessions on a lost one see its errors."""

    def __init__(self) -> None:
        self._ports: dict[str, PortT] = {}
        self._load: Counter[str] = Counter()

    def replace(self, ports: Mapping[str, PortT]) -> None:
        self._ports = dict(ports)

    def pick(self) -> tuple[str, PortT] | None:
        """The replica with the fewest of this router's sessions; None when there is none."""
        if not self._ports:
            return None
        name = min(self._ports, key=lambda candidate: self._load[candidate])
        return name, self._ports[name]

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

    def pick_target(self) -> tuple[str, TargetPort]:
        """Raises Unavailable when no target is there."""
        picked = self.targets.pick()
        if picked is None:
            raise Unavailable("no target is ready")
        return picked
