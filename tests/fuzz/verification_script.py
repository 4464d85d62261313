"""What a fuzzer says to a target."""

from __future__ import annotations

from typing import Any

from bench.emulated_model import NUM_WORDS
from engine.proposal import State
from engine.sampling import SamplingParams
from rpc.codecs import encode_sampling, encode_state
from rpc.pb import session_pb2, verification_pb2
from tests.fuzz.oracle import TARGET, continuation, is_foreseeable
from tests.fuzz.scripts import Script, Told


class VerificationScript(Script):
    """A router's words to a target."""

    request_type = verification_pb2.VerificationRequest

    def _open_request(self, told: Told) -> Any:
        rng = self.rng
        num_committed = rng.choice((0, 0, 0, 1, 5))
        committed = [rng.randrange(NUM_WORDS) for _ in range(num_committed)]
        prompt, told.tokens = list(told.tokens), told.tokens + committed
        self._foresee(told)
        stops = session_pb2.EngineStops(max_tokens=told.room + num_committed, ignore_eos=rng.random() < 0.5)
        opened = verification_pb2.OpenTarget(
            session=told.number,
            prompt_token_ids=prompt,
            committed_token_ids=committed,
            sampling=encode_sampling(told.sampling),
            stops=stops,
            traceparent=self._traceparent(),
            deadline_s=rng.choice((0.0, 0.0, 0.0, 60.0, 1e9)),
        )
        self._commit(told, 0)
        return self._request(open=opened)

    def _foresee(self, told: Told) -> None:
        """Where the target's choice depends on the generator the script knows nothing, and mostly is stale."""
        sampling = told.sampling
        known = sampling if is_foreseeable(sampling) else SamplingParams()
        told.coming = continuation(TARGET, self.vocab_size, told.tokens, told.room, known)

    def _commit(self, told: Told, num_accepted: int) -> None:
        new, told.coming = told.coming[: num_accepted + 1], told.coming[num_accepted + 1 :]
        told.before, told.tokens = told.tokens, told.tokens + new
        told.room -= len(new)

    def _round(self, told: Told) -> Any:
        dice = self.rng.random()
        if dice < 0.6:
            return self._propose(told)
        if dice < 0.85:
            return self._request(early=self._early(told))
        decode = verification_pb2.Decode(
            session=told.number, max_tokens=self.rng.choice((0, 1, 3, 2**32 - 1)), traceparent=self._traceparent()
        )
        self._commit(told, 0)
        return self._request(decode=decode)

    def _propose(self, told: Told) -> Any:
        rng, tokens = self.rng, self._drafted(told)
        base = told.state
        tree = session_pb2.ProposalTree(
            base=encode_state(base),
            tokens=tokens,
            parents=self._parents(len(tokens)),
            drafter=rng.choice(("draft_model", "ngram", "")),
            draft_time_s=0.001,
        )
        if not told.sampling.greedy and told.sampling.seed is None and rng.random() < 0.7:
            tree.draft_probs.extend(self._distribution(token) for token in tokens)
        told.trunk = tuple(tokens)
        agreeing = 0
        if not tree.parents:
            while agreeing < len(tokens) and told.coming[agreeing : agreeing + 1] == [tokens[agreeing]]:
                agreeing += 1
        self._commit(told, agreeing)
        return self._request(
            propose=verification_pb2.Propose(session=told.number, proposal=tree, traceparent=self._traceparent())
        )

    def _drafted(self, told: Told) -> list[int]:
        """Tokens that will be accepted, then some that may not."""
        rng = self.rng
        right = told.coming[: rng.randrange(6)]
        return right + [rng.randrange(NUM_WORDS) for _ in range(rng.choice((0, 0, 1, 4, 100, 130)))]

    def _parents(self, num_tokens: int) -> list[int]:
        if self.rng.random() < 0.8:
            return []
        return [self.rng.randrange(-1, index) if index else -1 for index in range(num_tokens)]

    def _distribution(self, token: int) -> session_pb2.SparseDistribution:
        others = self.rng.sample(range(NUM_WORDS), 3)
        ids = [token, *(other for other in others if other != token)]
        return session_pb2.SparseDistribution(ids=ids, probs=[1.0 / len(ids)] * len(ids))

    def _early(self, told: Told) -> session_pb2.EarlyProposals:
        """For what may come of the round just asked for, or of the one before."""
        rng = self.rng
        after = State.of(told.before) if rng.random() < 0.7 else told.state
        new = told.tokens[len(told.before) :]
        outcomes = [(max(len(new) - 1, 0), new[-1] if new else 0), (0, rng.randrange(NUM_WORDS))]
        branches = [
            session_pb2.Branch(num_accepted=accepted, token=token, tokens=told.coming[: rng.randrange(4)])
            for accepted, token in outcomes
        ]
        return session_pb2.EarlyProposals(
            session=told.number,
            after=encode_state(after),
            trunk=encode_state(State.of(told.before).extend(told.trunk)),
            branches=branches,
            drafter="draft_model",
            plain_otherwise=rng.random() < 0.5,
        )
