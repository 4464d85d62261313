"""Owns the sizes of a model: what its config.json says of layers, heads and features, and what follows from those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InvalidArgument, ModelNotFound
from engine.settings import Dtype

SIZE_FIELD = "target.tensor_parallel_size"
DTYPE_BYTES: Mapping[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def read_model_config(folder: Path) -> Any:
    """The transformers config of a model folder, a distilled draft's too. Raises ModelNotFound."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; it tells the sizes of the model")
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model decides how it can be cut and how much it holds."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_length: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """From a transformers config."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            # GPT-2 and OPT call it something else, and make it four times as wide.
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocab_size=text.vocab_size,
            max_context_length=text.max_position_embeddings,
        )

    def check_divides(self, tp_size: int) -> None:
        """Raises InvalidArgument, with the numbers, unless every size that is cut divides by `tp_size`."""
        cut = {
            "attention heads": self.num_heads,
            "key/value heads": self.num_kv_heads,
            "MLP features": self.intermediate_size,
            "vocabulary entries": self.vocab_size,
        }
        uneven = [f"{count} {what}" for what, count in cut.items() if count % tp_size]
        if uneven:
            common = math.gcd(*cut.values())
            fit = [str(size) for size in range(1, self.num_kv_heads + 1) if common % size == 0]
            raise InvalidArgument(
                SIZE_FIELD, tp_size, f"a size that divides this model's {', '.join(uneven)}: {', '.join(fit)}"
            )

    def kv_block_bytes(self, block_size: int, dtype: Dtype, tp_size: int = 1) -> int:
        """Keys and values of one block of `block_size` tokens, on one of `tp_size` ranks, which divides the heads."""
        per_token = 2 * self.num_layers * (self.num_kv_heads // tp_size) * self.head_dim
        return per_token * block_size * DTYPE_BYTES[dtype]
