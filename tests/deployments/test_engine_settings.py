"""Sizes, devices and folders that engines are built from."""

from __future__ import annotations

import pytest

from deployments.config import OutriderConfig
from deployments.config_file import ConfigError, parse_config
from deployments.engine_settings import draft_settings, target_settings
from engine.errors import InvalidArgument


def config_for(model_folder, **target: object) -> OutriderConfig:
    """A pair of tiny Llamas: 2 layers of 4 query heads on 2 key heads of 16."""
    llama = {"padding": 1, "config": {"model_type": "llama"}}
    folders = [{"model": str(model_folder(name, **llama))} for name in ("target", "draft")]
    return parse_config({"target": {**folders[0], **target}, "draft": folders[1]}, "test")


def test_memory_becomes_blocks(model_folder) -> None:
    config = config_for(model_folder, dtype="float32", kv_cache={"memory_gib": 0.5, "block_size": 32})
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 32
    assert target_settings(config).num_blocks == 2**29 // bytes_per_block


def test_memory_is_that_of_each_device(model_folder) -> None:
    config = config_for(model_folder, tensor_parallel_size=2, dtype="float32", kv_cache={"memory_gib": 0.5})
    bytes_per_block = 2 * 2 * 1 * 16 * 4 * 16  # one key head on each
    assert target_settings(config).num_blocks == 2**29 // bytes_per_block


def test_memory_on_more_devices_than_there_are_heads_is_refused(model_folder) -> None:
    config = config_for(model_folder, tensor_parallel_size=4, kv_cache={"memory_gib": 0.5})
    with pytest.raises(InvalidArgument, match=r"target\.tensor_parallel_size: found 4, .*2 key/value heads"):
        target_settings(config)


def test_too_little_memory_is_refused_with_the_numbers(model_folder) -> None:
    config = config_for(model_folder, kv_cache={"memory_gib": 1e-6})
    with pytest.raises(ConfigError, match=r"target\.kv_cache\.memory_gib: 1e-06 GiB is less than the two blocks"):
        target_settings(config)


def test_a_gpu_asked_of_ray_is_the_device(model_folder) -> None:
    assert target_settings(config_for(model_folder, ray_actor_options={"num_gpus": 1})).device == "cuda"


def test_reproducible_mode_fixes_the_shapes_of_the_target_only(model_folder) -> None:
    config = config_for(model_folder, reproducible={"prompt_rows": 32, "generated_rows": 8})
    target, draft = target_settings(config), draft_settings(config)
    assert target.shapes is not None
    assert (target.shapes.prompt_rows, target.shapes.generated_rows) == (32, 8)
    assert draft.engine.shapes is None


def test_both_engines_know_the_vocabulary_of_the_pair(model_folder) -> None:
    config = config_for(model_folder)
    target, draft = target_settings(config), draft_settings(config)
    assert target.vocab_size == draft.engine.vocab_size == 259
    assert target.tokenizer == draft.engine.tokenizer
    assert draft.target_path == target.model_path
