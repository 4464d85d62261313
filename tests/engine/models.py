"""Tiny random Llama folders and plain decoding by transformers itself, the oracle of the engine tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
EOS = 2


def make_folder(path: Path, *, seed: int = 0, layers: int = 2, window: int = 256, vocab: int = VOCAB) -> Path:
    """A Llama of 2 layers, 4 query heads on 2 key heads, saved as float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def plain_greedy(folder: Path, prompt: list[int], max_tokens: int, *, eos: int | None = EOS) -> list[int]:
    """Greedy continuation by full recomputation with transformers; ends with `eos`, which is kept."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]
