"""Owns `transformers` as a peer: plain generate(), assisted generation and prompt lookup, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from bench.modes import PLAIN
from bench.peers.peer import Arrivals, Output, max_tokens
from bench.prompts import Prompt
from engine.errors import ModelNotFound
from engine.settings import EngineSettings
from router.tokenizer import Tokenizer

ASSISTED, PROMPT_LOOKUP = "assisted", "prompt_lookup"


class _Streamer(BaseStreamer):
    """Passes on what generate() puts, but for the prompt, which it puts first."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self.arrivals.came(value.flatten().tolist())
        self._saw_prompt = True

    def end(self) -> None:
        """All that came was counted as it came."""


class TransformersPeer:
    """The library's own decoding of the same weights: number format, device and threads are those of our engine.

    Args:
        target: what our engine decodes with.
        prompt_lookup_num_tokens: most tokens prompt lookup proposes at once.
        assistant: a draft that transformers itself can load, of the target's vocabulary; None leaves assisted
            generation out.

    Raises:
        ModelNotFound: transformers cannot load one of the folders.
    """

    name = "transformers"

    def __init__(self, target: EngineSettings, prompt_lookup_num_tokens: int, assistant: Path | None = None) -> None:
        torch.set_num_threads(target.threads)
        self._target, self._device = target, torch.device(target.device)
        self._tokenizer = Tokenizer(target.model_path)
        self._model = self._load(target.model_path)
        self._options: dict[str, dict[str, Any]] = {PLAIN: {}}
        if assistant is not None:
            self._options[ASSISTED] = {"assistant_model": self._load(assistant)}
        self._options[PROMPT_LOOKUP] = {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}

    @property
    def modes(self) -> Sequence[str]:
        return list(self._options)

    def generate(self, prompt: Prompt, mode: str) -> Output:
        given = torch.tensor([self._encode(prompt)], device=self._device)
        streamer = _Streamer()
        self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_tokens(prompt),
            streamer=streamer,
            **self._options[mode],
        )
        return streamer.arrivals.output()

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.messages is not None:
            return self._tokenizer.encode_chat(prompt.messages)
        return self._tokenizer.encode_prompt(prompt.text or "")

    def _load(self, folder: Path) -> Any:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self._target.dtype))
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFound(f"{folder}: transformers cannot load it: {error}") from error
        # In place of the folder's own, which may ask for sampling or penalties.
        ends = list(self._tokenizer.eos_token_ids)
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=ends, pad_token_id=ends[0] if ends else 0
        )
        return model.to(self._device).eval()
