"""The router's book of early proposals, and that it and the target go by the same rule whatever is still on its way."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.proposal import Branch, EarlyProposals, FinishReason, Proposal, State, Verdict
from engine.sampling import SamplingParams, StopParams
from engine.sequence import Sequence
from engine.verifying import Held, TargetSession
from router.early import EarlyBook

BASE = State.of([5, 6])
TRUNK = (7, 8)
PROPOSAL = Proposal.chain(BASE, TRUNK, drafter="draft_model")
HIT = Branch(1, 3, (10, 11, 12))
OTHER = Branch(2, 4, (20, 21))


def early(
    *branches: Branch, after: State = BASE, trunk: tuple[int, ...] = TRUNK, plain: bool = False
) -> EarlyProposals:
    return EarlyProposals(after, after.extend(trunk), branches, "draft_model", 0.25, plain_otherwise=plain)


def verdict(tokens: tuple[int, ...], base: State = BASE, finish: FinishReason | None = None) -> Verdict:
    return Verdict(base, len(TRUNK), len(tokens) - 1, tokens, finish)


def begun() -> EarlyBook:
    book = EarlyBook()
    book.begin(PROPOSAL)
    return book


AFTER_HIT = BASE.extend([7, 3])


def test_the_outcome_that_comes_true_is_what_the_target_verifies_next() -> None:
    book = begun()
    assert book.takes(early(OTHER, HIT))
    assert book.end(verdict((7, 3)), AFTER_HIT) == Proposal.chain(AFTER_HIT, HIT.tokens, drafter="draft_model")
    assert book.num_wasted == len(OTHER.tokens)


@pytest.mark.parametrize("tokens", [(7, 4), (3,), (7, 8, 3)], ids=["another token", "fewer accepted", "more accepted"])
def test_an_outcome_nothing_was_drafted_for_leads_to_no_proposal(tokens: tuple[int, ...]) -> None:
    book = begun()
    assert book.takes(early(HIT, OTHER))
    assert book.end(verdict(tokens), BASE.extend(tokens)) is None
    assert book.num_wasted == 5


def test_the_target_goes_on_plainly_where_nothing_was_drafted_for_the_outcome_and_it_was_told_so() -> None:
    for tokens, following in (((7, 4), ()), ((7, 3), HIT.tokens)):
        book = begun()
        assert book.takes(early(HIT, plain=True))
        state = BASE.extend(tokens)
        then = book.end(verdict(tokens), state)
        assert then is not None
        assert (then.base, then.tokens) == (state, following)
        assert book.num_wasted == len(HIT.tokens) - len(following)


@pytest.mark.parametrize(
    "stranger",
    [early(HIT, trunk=(7,)), early(HIT, trunk=(7, 9)), early(HIT, after=BASE.extend([1]))],
    ids=["a shorter trunk", "other tokens", "another state"],
)
def test_proposals_behind_another_trunk_are_not_for_the_target(stranger: EarlyProposals) -> None:
    book = begun()
    assert not book.takes(stranger)
    assert book.end(verdict((7, 3)), AFTER_HIT) is None
    assert book.num_wasted == 3


def test_between_rounds_and_in_rounds_without_the_draft_the_target_gets_nothing() -> None:
    book = EarlyBook()
    assert not book.takes(early(HIT))
    book.begin(PROPOSAL)
    book.end(verdict((7, 3)), AFTER_HIT)
    assert not book.takes(early(HIT))


def test_proposals_that_come_after_their_round_are_wasted() -> None:
    book = begun()
    assert book.end(verdict((7, 3)), AFTER_HIT) is None
    assert not book.takes(early(OTHER, HIT))
    assert book.num_wasted == 5


@pytest.mark.parametrize("plain", [False, True])
def test_a_sequence_that_has_ended_has_no_next_proposal(plain: bool) -> None:
    book = begun()
    assert book.takes(early(HIT, plain=plain))
    assert book.end(verdict((7, 3), finish="stop"), AFTER_HIT) is None
    assert book.num_wasted == 3


def test_a_new_target_knows_nothing_of_what_the_old_one_was_given() -> None:
    book = begun()
    assert book.takes(early(HIT))
    book.forget()
    assert book.num_wasted == 3
    assert not book.takes(early(HIT))
    book.begin(PROPOSAL)
    assert book.end(verdict((7, 3)), AFTER_HIT) is None


def test_of_two_groups_for_one_round_the_target_keeps_the_first() -> None:
    """It may have begun on the first when the second reaches it."""
    book = begun()
    assert book.takes(early(HIT))
    assert not book.takes(early(OTHER))
    assert book.end(verdict((7, 3)), AFTER_HIT) is not None
    assert book.num_wasted == len(OTHER.tokens)


def test_a_verdict_for_another_state_ends_the_round_and_wastes_what_was_for_it() -> None:
    book = begun()
    assert book.takes(early(HIT))
    assert book.end(verdict((7, 3), base=State.of([9])), State.of([9, 7, 3])) is None
    assert book.num_wasted == 3


# Router and target, with messages under way between them.

WORDS = (0, 1)
FLAWED = 9  # a branch with this token is malformed for the target

Message = Callable[[TargetSession], bool]


def hold(proposal: Proposal) -> Held:
    return Held(proposal, 0.0, "malformed" if FLAWED in proposal.tokens else "")


@dataclass
class Target:
    """TargetSession as TargetEngine drives it; `judged` are verdicts on their way, each with what was held for it."""

    session: TargetSession
    rng: random.Random
    inbox: deque[Message] = field(default_factory=deque)
    judged: deque[tuple[Verdict, tuple[int, ...]]] = field(default_factory=deque)

    @classmethod
    def opened(cls, tokens: list[int], num_prompt: int, max_tokens: int, rng: random.Random) -> Target:
        sequence = Sequence(list(tokens), num_prompt)
        stops = StopParams(max_tokens, ignore_eos=True)
        return cls(TargetSession(sequence, SamplingParams(), stops, frozenset(), State.of(tokens)), rng)

    def read(self) -> None:
        assert self.inbox.popleft()(self.session), "what the router sent was for another state"

    def step(self) -> None:
        session, base, held = self.session, self.session.state, self.session.held
        proposed = session.proposal.tokens if session.proposal is not None else ()
        num_accepted = self.rng.randint(0, len(proposed))
        rejected = proposed[num_accepted : num_accepted + 1]
        token = self.rng.choice([word for word in WORDS if word not in rejected])
        tokens = (*proposed[:num_accepted], token)
        session.finish_reason = "length" if len(tokens) == session.room else None
        session.sequence.tokens += tokens
        session.state = base.extend(tokens)
        if held is None:
            session.allowance = max(session.allowance - 1, 0)
        session.pass_on(base, num_accepted, token, hold)
        said = Verdict(base, len(proposed), num_accepted, tokens, session.finish_reason)
        self.judged.append((said, held.proposal.tokens if held is not None else ()))


@dataclass
class Router:
    """What Session and Speculator do with the book: one round after another, each of a kind that chance decides."""

    rng: random.Random
    max_tokens: int
    tokens: list[int] = field(default_factory=lambda: [1])
    book: EarlyBook = field(default_factory=EarlyBook)
    expected: deque[tuple[int, ...]] = field(default_factory=deque)  # proposals whose verdicts are owed
    next: Proposal | None = None
    is_opening: bool = True
    is_stretch: bool = False  # what is expected is plain decoding
    asks: bool = False  # a round waits for the draft
    drafted: list[EarlyProposals] = field(default_factory=list)  # by the draft, not here yet
    is_over: bool = False
    num_early_tokens: int = 0
    num_used: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.open()

    @property
    def state(self) -> State:
        return State.of(self.tokens)

    def chain(self, *, longest: int = 3) -> tuple[int, ...]:
        return tuple(self.rng.choices(WORDS, k=self.rng.randint(1, longest)))

    def open(self) -> None:
        """The first target, or another one."""
        self.target = Target.opened(self.tokens, 1, self.max_tokens, self.rng)
        self.book.forget()
        self.next, self.asks, self.is_opening, self.is_stretch = None, False, True, False
        self.expected = deque([()])

    def begin(self) -> None:
        self.is_opening = self.is_stretch = False
        if self.next is not None:
            early, self.next = self.next, None
            if self.rng.random() < 0.8:
                self.begin_drafted(early)
            else:  # plain decoding is to follow, and the target is told so at once
                self.book.begin(early)
                self.expected.append(early.tokens)
                self.decode()
            return
        kind = self.rng.choice(["draft", "draft", "draft", "ahead", "ngram", "plain", "stretch"])
        if kind == "draft":
            self.asks = True
        elif kind == "ahead":  # of a plain round
            self.answered(Proposal(self.state))
        elif kind == "stretch":
            self.decode()
        else:
            self.propose(Proposal.chain(self.state, self.chain() if kind == "ngram" else ()))

    def decode(self) -> None:
        count = self.rng.randint(1, 4)
        self.is_stretch = True
        self.expected.extend([()] * count)
        self.target.inbox.append(lambda session: decode(session, count))

    def at_last(self) -> None:
        """One token of a stretch is still to come: it goes on, or is a round for the draft to run ahead of."""
        if self.rng.random() < 0.6:
            self.decode()
            return
        self.is_stretch = False
        self.book.begin(Proposal(self.state))
        self.drafted.append(self.run_ahead(Proposal(self.state)))
        self.seen["entered"] += 1

    def propose(self, proposal: Proposal) -> None:
        self.expected.append(proposal.tokens)
        self.target.inbox.append(lambda session: session.propose(hold(proposal)))

    def begin_drafted(self, proposal: Proposal) -> None:
        """A round with the draft's proposal, behind which the draft runs ahead."""
        self.book.begin(proposal)
        self.expected.append(proposal.tokens)
        for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
            self.drafted.append(self.run_ahead(proposal))

    def answered(self, proposal: Proposal) -> None:
        self.asks = False
        self.begin_drafted(proposal)
        self.target.inbox.append(lambda session: session.propose(hold(proposal)))

    def run_ahead(self, proposal: Proposal) -> EarlyProposals:
        outcomes = [(n, word) for n in range(len(proposal.tokens) + 1) for word in WORDS if self.rng.random() < 0.6]
        branches = [Branch(n, word, (*self.chain(), *[FLAWED] * (self.rng.random() < 0.1))) for n, word in outcomes]
        trunk = proposal.base.extend(proposal.tokens if self.rng.random() < 0.9 else (3,))
        return EarlyProposals(proposal.base, trunk, tuple(branches), plain_otherwise=self.rng.random() < 0.3)

    def early_arrived(self) -> None:
        early = self.drafted.pop(self.rng.randrange(len(self.drafted)))
        self.num_early_tokens += early.num_tokens
        if self.book.takes(early):
            self.seen["taken"] += 1
            self.target.inbox.append(lambda session: session.propose_early(early, hold))

    def verdict_arrived(self) -> None:
        said, judged = self.target.judged.popleft()
        assert said.base == self.state
        assert judged == self.expected.popleft(), "the target judged something else than the router believes"
        self.tokens += said.tokens
        if not self.is_opening:
            self.next = self.book.end(said, self.state)
            self.seen["hits"] += self.next is not None and bool(self.next.tokens)
            self.seen["plain"] += self.next is not None and not self.next.tokens
            self.num_used += len(self.next.tokens) if self.next is not None else 0
        self.is_over = said.finish_reason is not None
        if self.is_over:
            self.expected.clear()  # of a stretch that was cut short

    def events(self) -> list[Callable[[], None]]:
        """What can happen now; each queue keeps its order, and nothing else is ordered."""
        target, idle = self.target, not self.expected and not self.asks
        happening = {
            self.begin: idle,
            self.draft_answers: self.asks,
            self.at_last: self.is_stretch and len(self.expected) == 1 and not self.expected[0],
            self.early_arrived: bool(self.drafted),
            self.verdict_arrived: bool(target.judged and self.expected),
            target.read: bool(target.inbox),
            target.step: target.session.wants_forward,
        }
        return [event for event, can in happening.items() if can]

    def draft_answers(self) -> None:
        self.answered(Proposal.chain(self.state, self.chain()))

    def check(self) -> None:
        """The two agree on who is to go on, as far as that can be told while messages are under way."""
        waits = bool(self.expected) or self.next is not None
        assert waits or not self.target.judged, "a verdict that nobody expects"
        if not self.target.inbox and not self.target.judged:
            assert self.target.session.wants_forward == waits


def decode(session: TargetSession, count: int) -> bool:
    session.allowance += count
    session.early = None
    return True


def run(rng: random.Random, *, losses: bool) -> Router:
    """One request to its end, with chance for everything that chance may decide; everything that is owed comes."""
    router = Router(rng, max_tokens=rng.randint(4, 40))
    for _ in range(2000):
        if router.is_over:
            break
        if losses and rng.random() < 0.01:
            router.open()
        rng.choice(router.events())()
        router.check()
    assert router.is_over, "it has come to a stop"
    while router.target.inbox:
        router.target.read()
    assert not router.target.judged
    assert not router.target.session.wants_forward
    while router.drafted:
        router.early_arrived()
    router.book.forget()
    assert router.num_used + router.book.num_wasted == router.num_early_tokens
    return router


@given(st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300, deadline=None)
def test_router_and_target_agree_whether_a_round_follows_and_on_what(rng: random.Random, losses: bool) -> None:
    run(rng, losses=losses)


def test_the_agreement_is_tried_where_it_matters() -> None:
    """Runs like those above meet hits, and misses that go on plainly."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += run(random.Random(seed), losses=True).seen
    assert min(seen["taken"], seen["hits"]) > 500
    assert seen["plain"] > 100
