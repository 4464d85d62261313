"""Values survive the wire unchanged; what the wire cannot carry is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidArgument
from engine.info import EngineInfo
from engine.proposal import Branch, EarlyProposals, Proposal, RunAhead, SparseProbs, State, Verdict
from engine.sampling import SamplingParams, StopParams
from rpc import codecs
from rpc.pb import drafting_pb2, session_pb2, verification_pb2

U32 = st.integers(0, 2**32 - 1)
FLOATS = st.floats(allow_nan=False)
SECONDS = st.floats(0.0, allow_infinity=False)
STATES = st.builds(State, U32, st.integers(0, 2**64 - 1))
SPARSE = st.builds(
    SparseProbs,
    st.lists(U32, max_size=4).map(tuple),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple),
)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Any proposal, well-formed or not, that has a parent per token."""
    tokens = tuple(draw(st.lists(U32, max_size=6)))
    parents = tuple(draw(st.integers(-1, max(i - 1, -1))) for i in range(len(tokens)))
    probs = draw(st.none() | st.tuples(*(SPARSE for _ in tokens))) if tokens else None
    return Proposal(draw(STATES), tokens, parents, probs, draw(st.text(max_size=8)), draw(SECONDS))


@st.composite
def branches(draw: st.DrawFn) -> Branch:
    """Any branch, well-formed or not, that has a distribution per token or none."""
    tokens = tuple(draw(st.lists(U32, max_size=4)))
    probs = draw(st.none() | st.tuples(*(SPARSE for _ in tokens))) if tokens else None
    return Branch(draw(U32), draw(U32), tokens, probs)


EARLY = st.builds(
    EarlyProposals,
    STATES,
    STATES,
    st.lists(branches(), min_size=1, max_size=4).map(tuple),
    st.text(max_size=8),
    SECONDS,
    st.booleans(),
)
RUN_AHEAD = st.builds(RunAhead, U32, st.floats(0.0, 1.0), SECONDS, SECONDS, U32)


def through_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(proposals())
def test_proposals_survive(proposal: Proposal) -> None:
    assert codecs.decode_proposal(through_wire(codecs.encode_proposal(proposal))) == proposal


def test_a_chain_travels_without_parents() -> None:
    message = codecs.encode_proposal(Proposal.chain(State(3, 9), [5, 6, 7]))
    assert list(message.parents) == []
    assert codecs.decode_proposal(message).parents == (-1, 0, 1)


@given(EARLY, U32)
def test_early_proposals_survive(early: EarlyProposals, session: int) -> None:
    message = through_wire(codecs.encode_early(session, early))
    assert codecs.decode_early(message) == early
    assert message.session == session


@given(st.none() | RUN_AHEAD)
def test_run_ahead_survives(run_ahead: RunAhead | None) -> None:
    message = drafting_pb2.Advance(session=7, run_ahead=codecs.encode_run_ahead(run_ahead))
    assert codecs.decode_run_ahead(through_wire(message)) == run_ahead


@given(
    st.builds(
        Verdict,
        STATES,
        U32,
        U32,
        st.lists(U32, max_size=6).map(tuple),
        st.sampled_from([None, "stop", "length"]),
        SECONDS,
        SECONDS,
        U32,
        st.text(max_size=8),
    ),
    U32,
)
def test_verdicts_survive(verdict: Verdict, cached_tokens: int) -> None:
    message = through_wire(codecs.encode_verdict(7, verdict, cached_tokens))
    assert codecs.decode_verdict(message) == verdict
    assert (message.session, message.cached_tokens) == (7, cached_tokens)


@given(st.builds(SamplingParams, FLOATS, U32, FLOATS, FLOATS, st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_sampling_survives(sampling: SamplingParams) -> None:
    assert codecs.decode_sampling(through_wire(codecs.encode_sampling(sampling))) == sampling


@given(st.builds(StopParams, U32, U32, st.booleans(), st.lists(U32, max_size=4).map(tuple)))
def test_stops_survive(stops: StopParams) -> None:
    assert codecs.decode_stops(through_wire(codecs.encode_stops(stops))) == stops


@given(
    st.builds(
        EngineInfo,
        st.text(max_size=8),
        U32,
        U32,
        st.lists(U32, max_size=3).map(tuple),
        *(U32 for _ in range(5)),
        forwards=st.integers(0, 2**64 - 1),
        forward_s=FLOATS,
        bubble_s=FLOATS,
        tokenizer=st.text(max_size=8),
    )
)
def test_info_survives(info: EngineInfo) -> None:
    assert codecs.decode_info(through_wire(codecs.encode_info(info))) == info


def test_probabilities_that_float32_would_round_are_refused() -> None:
    proposal = Proposal.chain(State(1, 1), [4], draft_probs=(SparseProbs((4, 5), (0.1, 0.9)),))
    with pytest.raises(ValueError, match="not float32"):
        codecs.encode_proposal(proposal)


def test_early_probabilities_that_float32_would_round_are_refused() -> None:
    half, tenth = SparseProbs((4, 5), (0.5, 0.5)), SparseProbs((4, 5), (0.1, 0.9))
    for first, second in ((half, tenth), (tenth, half)):
        made = (Branch(0, 3, (4,), (first,)), Branch(1, 3, (4, 5), (half, second)))
        with pytest.raises(ValueError, match="not float32"):
            codecs.encode_early(1, EarlyProposals(State(1, 1), State(2, 2), made))


def test_nan_travels_so_that_the_target_can_name_it() -> None:
    proposal = Proposal.chain(State(1, 1), [4], draft_probs=(SparseProbs((4,), (float("nan"),)),))
    decoded = codecs.decode_proposal(through_wire(codecs.encode_proposal(proposal)))
    assert "NaN" in (decoded.flaw(vocab_size=10, max_tokens=8) or "")


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal(State(1, 1), (4, 5), ()),
        Proposal(State(1, 1), (4, 5), (-1, 0), ()),
    ],
    ids=["no parents", "no probabilities"],
)
def test_an_ill_formed_proposal_is_not_made_whole(proposal: Proposal) -> None:
    with pytest.raises(ValueError, match="draft tokens without"):
        codecs.encode_proposal(proposal)


def test_a_parent_count_that_is_wrong_is_left_for_the_target_to_name() -> None:
    message = session_pb2.ProposalTree(base=session_pb2.CommittedState(length=1), tokens=[1, 2, 3], parents=[-1])
    assert codecs.decode_proposal(message).flaw(10, 8) == "1 parents for 3 tokens"


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^proposal\.base"):
        codecs.decode_proposal(session_pb2.ProposalTree(tokens=[1]))
    base = session_pb2.CommittedState(length=1)
    with pytest.raises(InvalidArgument, match=r"^verdict\.finish_reason: found 'bored'"):
        codecs.decode_verdict(verification_pb2.SessionVerdict(base=base, finish_reason="bored"))


@pytest.mark.parametrize("missing", ["after", "trunk", "branches"])
def test_early_proposals_without_their_parts_are_refused(missing: str) -> None:
    branch = Branch(0, 3, (4,))
    message = codecs.encode_early(1, EarlyProposals(State(1, 1), State(2, 2), (branch,)))
    message.ClearField(missing)
    with pytest.raises(InvalidArgument, match=rf"^early\.{missing}: found 'nothing'"):
        codecs.decode_early(message)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (RunAhead(3, 0.5, float("nan")), "budget_s"),
        (RunAhead(3, 0.5, float("inf")), "budget_s"),
        (RunAhead(3, 0.5, 0.1, float("nan")), "round_s"),
        (RunAhead(3, 0.5, 0.1, -1.0), "round_s"),
        (RunAhead(3, 2.0, 0.1), "acceptance"),
        (RunAhead(3, -0.1, 0.1), "acceptance"),
        (RunAhead(3, float("nan"), 0.1), "acceptance"),
    ],
)
def test_running_ahead_by_numbers_that_are_none_is_refused(asked: RunAhead, field: str) -> None:
    message = drafting_pb2.Advance(run_ahead=codecs.encode_run_ahead(asked))
    with pytest.raises(InvalidArgument, match=rf"^run_ahead\.{field}"):
        codecs.decode_run_ahead(message)
