"""Owns the translation between messages and engine values, both ways. It never changes a value.

Decoding is strict: what is missing or unknown raises InvalidArgument naming the field. Whether a proposal makes sense
is not decided here but by `Proposal.flaw`, so that a faulty draft costs a round and not a session. Encoding raises
ValueError for what the wire cannot carry as it is, above all draft probabilities that are not float32 values: the
target must judge by exactly the numbers the draft sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Self

from google.protobuf.message import Message

from engine.errors import InvalidArgument
from engine.info import EngineInfo
from engine.proposal import (
    Branch,
    EarlyProposals,
    FinishReason,
    Proposal,
    RunAhead,
    SparseProbs,
    State,
    Verdict,
    chain_parents,
)
from engine.sampling import SamplingParams, StopParams
from rpc.pb import drafting_pb2 as drafting_pb
from rpc.pb import session_pb2 as pb
from rpc.pb import verification_pb2 as verification_pb

_FINISH_REASONS: dict[str, FinishReason | None] = {"": None, "stop": "stop", "length": "length"}


def encode_state(state: State) -> pb.CommittedState:
    return pb.CommittedState(length=state.length, hash=state.hash)


def decode_state(message: pb.CommittedState) -> State:
    return State(message.length, message.hash)


def encode_sampling(sampling: SamplingParams) -> pb.EngineSampling:
    return pb.EngineSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def decode_sampling(message: pb.EngineSampling) -> SamplingParams:
    """Ranges are left to `SamplingParams.validate`."""
    seed = message.seed if message.HasField("seed") else None
    return SamplingParams(message.temperature, message.top_k, message.top_p, message.min_p, seed)


def encode_stops(stops: StopParams) -> pb.EngineStops:
    return pb.EngineStops(
        max_tokens=stops.max_tokens,
        min_tokens=stops.min_tokens,
        ignore_eos=stops.ignore_eos,
        stop_token_ids=stops.stop_token_ids,
    )


def decode_stops(message: pb.EngineStops) -> StopParams:
    """Ranges are left to `StopParams.validate`."""
    return StopParams(message.max_tokens, message.min_tokens, message.ignore_eos, tuple(message.stop_token_ids))


def encode_proposal(proposal: Proposal) -> pb.ProposalTree:
    """A chain travels without parents. Raises ValueError where that would make an ill-formed proposal look whole."""
    if proposal.tokens and not proposal.parents:
        raise ValueError(f"{len(proposal.tokens)} draft tokens without parents")
    if proposal.tokens and proposal.draft_probs == ():
        raise ValueError(f"{len(proposal.tokens)} draft tokens without their draft_probs")
    return pb.ProposalTree(
        base=encode_state(proposal.base),
        tokens=proposal.tokens,
        parents=() if proposal.is_chain else proposal.parents,
        draft_probs=[_encode_probs(sparse) for sparse in proposal.draft_probs or ()],
        drafter=proposal.drafter,
        draft_time_s=proposal.draft_time_s,
    )


def decode_proposal(message: pb.ProposalTree) -> Proposal:
    require(message, "base", "proposal.base")
    tokens = tuple(message.tokens)
    return Proposal(
        decode_state(message.base),
        tokens,
        tuple(message.parents) or chain_parents(len(tokens)),
        _decode_probs(message),
        message.drafter,
        _seconds(message.draft_time_s, "proposal.draft_time_s"),
    )


def encode_early(session: int, early: EarlyProposals) -> pb.EarlyProposals:
    """Branches that were received travel on as they came. Raises ValueError as encode_proposal."""
    given = early.branches
    branches = given.messages if isinstance(given, _Received) else [_encode_branch(branch) for branch in given]
    return pb.EarlyProposals(
        session=session,
        after=encode_state(early.after),
        trunk=encode_state(early.trunk),
        branches=branches,
        drafter=early.drafter,
        draft_time_s=early.draft_time_s,
        plain_otherwise=early.plain_otherwise,
    )


def decode_early(message: pb.EarlyProposals) -> EarlyProposals:
    require(message, "after", "early.after")
    require(message, "trunk", "early.trunk")
    if not message.branches:
        raise InvalidArgument("early.branches", "nothing", "at least one branch")
    return EarlyProposals(
        decode_state(message.after),
        decode_state(message.trunk),
        _Received(message.branches),
        message.drafter,
        _seconds(message.draft_time_s, "early.draft_time_s"),
        message.plain_otherwise,
    )


class _Received(tuple[Branch, ...]):
    """Branches, and the messages that they are: a router decides by the ones and sends on the others."""

    messages: Sequence[pb.Branch]

    def __new__(cls, messages: Sequence[pb.Branch]) -> Self:
        branches = super().__new__(cls, map(_decode_branch, messages))
        branches.messages = messages
        return branches


def _encode_branch(branch: Branch) -> pb.Branch:
    return pb.Branch(
        num_accepted=branch.num_accepted,
        token=branch.token,
        tokens=branch.tokens,
        draft_probs=[_encode_probs(sparse) for sparse in branch.draft_probs or ()],
    )


def _decode_branch(message: pb.Branch) -> Branch:
    return Branch(message.num_accepted, message.token, tuple(message.tokens), _decode_probs(message))


def encode_run_ahead(run_ahead: RunAhead | None) -> drafting_pb.RunAhead | None:
    if run_ahead is None:
        return None
    return drafting_pb.RunAhead(
        num_speculative_tokens=run_ahead.num_speculative_tokens,
        budget_s=run_ahead.budget_s,
        round_s=run_ahead.round_s,
        acceptance=run_ahead.acceptance,
        num_proposed=run_ahead.num_proposed,
    )


def decode_run_ahead(message: drafting_pb.Advance) -> RunAhead | None:
    """Raises InvalidArgument for numbers that are none."""
    if not message.HasField("run_ahead"):
        return None
    asked = message.run_ahead
    if not math.isfinite(asked.budget_s):
        raise InvalidArgument("run_ahead.budget_s", asked.budget_s, "seconds")
    if not 0.0 <= asked.round_s < math.inf:
        raise InvalidArgument("run_ahead.round_s", asked.round_s, "seconds")
    if not 0.0 <= asked.acceptance <= 1.0:
        raise InvalidArgument("run_ahead.acceptance", asked.acceptance, "0 to 1")
    return RunAhead(asked.num_speculative_tokens, asked.acceptance, asked.budget_s, asked.round_s, asked.num_proposed)


def _decode_probs(message: pb.ProposalTree | pb.Branch) -> tuple[SparseProbs, ...] | None:
    given = message.draft_probs
    return tuple([SparseProbs(tuple(sparse.ids), tuple(sparse.probs)) for sparse in given]) if given else None


def _encode_probs(sparse: SparseProbs) -> pb.SparseDistribution:
    message = pb.SparseDistribution(ids=sparse.ids, probs=sparse.probs)
    if tuple(message.probs) != sparse.probs and not any(map(math.isnan, sparse.probs)):
        raise ValueError("draft_probs are not float32 values; the target would judge by other ones")
    return message


def encode_verdict(session: int, verdict: Verdict, cached_tokens: int) -> verification_pb.SessionVerdict:
    return verification_pb.SessionVerdict(
        session=session,
        base=encode_state(verdict.base),
        num_proposed=verdict.num_proposed,
        num_accepted=verdict.num_accepted,
        tokens=verdict.tokens,
        finish_reason=verdict.finish_reason or "",
        forward_time_s=verdict.forward_time_s,
        queue_time_s=verdict.queue_time_s,
        rows=verdict.rows,
        dropped=verdict.dropped,
        cached_tokens=cached_tokens,
    )


def decode_verdict(message: verification_pb.SessionVerdict) -> Verdict:
    require(message, "base", "verdict.base")
    if message.finish_reason not in _FINISH_REASONS:
        raise InvalidArgument("verdict.finish_reason", message.finish_reason, 'empty, "stop" or "length"')
    return Verdict(
        decode_state(message.base),
        message.num_proposed,
        message.num_accepted,
        tuple(message.tokens),
        _FINISH_REASONS[message.finish_reason],
        _seconds(message.forward_time_s, "verdict.forward_time_s"),
        _seconds(message.queue_time_s, "verdict.queue_time_s"),
        message.rows,
        message.dropped,
    )


def encode_info(info: EngineInfo) -> pb.EngineInfo:
    """Fields of value and message have the same names."""
    return pb.EngineInfo(**{field.name: getattr(info, field.name) for field in fields(info)})


def decode_info(message: pb.EngineInfo) -> EngineInfo:
    values = {field.name: getattr(message, field.name) for field in fields(EngineInfo)}
    return EngineInfo(**{**values, "eos_token_ids": tuple(message.eos_token_ids)})


def _seconds(value: float, path: str) -> float:
    """Raises InvalidArgument for what is no time: it would spoil every mean that it goes into."""
    if not 0.0 <= value < math.inf:
        raise InvalidArgument(path, value, "seconds")
    return value


def require(message: Message, name: str, path: str) -> None:
    """Raises InvalidArgument unless the sub-message `name` is there."""
    if not message.HasField(name):
        raise InvalidArgument(path, "nothing", "a value")
