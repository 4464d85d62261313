"""The memory plan against models that are then loaded, and against arithmetic by hand."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import InvalidArgument, ModelNotFound
from engine.loading import load_model
from engine.memory import available_bytes, plan_memory
from engine.planner import RowShapes
from engine.runner import Executor
from engine.settings import EngineSettings

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 query heads on 4 key heads of 16, untied, in several files."""
    path = tmp_path_factory.mktemp("models") / "model"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.fixture
def settings(folder: Path) -> EngineSettings:
    return EngineSettings(folder, dtype="float32", num_blocks=32, block_size=16)


def blocks_that_fit(settings: EngineSettings, size: int, available: int) -> int:
    """As the plan says of itself, asked for more than any device has room for."""
    with pytest.raises(InvalidArgument) as refused:
        plan_memory(replace(settings, num_blocks=1 << 30), size, available)
    return int(re.search(r"at most (\d+) blocks", refused.value.allowed)[1])


def test_one_rank_holds_what_the_headers_say(settings):
    (rank,) = plan_memory(settings, 1, 1 << 30)
    executor = Executor(settings, load_model(settings))
    loaded = [*executor.model.decoder.parameters(), *executor.model.head.parameters()]
    assert rank.weights == sum(parameter.numel() * 4 for parameter in loaded)
    assert rank.kv_blocks == sum(t.numel() * 4 for t in (*executor.cache.keys, *executor.cache.values))
    assert rank.free == (1 << 30) - rank.weights - rank.kv_blocks - rank.activations


def test_ranks_share_what_is_cut_and_repeat_what_is_not(settings):
    (whole,) = plan_memory(settings, 1, 1 << 30)
    halves = plan_memory(settings, 2, 1 << 30)
    whole_everywhere = 4 * 128 * (2 * 3 + 1 + 3)  # seven norms, and the biases of three output projections
    assert [rank.rank for rank in halves] == [0, 1]
    assert {rank.weights for rank in halves} == {(whole.weights - whole_everywhere) // 2 + whole_everywhere}
    assert {rank.kv_blocks for rank in halves} == {2 * 3 * 2 * 16 * 16 * 4 * 32}
    assert halves[0].activations - halves[1].activations == 4 * 512 * 8  # rank 0 alone judges


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shapes", [None, RowShapes()])
@pytest.mark.parametrize("max_context_length", [512, 1 << 20])
def test_the_blocks_that_fit_do_and_one_more_does_not(settings, size, shapes, max_context_length):
    available = 8 * MIB
    settings = replace(settings, shapes=shapes, max_context_length=max_context_length)
    blocks = blocks_that_fit(settings, size, available)
    assert blocks > 32
    assert min(rank.free for rank in plan_memory(replace(settings, num_blocks=blocks), size, available)) >= 0
    with pytest.raises(InvalidArgument, match=rf"at most {blocks} blocks"):
        plan_memory(replace(settings, num_blocks=blocks + 1), size, available)


def test_too_little_memory_says_what_would_fit(settings):
    wanted = replace(settings, num_blocks=600)
    with pytest.raises(InvalidArgument, match=r"600 blocks, \d+\.\d MiB more than the 16\.0 MiB") as refused:
        plan_memory(wanted, 1, 16 * MIB)
    assert refused.value.field == "target.kv_cache.num_blocks"
    said = re.search(r"at most (\d+) blocks \(a context of (\d+) tokens\)", refused.value.allowed)
    blocks, context = map(int, said.groups())
    assert blocks == blocks_that_fit(wanted, 1, 16 * MIB)
    assert context == min((blocks - 1) * 16, 1024)
    assert "target.tensor_parallel_size of 2" in refused.value.allowed
    plan_memory(wanted, 2, 16 * MIB)


def test_a_device_that_cannot_hold_the_weights_fits_no_block(settings):
    with pytest.raises(InvalidArgument, match="nothing on such devices"):
        plan_memory(settings, 1, MIB)


def test_uneven_sizes_and_missing_files_are_refused(settings, folder, tmp_path):
    with pytest.raises(InvalidArgument, match=r"found 3, .*8 attention heads, 4 key/value heads.*: 1, 2, 4"):
        plan_memory(settings, 3, 1 << 30)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        plan_memory(replace(settings, model_path=tmp_path), 1, 1 << 30)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        plan_memory(replace(settings, model_path=tmp_path), 1, 1 << 30)


def test_bfloat16_on_cpu_counts_the_head_packed_beside_its_table(target_folder):
    """The tiny Llama is tied: 64 tokens of 32 numbers, stored once."""
    table = 64 * 32 * 2
    (single,) = plan_memory(EngineSettings(target_folder, dtype="bfloat16"), 1, 1 << 30)
    (double,) = plan_memory(EngineSettings(target_folder, dtype="float32"), 1, 1 << 30)
    assert single.weights == double.weights // 2 + table


def test_memory_of_this_machine_is_read():
    assert MIB < available_bytes("cpu") < 1 << 50
