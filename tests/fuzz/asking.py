"""Sound requests of the public API, small ones, for a fuzzer to spoil."""

from __future__ import annotations

from random import Random

from bench.emulated_model import NUM_WORDS
from rpc.pb import generation_pb2 as pb

_WORDS = ("", "a", "the quick brown fox", "naïve – 𝔘nicode\n", "<end>", "{{ 7 * 7 }}", "x" * 300)


def generate_message(rng: Random) -> pb.GenerateRequest:
    """A request for a few tokens."""
    message = pb.GenerateRequest(request_id=rng.choice(("", "r-1")), smooth_stream=rng.random() < 0.05)
    kind = rng.randrange(4)
    if kind == 0:
        message.prompt = rng.choice(_WORDS[1:])
    elif kind == 1:
        message.chat.CopyFrom(_chat(rng))
    else:
        message.tokenized.input_ids.extend(rng.randrange(NUM_WORDS) for _ in range(rng.choice((1, 2, 20, 90))))
    message.sampling_params.CopyFrom(_sampling(rng))
    message.speculation.CopyFrom(_speculation(rng))
    if rng.random() < 0.1:
        message.resume_from.extend(rng.randrange(NUM_WORDS) for _ in range(rng.randrange(1, 4)))
    return message


def tokenize_message(rng: Random) -> pb.TokenizeRequest:
    """A text or a conversation."""
    if rng.random() < 0.5:
        return pb.TokenizeRequest(text=rng.choice(_WORDS), add_special_tokens=rng.random() < 0.5)
    return pb.TokenizeRequest(chat=_chat(rng))


def _chat(rng: Random) -> pb.ChatMessages:
    roles = ("user", "assistant", "system", "nobody")
    turns = [pb.ChatMessage(role=rng.choice(roles), content=rng.choice(_WORDS)) for _ in range(rng.randrange(1, 4))]
    return pb.ChatMessages(messages=turns)


def _sampling(rng: Random) -> pb.SamplingParams:
    params = pb.SamplingParams(max_tokens=rng.randrange(1, 6), ignore_eos=rng.random() < 0.5)
    if rng.random() < 0.5:
        params.temperature, params.seed = rng.choice((0.0, 0.7, 1.0)), rng.getrandbits(40)
        params.top_p, params.top_k, params.min_p = rng.choice((1.0, 0.9)), rng.choice((0, 5)), rng.choice((0.0, 0.05))
    if rng.random() < 0.1:
        params.stop.extend(["ba", "é"])
    return params


def _speculation(rng: Random) -> pb.Speculation:
    speculation = pb.Speculation(mode=rng.choice((0, 1, 2)), drafter=rng.choice(("", "auto", "draft_model", "ngram")))
    if rng.random() < 0.3:
        speculation.num_speculative_tokens = rng.choice((1, 3, 8))
    if rng.random() < 0.2:
        speculation.max_draft_tokens = rng.choice((0, 1, 4))
    if rng.random() < 0.3:
        speculation.run_ahead = rng.random() < 0.5
    return speculation
