"""Everything that reads bytes of a peer, without sockets and engines, where a case costs microseconds.

Whatever the bytes: what reads them returns a value, or raises InvalidArgument, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from engine.errors import InvalidArgument, OutriderError
from engine.proposal import EarlyProposals, Proposal
from engine.sampling import SamplingParams
from router.requests import GenerateRequest
from router.translate import (
    generate_request,
    read_generate_request,
    read_tokenize_request,
    tokenize_request,
)
from router.wire import find_bad_text
from rpc import codecs
from rpc.errors import decode_failure, encode_failure
from rpc.pb import drafting_pb2, generation_pb2, session_pb2, verification_pb2
from tests.fuzz.asking import generate_message, tokenize_message
from tests.fuzz.cases import cases
from tests.fuzz.drafting_script import DraftingScript
from tests.fuzz.mutations import parsed, spoil_bytes, spoil_fields
from tests.fuzz.scripts import Script
from tests.fuzz.verification_script import VerificationScript

VOCAB_SIZE = 493

Seeds = Iterator[bytes]


def spoilt(message: Message, rng: Random) -> bytes:
    """A message with odd values, accidents to its bytes, or both."""
    kind = rng.randrange(3)
    if kind:
        spoil_fields(message, rng)
    data = message.SerializeToString()
    return spoil_bytes(data, rng) if kind != 1 else data


def requests_of(script: Script) -> Seeds:
    while True:
        message = parsed(script.request_type, script.request())
        assert message is not None
        yield spoilt(message, script.rng)


def replies(rng: Random) -> Seeds:
    proposals = requests_of(VerificationScript(rng.getrandbits(32), VOCAB_SIZE))
    base = session_pb2.CommittedState(length=7, hash=rng.getrandbits(64))
    while True:
        verdict = verification_pb2.SessionVerdict(session=1, base=base, tokens=[1, 2], finish_reason="stop")
        failed = session_pb2.SessionFailed(session=1, code=3, message="x: found 1, allowed is 2", field="x")
        tree = session_pb2.ProposalTree(base=base, tokens=[1, 2], parents=[-1, 0])
        yield spoilt(rng.choice([verdict, failed, tree]), rng)
        request = parsed(verification_pb2.VerificationRequest, next(proposals))
        if request is not None and request.WhichOneof("request") == "early":
            yield spoilt(request.early, rng)


def read_verification(data: bytes) -> None:
    request = parsed(verification_pb2.VerificationRequest, data)
    kind = request.WhichOneof("request") if request is not None else None
    if kind == "open":
        codecs.decode_sampling(request.open.sampling).validate()
        codecs.decode_stops(request.open.stops).validate(VOCAB_SIZE)
    elif kind == "propose":
        codecs.require(request.propose, "proposal", "proposal")
        look_over(codecs.decode_proposal(request.propose.proposal))
    elif kind == "early":
        look_over_early(codecs.decode_early(request.early))


def read_drafting(data: bytes) -> None:
    request = parsed(drafting_pb2.DraftRequest, data)
    kind = request.WhichOneof("request") if request is not None else None
    if kind == "open":
        codecs.decode_sampling(request.open.sampling).validate()
    elif kind == "advance":
        codecs.require(request.advance, "base", "base")
        codecs.decode_state(request.advance.base)
        run_ahead = codecs.decode_run_ahead(request.advance)
        assert run_ahead is None or run_ahead.later(0.5).budget_s >= 0.0


def read_reply(data: bytes) -> None:
    """As the clients read what engines answer; a target's words are read as a draft's too, for good measure."""
    readers: list[tuple[type[Message], Callable[[Any], object]]] = [
        (verification_pb2.SessionVerdict, codecs.decode_verdict),
        (session_pb2.ProposalTree, lambda message: look_over(codecs.decode_proposal(message))),
        (session_pb2.EarlyProposals, lambda message: look_over_early(codecs.decode_early(message))),
    ]
    failed = parsed(session_pb2.SessionFailed, data)
    if failed is not None:
        error = decode_failure(failed)
        assert isinstance(error, OutriderError)
        assert parsed(session_pb2.SessionFailed, encode_failure(1, error).SerializeToString()) is not None
    for message_type, read in readers:
        if (message := parsed(message_type, data)) is not None:
            with suppress(InvalidArgument):
                read(message)


def look_over(proposal: Proposal) -> None:
    """A proposal without a flaw is a tree of known tokens; and none is changed on the wire."""
    if proposal.flaw(VOCAB_SIZE, 127) is None:
        assert len(proposal.parents) == len(proposal.tokens) <= 127
        assert all(-1 <= parent < index for index, parent in enumerate(proposal.parents))
        short = proposal.first(3).limited(2)
        assert short.flaw(VOCAB_SIZE, 3) is None
        assert repr(codecs.decode_proposal(codecs.encode_proposal(proposal))) == repr(proposal)  # a NaN is no equal


def look_over_early(early: EarlyProposals) -> None:
    for branch in early.branches:
        assert early.find(branch.num_accepted, branch.token) is not None
        early.proposal(branch, early.after).flaw(VOCAB_SIZE, 127)


def read_generate(data: bytes) -> None:
    asked = generate_request(read_generate_request(data))
    assert isinstance(asked, GenerateRequest)
    assert isinstance(asked.sampling, SamplingParams)


def read_tokenize(data: bytes) -> None:
    tokenize_request(read_tokenize_request(data))


def read_any_text(data: bytes) -> None:
    """The search for text that is none ends, whatever it walks over, and blames a field only where there is one."""
    bad = find_bad_text(data, generation_pb2.GenerateRequest)
    if parsed(generation_pb2.GenerateRequest, data) is not None:
        assert bad is None


def asked(make: Callable[[Random], Message]) -> Callable[[Random], Seeds]:
    def forever(rng: Random) -> Seeds:
        while True:
            yield spoilt(make(rng), rng)

    return forever


def said(script: type[Script]) -> Callable[[Random], Seeds]:
    return lambda rng: requests_of(script(rng.getrandbits(32), VOCAB_SIZE))


READERS: dict[str, tuple[float, Callable[[Random], Seeds], Callable[[bytes], None]]] = {
    "verification": (0.05, said(VerificationScript), read_verification),
    "drafting": (0.04, said(DraftingScript), read_drafting),
    "replies": (0.02, replies, read_reply),
    "generate": (0.03, asked(generate_message), read_generate),
    "tokenize": (0.01, asked(tokenize_message), read_tokenize),
    "text": (0.01, asked(generate_message), read_any_text),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_returns_or_says_which_field_is_wrong(name: str) -> None:
    share, make, read = READERS[name]
    seeds, fields = make(cases.rng(name)), list[str]()
    number = cases.share(share)
    for _ in range(number):
        data = next(seeds)
        try:
            read(data)
        except InvalidArgument as error:
            fields.append(error.field)
        except BaseException as error:
            error.add_note(f"{name}, seed {cases.seed}: {data.hex()}")
            raise
    assert len(fields) < number
    assert all(fields)
