"""Folders that look like published models to whoever plans memory: config.json, and headers of the weights alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _config(family: dict[str, Any], tied: bool, *sizes: int) -> dict[str, Any]:
    return {**family, "tie_word_embeddings": tied, **dict(zip(SIZES, sizes, strict=True))}


PUBLISHED = {
    "/models/Llama-3.3-70B-Instruct": _config(LLAMA, False, 8192, 28672, 80, 64, 8, 128256),
    "/models/Llama-3.2-1B-Instruct": _config(LLAMA, True, 2048, 8192, 16, 32, 8, 128256),
    "/models/Qwen2.5-72B-Instruct": _config(QWEN, False, 8192, 29568, 80, 64, 8, 152064),
    "/models/Qwen2.5-0.5B-Instruct": _config(QWEN, True, 896, 4864, 24, 14, 2, 151936),
}


def make_folder(name: str, folder: Path) -> Path:
    """The folder of a published model, without the numbers."""
    config = PUBLISHED[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({tensor: {"shape": shape} for tensor, shape in _tensors(config)}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    hidden, inter, layers, heads, kv_heads, vocab = (config[size] for size in SIZES)
    kv = hidden // heads * kv_heads
    yield "model.embed_tokens.weight", [vocab, hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [vocab, hidden]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{at}.self_attn.{name}_proj.weight", [rows, hidden]
            if config["model_type"] == "qwen2":
                yield f"{at}.self_attn.{name}_proj.bias", [rows]
        yield f"{at}.self_attn.o_proj.weight", [hidden, hidden]
        yield f"{at}.mlp.gate_proj.weight", [inter, hidden]
        yield f"{at}.mlp.up_proj.weight", [inter, hidden]
        yield f"{at}.mlp.down_proj.weight", [hidden, inter]
        yield f"{at}.input_layernorm.weight", [hidden]
        yield f"{at}.post_attention_layernorm.weight", [hidden]
