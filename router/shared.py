"""Owns what the sessions of one router share: how they speculate, the peers they use, what they learn together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.acceptance import AcceptancePriors
from router.costs import CostDefaults, CostModel
from router.draft_link import DraftLinkConfig
from router.events import NoObserver, Observer
from router.ngram import NgramConfig
from router.peers import PeerSet
from router.policy import DRAFTERS
from router.speed_gate import PolicyConfig
from router.target_link import TargetLinkConfig


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How the sessions of a router speculate, and how patient they are with targets and drafts.

    Attributes:
        drafters: drafters that may be used at all; none switches speculation off for every request.
        max_draft_tokens: most draft tokens of one round, whatever the target would verify.
        costs: what the cost model assumes before it has measured.
        batch_weight: of the cost model.
        workloads: for each class of request that one may name, what acceptance to expect (see AcceptancePriors).
    """

    drafters: tuple[str, ...] = DRAFTERS
    max_draft_tokens: int = 64
    costs: CostDefaults = field(default_factory=CostDefaults)
    batch_weight: float = 1.0
    workloads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ngram: NgramConfig = field(default_factory=NgramConfig)
    draft_link: DraftLinkConfig = field(default_factory=DraftLinkConfig)
    target_link: TargetLinkConfig = field(default_factory=TargetLinkConfig)


@dataclass(frozen=True)
class Shared:
    """What all sessions of a router share; `clock` is in seconds and monotonic."""

    peers: PeerSet
    clock: Callable[[], float]
    config: SessionConfig = field(default_factory=SessionConfig)
    costs: CostModel = field(default_factory=CostModel)
    priors: AcceptancePriors = field(default_factory=AcceptancePriors)
    observer: Observer = field(default_factory=NoObserver)
