"""Owns loading: a Hugging Face folder, or a distilled draft's folder, becomes a LanguageModel.

A distilled draft's folder (docs/draft-format.md) has `outrider_draft` in its config.json, its decoder layers, a norm,
an output map and a draft-to-target vocabulary map; the embedding is the target's, read from the target's folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from engine.errors import InvalidArgument, ModelNotFound, PairMismatch
from engine.linear import PackedLinear, pack_linears, packing_pays
from engine.model import ATTENTION_NAME, LanguageModel, ModelShape
from engine.parallel import TensorParallel
from engine.settings import EngineSettings
from engine.shards import plain_linear, use_local_layers
from engine.sizes import SIZE_FIELD, ModelSizes, read_model_config

PACK_ROWS = 8


def load_model(
    settings: EngineSettings, target_path: Path | None = None, parallel: TensorParallel | None = None
) -> LanguageModel:
    """Loads `settings.model_path`, or this rank's part of it.

    Args:
        settings: where from, dtype, device, threads.
        target_path: the target's folder, needed by a distilled draft for the shared embedding.
        parallel: the group that a Hugging Face folder is spread over.

    Raises:
        InvalidArgument: the model cannot be cut into so many parts.
        ModelNotFound: the folder or a file in it is missing.
        PairMismatch: a distilled draft whose width or vocabulary is not the target's.
    """
    torch.set_num_threads(settings.threads)
    config = _read_config(settings.model_path)
    if "outrider_draft" in config:
        if target_path is None:
            raise ModelNotFound(f"{settings.model_path}: a distilled draft needs its target's folder for the embedding")
        return _load_distilled(settings, target_path)
    return _load_folder(settings) if parallel is None else _load_part(settings, parallel)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; a model folder holds config.json, weights and a tokenizer")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def model_shape(config: Any, generation_eos: int | list[int] | None = None) -> ModelShape:
    """Dimensions from a transformers config."""
    sizes = ModelSizes.of(config)
    eos = generation_eos if generation_eos is not None else config.eos_token_id
    return ModelShape(
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        max_context_length=sizes.max_context_length,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _load_folder(settings: EngineSettings) -> LanguageModel:
    model = _from_pretrained(settings)
    model = model.to(torch.device(settings.device)).eval()
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    pack_linears(decoder, PACK_ROWS)
    return LanguageModel(decoder, _packed_head(head.weight, head.bias), _shape_of(model))


def _load_part(settings: EngineSettings, parallel: TensorParallel) -> LanguageModel:
    from transformers.distributed.configuration_utils import DistributedConfig

    ModelSizes.of(read_model_config(settings.model_path)).check_divides(parallel.size)
    with parallel.together("loading"):
        model = _from_pretrained(
            settings, distributed_config=DistributedConfig(tp_size=parallel.size, tp_plan="auto")
        ).eval()
    if model.device.type != torch.device(settings.device).type:
        # transformers takes the machine's accelerator, if there is one, whatever is asked for.
        raise InvalidArgument("target.device", settings.device, f"{model.device.type} with {SIZE_FIELD} above 1")
    use_local_layers(model, parallel, reproducible=settings.shapes is not None)
    for part in (decoder := model.get_decoder(), head := model.get_output_embeddings()):
        pack_linears(part, PACK_ROWS)
    return LanguageModel(decoder, head, _shape_of(model).part(parallel.size))


def _from_pretrained(settings: EngineSettings, **distributed: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            settings.model_path,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=ATTENTION_NAME,
            **distributed,
        )
    except OSError as error:
        raise ModelNotFound(f"{settings.model_path}: {error}") from error


def _shape_of(model: Any) -> ModelShape:
    generation = model.generation_config
    return model_shape(model.config, generation.eos_token_id if generation else None)


def _packed_head(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
    return PackedLinear(weight, bias, PACK_ROWS) if packing_pays(weight) else plain_linear(weight, bias)


def _load_distilled(settings: EngineSettings, target_path: Path) -> LanguageModel:
    from transformers import AutoConfig, AutoModel

    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    config = AutoConfig.from_pretrained(settings.model_path, attn_implementation=ATTENTION_NAME)
    weights = load_file(settings.model_path / "model.safetensors")
    embedding = _target_embedding(target_path).to(dtype)
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise PairMismatch(
            f"{settings.model_path}: made for an embedding of {config.vocab_size} × {config.hidden_size}, "
            f"but that of {target_path} is {embedding.shape[0]} × {embedding.shape[1]}"
        )
    token_ids = weights.pop("draft_to_target").long()
    # logits = E[ids] · (output_map · hidden): the map is folded into the head once.
    head = (embedding[token_ids].float() @ weights.pop("output_map").float()).to(dtype)
    decoder = AutoModel.from_config(config, dtype=dtype)
    decoder.load_state_dict({**weights, "embed_tokens.weight": embedding})
    decoder = decoder.to(device).eval()
    pack_linears(decoder, PACK_ROWS)
    return LanguageModel(decoder, _packed_head(head.to(device)), model_shape(config), token_ids.to(device))


def _target_embedding(folder: Path) -> torch.Tensor:
    """The input embedding of a Hugging Face folder, read without loading the rest."""
    index = folder / "model.safetensors.index.json"
    name = "model.embed_tokens.weight"
    file = folder / "model.safetensors"
    if index.is_file():
        file = folder / json.loads(index.read_text(encoding="utf-8"))["weight_map"][name]
    if not file.is_file():
        raise ModelNotFound(f"{file}: no such file; the draft shares the target's embedding")
    with safe_open(file, framework="pt") as tensors:
        embedding: torch.Tensor = tensors.get_tensor(name)
    return embedding
