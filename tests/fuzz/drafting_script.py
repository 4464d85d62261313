"""What a fuzzer says to a draft."""

from __future__ import annotations

import math
from typing import Any

from bench.emulated_model import NUM_WORDS
from engine.sampling import SamplingParams
from rpc.codecs import encode_sampling, encode_state
from rpc.pb import drafting_pb2
from tests.fuzz.oracle import DRAFT, continuation
from tests.fuzz.scripts import Script, Told


class DraftingScript(Script):
    """A router's words to a draft."""

    request_type = drafting_pb2.DraftRequest

    def _open_request(self, told: Told) -> Any:
        opened = drafting_pb2.OpenDraft(
            session=told.number,
            prompt_token_ids=told.tokens,
            sampling=encode_sampling(told.sampling),
            traceparent=self._traceparent(),
        )
        told.coming = continuation(DRAFT, self.vocab_size, told.tokens, 4, SamplingParams())
        return self._request(open=opened)

    def _round(self, told: Told) -> Any:
        rng = self.rng
        new = told.coming[: rng.randrange(4)] + [rng.randrange(NUM_WORDS) for _ in range(rng.choice((0, 1, 1, 3)))]
        repeated = rng.choice((0, 0, 1, 2))
        told.tokens = told.tokens + new
        told.room -= len(new)
        told.coming = continuation(DRAFT, self.vocab_size, told.tokens, 4, SamplingParams())
        advance = drafting_pb2.Advance(
            session=told.number,
            base=encode_state(told.state),
            tail=told.tokens[-(len(new) + repeated) :],
            num_speculative_tokens=2**32 - 1 if rng.random() < 0.02 else rng.choice((0, 1, 3, 3, 5, 8, 20)),
            confidence_threshold=rng.choice((0.0, 0.0, 0.4, math.inf)),
            traceparent=self._traceparent(),
        )
        if rng.random() < 0.6:
            advance.run_ahead.CopyFrom(self._run_ahead())
        return self._request(advance=advance)

    def _run_ahead(self) -> drafting_pb2.RunAhead:
        rng = self.rng
        return drafting_pb2.RunAhead(
            num_speculative_tokens=rng.choice((0, 1, 3, 6, rng.choice((0, 1, 2**32 - 1)))),
            budget_s=rng.choice((0.0, 1e-4, 0.01, 1.0, 1e300)),
            acceptance=rng.random(),
            num_proposed=rng.choice((0, 0, 1, 3)),
            round_s=rng.choice((0.0, 0.001, 1.0, 1e300)),
        )
