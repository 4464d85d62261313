"""Everything at once: load, cancellations, deadlines, bursts, and parts that die in turn; at the end the books balance.

SOAK_SECONDS says how long (`make soak` takes 20 minutes). What is printed is the ledger, and for each kind of fault the
longest silence a stream had in it and how long the system took to be whole again.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import grpc
import pytest
from rich.console import Console
from rich.table import Table

from deployments.client import Ask, CallFailed, Client
from tests.chaos import processes
from tests.chaos.conftest import System
from tests.chaos.ledger import Entry, Ledger, Outcome
from tests.waiting import until

SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))

pytestmark = [
    pytest.mark.serve,
    pytest.mark.chaos,
    pytest.mark.timeout(SECONDS + 400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

NUM_CALLERS, BURST, MAX_TOKENS = 6, 250, 240
PROMPTS = ("the fox", "x", "grüße 🦊", "the long way round")
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 11})


@dataclass(slots=True)
class Fault:
    """What was done to the system, when, and how long it took to be whole again."""

    name: str
    at: float
    healed_s: float = 0.0
    silence_s: float = 0.0


@dataclass(slots=True)
class Soak:
    """What callers and faults share."""

    system: System
    references: dict[tuple[str, int], tuple[int, ...]]
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[Fault] = field(default_factory=list)
    silences: list[tuple[float, float]] = field(default_factory=list)  # when it ended, seconds
    over: threading.Event = field(default_factory=threading.Event)

    def call(self, client: Client, rng: random.Random) -> None:
        """One request of a caller's mix, and its entry."""
        prompt, kind = rng.choice(PROMPTS), rng.randrange(len(SAMPLINGS))
        max_tokens = rng.choice((30, 90, MAX_TOKENS))
        sampling = {**SAMPLINGS[kind], "max_tokens": max_tokens, "ignore_eos": True}
        ask = Ask(prompt=prompt, sampling=sampling, speculation=rng.choice(("auto", "auto", "off")))
        cancel_after = rng.randrange(1, 30) if rng.random() < 0.15 else 0
        timeout_s = rng.uniform(0.05, 0.5) if rng.random() < 0.05 else None
        reference = self.references[prompt, kind][:max_tokens]
        self.ledger.entries.append(self._outcome(client, ask, reference, cancel_after, timeout_s))

    def _outcome(
        self, client: Client, ask: Ask, reference: tuple[int, ...], cancel_after: int, timeout_s: float | None
    ) -> Entry:
        outcome: Outcome = "failed"
        finish_reason = detail = ""
        stream, heard_at = client.stream(ask, timeout_s), math.inf  # before the first token it waits for its turn
        try:
            for num_pieces, response in enumerate(stream, start=1):
                now = time.monotonic()
                self.silences.append((now, max(now - heard_at, 0.0)))
                heard_at = now
                if response.HasField("complete"):
                    outcome, finish_reason = "completed", response.complete.finish_reason
                elif num_pieces == cancel_after:
                    outcome = "cancelled"
                    break
        except CallFailed as error:
            kinds: dict[grpc.StatusCode, Outcome] = {
                grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
                grpc.StatusCode.DEADLINE_EXCEEDED: "deadline" if timeout_s else "failed",
            }
            outcome, detail = kinds.get(error.code, "failed"), f"{error.code.name}: {error}"
        finally:
            stream.cancel()
        return Entry(outcome, tuple(stream.token_ids), reference, finish_reason, detail)

    def caller(self, seed: int) -> None:
        """Calls without a pause until the soak is over."""
        rng = random.Random(seed)
        with Client(self.system.address) as client:
            while not self.over.is_set():
                self.call(client, rng)

    def burst(self) -> None:
        """More callers at once than there are places to wait in."""
        rng = random.Random(BURST)
        with Client(self.system.address) as client, ThreadPoolExecutor(BURST) as pool:
            for _ in range(BURST):
                pool.submit(self.call, client, rng)

    def disturb(self, seconds: float) -> None:
        """Faults in turn, each when the system is whole again after the one before."""
        give_up_at = time.monotonic() + seconds
        kinds = cycle(self._kinds().items())
        while time.monotonic() < give_up_at:
            name, do = next(kinds)
            fault = Fault(name, time.monotonic())
            self.faults.append(fault)
            do()
            assert until(self.system.is_whole, 90.0), f"not whole again after: {name}"
            fault.healed_s = time.monotonic() - fault.at
            time.sleep(1.0)

    def _kinds(self) -> dict[str, Callable[[], object]]:
        return {
            "draft killed": partial(self._kill, "ray::ServeReplica:outrider:Draft"),
            "follower killed": partial(self._kill, processes.FOLLOWER),
            "router killed": partial(self._kill, "ray::ServeReplica:outrider:Router"),
            "burst": self.burst,
            "leader killed": partial(self._kill, "ray::ServeReplica:outrider:Target"),
            "draft stopped for 2 s": self._stop_draft,
            "follower stopped": self._stop_follower,
            "controller killed": partial(self._kill, "ray::ServeController"),
        }

    @staticmethod
    def _kill(name: str) -> None:
        processes.workers(name)[0].kill()

    @staticmethod
    def _stop_follower() -> None:
        processes.workers(processes.FOLLOWER)[0].suspend()

    @staticmethod
    def _stop_draft() -> None:
        (draft,) = processes.workers("ray::ServeReplica:outrider:Draft")
        draft.suspend()
        time.sleep(2.0)
        draft.resume()

    def tables(self) -> Table:
        """By kind of fault: how often, the longest silence while it lasted, the longest way back."""
        table = Table("fault", "times", "longest silence, s", "whole again after, s")
        for name in dict.fromkeys(fault.name for fault in self.faults):
            ours = [fault for fault in self.faults if fault.name == name]
            silence = max(self._silence(fault) for fault in ours)
            table.add_row(name, str(len(ours)), f"{silence:.2f}", f"{max(fault.healed_s for fault in ours):.1f}")
        return table

    def _silence(self, fault: Fault) -> float:
        until_s = fault.at + fault.healed_s + 1.0
        return max((length for ended, length in self.silences if fault.at < ended < until_s), default=0.0)


def test_the_books_balance(system: System, client: Client) -> None:
    references = {
        (prompt, kind): client.generate(
            Ask(prompt=prompt, sampling={**sampling, "max_tokens": MAX_TOKENS, "ignore_eos": True}, speculation="off")
        ).token_ids
        for prompt in PROMPTS
        for kind, sampling in enumerate(SAMPLINGS)
    }
    soak = Soak(system, references)
    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        callers = [pool.submit(soak.caller, seed) for seed in range(NUM_CALLERS)]
        try:
            soak.disturb(SECONDS)
        finally:
            soak.over.set()
        for caller in callers:
            caller.result()
    Console().print(soak.tables(), soak.ledger.summary())
    assert soak.ledger.unexplained() == []
    assert {entry.outcome for entry in soak.ledger.entries} >= {"completed", "cancelled"}
