"""What may be answered to a stream, worked out from the bytes that were sent on it: any other answer is a fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from engine.proposal import EarlyProposals, Proposal, State
from engine.sampling import SamplingParams
from rpc import codecs
from rpc.pb import drafting_pb2, verification_pb2
from tests.fuzz.mutations import parsed
from tests.fuzz.oracle import DRAFT, TARGET, continuation, is_foreseeable

MEANT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What a peer may be told that it did wrong. INTERNAL is not among it: that is a fault of ours."""
_TRACES = ("Traceback", 'File "', "  line ")


def check_refusal(code: grpc.StatusCode, message: str) -> None:
    """Raises unless a refusal is one that a person can act on."""
    assert code in MEANT, (code, message)
    assert message, code
    assert not any(trace in message for trace in _TRACES), message


class Books(ABC):
    """Of one stream."""

    frame_type: type[Message]
    reply_type: type[Message]

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.answers: Counter[str] = Counter()
        self.requests = 0
        self._opened: Counter[int] = Counter()

    def sent(self, frame: bytes) -> None:
        """Takes note of a frame that is about to be sent."""
        message = parsed(self.frame_type, frame)
        self.requests += 1 if message is None else len(message.requests)
        for request in message.requests if message is not None else ():
            kind = request.WhichOneof("request")
            if kind == "open":
                self._opened[request.open.session] += 1
                self._note_open(request.open)
            elif kind is not None:
                self._note(kind, getattr(request, kind))

    def received(self, data: bytes) -> None:
        """Raises AssertionError unless each reply in the frame is one that may come."""
        frame: Any = parsed(self.reply_type, data)
        assert frame is not None, data.hex()
        for reply in frame.replies:
            kind = reply.WhichOneof("reply")
            message = getattr(reply, kind)
            if kind == "failed":
                check_refusal(_CODES[message.code], message.message)
                self.answers[_CODES[message.code].name] += 1
            else:
                self.answers[kind] += 1
            if kind not in ("failed", "closed") and self._is_known(message.session):
                self._check(kind, message)

    def _is_known(self, number: int) -> bool:
        """Whether it is clear which opening an answer is for."""
        assert self._opened[number] > 0, f"an answer for session {number}, which nobody has opened"
        return self._opened[number] == 1

    @abstractmethod
    def _note_open(self, opened: Any) -> None: ...

    @abstractmethod
    def _note(self, kind: str, message: Any) -> None: ...

    @abstractmethod
    def _check(self, kind: str, message: Any) -> None: ...


_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Output:
    """What one session has to get from a target, as far as it has come."""

    def __init__(self, opened: verification_pb2.OpenTarget) -> None:
        self.tokens = [*opened.prompt_token_ids, *opened.committed_token_ids]
        self.room = opened.stops.max_tokens - len(opened.committed_token_ids)
        self.sampling = codecs.decode_sampling(opened.sampling)
        bans = opened.stops.min_tokens > 0 and len(opened.stops.stop_token_ids) > 0
        self.is_foreseeable = is_foreseeable(self.sampling) and not bans
        self.ends = set(opened.stops.stop_token_ids)


class VerificationBooks(Books):
    """Whatever is proposed, verdicts have the tokens that the target alone would have put there, once and in order."""

    frame_type = verification_pb2.VerificationRequests
    reply_type = verification_pb2.VerificationReplies

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._outputs: dict[int, _Output] = {}

    def _note_open(self, opened: Any) -> None:
        self._outputs[opened.session] = _Output(opened)

    def _note(self, kind: str, message: Any) -> None:
        pass

    def _check(self, kind: str, message: Any) -> None:
        output, verdict = self._outputs[message.session], codecs.decode_verdict(message)
        self.answers["accepted"] += verdict.num_accepted
        self.answers[f"dropped: {verdict.dropped[:12]}"] += 1 if verdict.dropped else 0
        assert verdict.base == State.of(output.tokens)
        assert 0 < len(verdict.tokens) <= output.room
        assert verdict.num_accepted <= min(verdict.num_proposed, len(verdict.tokens))
        assert not output.ends.intersection(verdict.tokens[:-1])
        if output.is_foreseeable:
            right = continuation(TARGET, self.vocab_size, output.tokens, len(verdict.tokens), output.sampling)
            assert list(verdict.tokens) == right
        output.tokens += verdict.tokens
        output.room -= len(verdict.tokens)
        assert (verdict.finish_reason is not None) == (output.room == 0 or verdict.tokens[-1] in output.ends)


@dataclass
class _TrueSequences:
    """What a draft was told of one session, and what it has proposed for it."""

    sampling: SamplingParams
    tokens: list[int]
    told: dict[State, tuple[list[int], int]] = field(default_factory=dict)
    trunks: dict[State, tuple[int, ...]] = field(default_factory=dict)


class DraftingBooks(Books):
    """A greedy draft proposes what its model alone would, behind a sequence that it was told."""

    frame_type = drafting_pb2.DraftRequests
    reply_type = drafting_pb2.DraftReplies

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._sequences: dict[int, _TrueSequences] = {}

    def _note_open(self, opened: Any) -> None:
        sampling, prompt = codecs.decode_sampling(opened.sampling), list(opened.prompt_token_ids)
        self._sequences[opened.session] = _TrueSequences(sampling, prompt)

    def _note(self, kind: str, message: Any) -> None:
        sequence = self._sequences.get(message.session)
        if sequence is None or kind != "advance":
            return
        base, tail = codecs.decode_state(message.base), list(message.tail)
        known = base.length - len(tail)
        tokens = sequence.tokens[: max(known, 0)] + tail
        if len(tokens) == base.length and State.of(tokens) == base:
            sequence.tokens = tokens
            asked = max(message.num_speculative_tokens, sequence.told.get(base, ([], 0))[1])
            sequence.told[base] = (tokens, asked)

    def _check(self, kind: str, message: Any) -> None:
        sequence = self._sequences[message.session]
        if kind == "proposal":
            self._check_proposal(sequence, codecs.decode_proposal(message.proposal))
        else:
            self._check_early(sequence, codecs.decode_early(message))

    def _check_proposal(self, sequence: _TrueSequences, proposal: Proposal) -> None:
        tokens, asked = sequence.told[proposal.base]
        assert proposal.is_chain
        assert 0 < len(proposal.tokens) <= asked
        assert proposal.flaw(self.vocab_size, asked) is None
        self._check_chain(sequence.sampling, tokens, proposal.tokens)
        sequence.trunks[proposal.base] = proposal.tokens

    def _check_early(self, sequence: _TrueSequences, early: EarlyProposals) -> None:
        tokens, _ = sequence.told[early.after]
        trunk = self._trunk(sequence, early)
        for branch in early.branches if trunk is not None else ():
            assert branch.num_accepted <= len(trunk)
            behind = [*tokens, *trunk[: branch.num_accepted], branch.token]
            proposal = early.proposal(branch, State.of(behind))
            assert proposal.flaw(self.vocab_size, self.vocab_size) is None
            self._check_chain(sequence.sampling, behind, branch.tokens)

    def _trunk(self, sequence: _TrueSequences, early: EarlyProposals) -> tuple[int, ...] | None:
        """The tokens of the trunk; None where the draft alone knows how many of its early proposal it is about."""
        trunk = sequence.trunks.get(early.after, ())
        return trunk if early.trunk == early.after.extend(trunk) else None

    def _check_chain(self, sampling: SamplingParams, tokens: Sequence[int], chain: Sequence[int]) -> None:
        if sampling.greedy:
            assert list(chain) == continuation(DRAFT, self.vocab_size, tokens, len(chain), sampling)
