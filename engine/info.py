"""Owns EngineInfo: what an engine says about its model and its present load. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A snapshot, cheap to take.

    Attributes:
        model: name or folder of the model.
        vocab_size: ids below it may be proposed and drawn; never more than the tokenizer knows.
        max_context_length: most tokens, prompt and output together, one session may hold.
        eos_token_ids: ids that end a sequence unless ignore_eos.
        max_proposal_tokens: most draft tokens one forward verifies for one session.
        num_blocks: KV blocks in the pool.
        free_blocks: blocks that no session holds; cached blocks count as free.
        block_size: tokens per block.
        running_sessions: open sessions.
        forwards: forwards run since start.
        forward_s: seconds spent in them.
        bubble_s: seconds with decoding sessions open but no forward running.
        tokenizer: fingerprint of the vocabulary; equal fingerprints make a pair.
    """

    model: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    max_proposal_tokens: int
    num_blocks: int
    free_blocks: int
    block_size: int
    running_sessions: int
    forwards: int = 0
    forward_s: float = 0.0
    bubble_s: float = 0.0
    tokenizer: str = ""
