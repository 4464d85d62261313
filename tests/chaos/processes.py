"""Which process is which replica or rank of the system under test, told by the sockets they hold."""

from __future__ import annotations

import psutil

FOLLOWER = "ray::_Follower"


def workers(name: str) -> list[psutil.Process]:
    """The living Ray workers below this process whose title begins with `name`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(name) and process.is_running():
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def replica(deployment: str, address: str) -> psutil.Process:
    """The replica of `deployment` that listens at `address`."""
    port = int(address.rpartition(":")[2])
    for process in workers(f"ray::ServeReplica:outrider:{deployment}"):
        if port in listening_ports(process):
            return process
    raise LookupError(f"no replica of {deployment} listens at {address}")


def followers(leader: psutil.Process) -> list[psutil.Process]:
    """The follower ranks of a leader: those that are connected to a port it listens on."""
    ports = listening_ports(leader)
    return [
        process
        for process in workers(FOLLOWER)
        if any(each.raddr and each.raddr.port in ports for each in process.net_connections("tcp"))
    ]


def listening_ports(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
