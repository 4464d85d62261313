"""Owns turning a GGUF file into a Hugging Face folder. Run as a program it keeps torch out of the caller's process.

python -m engine.convert MODEL.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes bf16 safetensors, configuration, tokenizer and chat template of `gguf` into `folder`.

    The weights are dequantised; both sides of a pair and every reference run then read the same bf16 numbers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.bfloat16)
    # transformers refuses to save a model that it read from a GGUF file, so the weights move into a plain one.
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
