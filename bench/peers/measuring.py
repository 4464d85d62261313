"""Owns the comparison of systems: whose turn it is, and each one's speculation against its own plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.comparison import Row, Sample, as_json, summarize
from bench.counts import Counts
from bench.modes import in_turn
from bench.peers.peer import Peer
from bench.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSample(Sample):
    """One prompt by one system under one mode.

    Attributes:
        system: whose.
        num_decoded: tokens after the first arrival, as the system itself counts them.
    """

    system: str
    num_decoded: int

    @property
    def decoded(self) -> int:
        return self.num_decoded


def num_measurements(peers: Sequence[Peer], prompts: Sequence[Prompt]) -> int:
    """How often `measure` will tell of one."""
    return (len(prompts) + 1) * len(_turns(peers))


def measure(peers: Sequence[Peer], prompts: Sequence[Prompt], measured_one: Callable[[], None]) -> list[PeerSample]:
    """Every prompt by every system under every mode; samples come by system and mode, in the order of `prompts`.

    Interleaved, so that what else the machine does falls on all alike; the order turns with each prompt.
    """
    turns, samples = _turns(peers), []
    for peer, mode in turns:  # caches and estimates are warm before anything counts
        peer.generate(prompts[0], mode)
        measured_one()
    for number, prompt in enumerate(prompts):
        for peer, mode in in_turn(turns, number):
            samples.append(_sample(peer, prompt, mode))
            measured_one()
    order = [(peer.name, mode) for peer, mode in turns]
    return sorted(samples, key=lambda sample: order.index((sample.system, sample.mode)))


def _turns(peers: Sequence[Peer]) -> list[tuple[Peer, str]]:
    return [(peer, mode) for peer in peers for mode in peer.modes]


def _sample(peer: Peer, prompt: Prompt, mode: str) -> PeerSample:
    output = peer.generate(prompt, mode)
    return PeerSample(
        prompt_id=prompt.id,
        kind=prompt.kind,
        mode=mode,
        token_ids=output.token_ids,
        decode_s=output.decode_s,
        counts=Counts(),  # what others draft, they do not tell
        system=peer.name,
        num_decoded=output.num_decoded,
    )


def by_system(samples: Sequence[PeerSample]) -> dict[str, list[PeerSample]]:
    """Samples of each system, systems in order of appearance."""
    found: dict[str, list[PeerSample]] = {}
    for sample in samples:
        found.setdefault(sample.system, []).append(sample)
    return found


def summarize_systems(samples: Sequence[PeerSample]) -> list[tuple[str, Row]]:
    """System and row for each class, system and mode; a row's ratios are to the same system's plain decoding."""
    rows = [(system, row) for system, mine in by_system(samples).items() for row in summarize(mine)]
    kinds = list(dict.fromkeys(row.kind for _, row in rows))
    return sorted(rows, key=lambda pair: kinds.index(pair[1].kind))


def systems_as_json(samples: Sequence[PeerSample]) -> dict[str, dict[str, Any]]:
    """Rows and samples of each system, by its name."""
    return {system: as_json(mine, {}) for system, mine in by_system(samples).items()}
