"""Owns a wire between two network namespaces: this one and a new one, with delay, jitter, loss, and a plug to pull.

Each end is a TUN device. A process reads the IP packets of either and writes them to the other when they are due. That
process makes namespace and devices, and takes them away with all that still runs in there when its input ends: also
when whoever started it was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_PACKET_BYTES = 1 << 16
_NUM_SUBNETS = 1 << 15  # of four addresses each in 198.18.0.0/15, which is set aside for tests of networks
_READY, _CUT, _MEND = b"ready\n", b"cut\n", b"mend\n"


class NotPermitted(Exception):
    """This machine lets us make no namespace or no TUN device; the message says which."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What packets go through on their way, in either direction. They arrive in order.

    Attributes:
        delay_s: seconds from one end to the other.
        jitter_s: up to so many seconds more, uniformly.
        loss: share of packets that never arrive.
        seed: of jitter and loss.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    seed: int = 0


class Wire:
    """A wire to a namespace that exists while the `with` block runs.

    Attributes:
        near: IPv4 address of the end in this namespace.
        far: of the other end.

    Raises:
        NotPermitted: on entering.
    """

    def __init__(self, conditions: Conditions) -> None:
        number = secrets.randbelow(_NUM_SUBNETS)
        self._name = f"wire{number}"
        subnet = f"198.{18 + (number >> 14)}.{number >> 6 & 255}."
        self.near, self.far = (f"{subnet}{(number & 63) * 4 + host}" for host in (1, 2))
        self._conditions = conditions

    def __enter__(self) -> Self:
        plan = json.dumps([self._name, self.near, self.far, asdict(self._conditions)])
        self._shuttle = subprocess.Popen(
            [sys.executable, "-I", __file__, plan],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for whoever holds the wire
        )
        assert self._shuttle.stdout is not None
        answer = self._shuttle.stdout.readline()
        if answer != _READY:
            self.__exit__(None, None, None)
            raise NotPermitted(answer.decode().strip() or "the wire's process ended")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._shuttle.communicate()

    def beyond(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in the far namespace."""
        return ["ip", "netns", "exec", self._name, *command]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing gets through while the block runs, not even what is on its way."""
        self._tell(_CUT)
        try:
            yield
        finally:
            self._tell(_MEND)

    def _tell(self, what: bytes) -> None:
        assert self._shuttle.stdin is not None
        assert self._shuttle.stdout is not None
        self._shuttle.stdin.write(what)
        self._shuttle.stdout.readline()


class _Lane:
    """Packets on their way in one direction, in order; `end` is the file descriptor where they come out."""

    def __init__(self, end: int, conditions: Conditions, seed: int) -> None:
        self._end, self._conditions, self._rng = end, conditions, random.Random(seed)
        self._packets: deque[tuple[float, bytes]] = deque()
        self._last_due = 0.0

    @property
    def next_due(self) -> float:
        return self._packets[0][0] if self._packets else float("inf")

    def enter(self, packet: bytes, now: float) -> None:
        conditions = self._conditions
        late_s = conditions.delay_s + conditions.jitter_s * self._rng.random()
        if self._rng.random() >= conditions.loss:
            self._last_due = max(self._last_due, now + late_s)
            self._packets.append((self._last_due, packet))

    def leave(self, now: float) -> None:
        while self.next_due <= now:
            os.write(self._end, self._packets.popleft()[1])

    def clear(self) -> None:
        self._packets.clear()


def _main(name: str, near: str, far: str, conditions: Conditions) -> None:
    with ExitStack() as cleanup:
        try:
            _ip("netns", "add", name)
            cleanup.callback(_remove, name)
            ends = [_tun(f"{name}-{side}", cleanup) for side in "nf"]
            _ip("link", "set", f"{name}-f", "netns", name)
            _bring_up(f"{name}-n", near)
            _bring_up(f"{name}-f", far, "-n", name)
            _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            os.write(sys.stdout.fileno(), f"no wire can be made here: {said}\n".encode())
            return
        os.write(sys.stdout.fileno(), _READY)
        _shuttle(ends, conditions)


def _shuttle(ends: list[int], conditions: Conditions) -> None:
    """Carries packets between the two ends until the input ends."""
    control = sys.stdin.fileno()
    lanes = {
        end: _Lane(other, conditions, 2 * conditions.seed + end) for end, other in zip(ends, ends[::-1], strict=True)
    }
    is_cut = False
    while True:
        wait_s = min(lane.next_due for lane in lanes.values()) - time.monotonic()
        readable, _, _ = select.select([control, *ends], [], [], max(0.0, wait_s) if wait_s < float("inf") else None)
        now = time.monotonic()
        for end in readable:
            if end != control:
                packet = os.read(end, _MAX_PACKET_BYTES)
                if not is_cut:
                    lanes[end].enter(packet, now)
                continue
            said = os.read(control, _MAX_PACKET_BYTES)
            if not said:
                return
            is_cut = said == _CUT
            for lane in lanes.values():
                lane.clear()
            os.write(sys.stdout.fileno(), said)
        for lane in lanes.values():
            lane.leave(time.monotonic())


def _tun(name: str, cleanup: ExitStack) -> int:
    """Opens a new TUN device of whole IP packets; it goes when it is closed."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    cleanup.callback(os.close, end)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _bring_up(device: str, address: str, *where: str) -> None:
    _ip(*where, "address", "add", f"{address}/30", "dev", device)
    _ip(*where, "link", "set", device, "up")


def _remove(name: str) -> None:
    """A namespace lives as long as a process is in it, whatever its name."""
    while pids := _ip("netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    _name, _near, _far, _conditions = json.loads(sys.argv[1])
    _main(_name, _near, _far, Conditions(**_conditions))
