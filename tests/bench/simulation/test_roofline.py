"""Sizes against what is published of models and GPUs, and a forward's time against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulation.assumptions import Assumptions
from bench.simulation.hardware import GPUS, pick_gpu
from bench.simulation.models import MODELS, pick_model
from bench.simulation.roofline import RooflineDevice
from engine.errors import InvalidArgument, ModelNotFound

PEAKS = Assumptions(bandwidth_share=1.0, compute_share=1.0, layer_s=0.0, forward_s=0.0, allreduce_s=0.0)


def device(name: str, gpu: str, tp_size: int = 1, context: int = 1, assumptions: Assumptions = PEAKS) -> RooflineDevice:
    return RooflineDevice(MODELS[name], GPUS[gpu], tp_size, context, assumptions)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3.2-1b", 1.236), ("llama-3.2-3b", 3.213),
     ("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-3b", 3.086), ("qwen2.5-7b", 7.616),
     ("qwen2.5-14b", 14.77), ("qwen2.5-32b", 32.76), ("qwen2.5-72b", 72.71)],
)  # fmt: skip
def test_weights_add_up_to_what_is_published(name: str, billions: float) -> None:
    assert MODELS[name].num_weights / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("name", "kib"), [("llama-3-70b", 320), ("llama-3-8b", 128), ("llama-3.2-1b", 32)])
def test_kv_of_a_token(name: str, kib: int) -> None:
    assert MODELS[name].kv_token_bytes == kib * 1024


def test_decoding_alone_takes_as_long_as_reading_the_weights() -> None:
    forward = device("llama-3-70b", "a100-80gb", tp_size=4).forward(1, 1)
    read = (MODELS["llama-3-70b"].num_weights - 128256 * 8192) * 2  # the embedding is looked up, not read
    assert forward.memory_s == pytest.approx(read / 4 / 2.039e12, rel=1e-4)
    assert forward.bound == "memory"
    assert forward.seconds - forward.memory_s == pytest.approx(forward.communication_s)


def test_many_rows_are_bound_by_arithmetic() -> None:
    few, many = (device("llama-3-8b", "l40s").forward(sessions, 8) for sessions in (1, 256))
    assert (few.bound, many.bound) == ("memory", "compute")
    assert many.compute_s == pytest.approx(256 * few.compute_s)
    assert few.compute_s == pytest.approx(2 * 8 * MODELS["llama-3-8b"].num_multiplied / 362.05e12, rel=1e-3)


def test_context_is_read_once_a_session_however_many_rows_it_has() -> None:
    near, far = (device("llama-3-70b", "h100-80gb", 4, context) for context in (1, 8001))
    read_s = 8000 * 320 * 1024 / 4 / 3.35e12
    assert far.forward(8, 1).memory_s - near.forward(8, 1).memory_s == pytest.approx(8 * read_s)
    assert far.forward(8, 6).memory_s == far.forward(8, 1).memory_s


def test_overheads_are_what_they_are_called() -> None:
    assumed = PEAKS.replaced(["layer_s=1e-5", "forward_s=2e-4", "allreduce_s=1e-5"])
    forward = device("llama-3-70b", "h100-80gb", 4, assumptions=assumed).forward(1, 1)
    assert forward.launch_s == pytest.approx(80e-5 + 2e-4)
    assert forward.communication_s == pytest.approx(160 * (1e-5 + 8192 * 2 * 1.5 / 450e9))
    assert device("llama-3.2-1b", "l40s", assumptions=assumed).forward(1, 1).communication_s == 0.0


def test_a_slice_has_its_share() -> None:
    part, whole = GPUS["a100-40gb-3g.20gb"], GPUS["a100-40gb"]
    assert part.memory_bytes == 20e9
    assert part.bandwidth == whole.bandwidth / 2
    assert part.flops == pytest.approx(whole.flops * 42 / 108)


def test_slices_of_an_h100_are_not_all_of_one_size() -> None:
    whole = GPUS["h100-80gb"]
    shares = [GPUS[f"h100-80gb-{name}"].flops / whole.flops for name in ("1g.10gb", "2g.20gb", "3g.40gb")]
    assert [round(132 * share) for share in shares] == [16, 32, 60]
    assert GPUS["h100-80gb-1g.10gb"].bandwidth == whole.bandwidth / 8


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="MIG instances do not reach each other"):
        device("llama-3-8b", "a100-40gb-3g.20gb", tp_size=2)
    with pytest.raises(InvalidArgument, match="found 3, allowed is a size that divides"):
        device("llama-3-70b", "h100-80gb", tp_size=3)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H100", "h100-80gb"), ("a100", "a100-80gb"), ("a100-40gb-1g5gb", "a100-40gb-1g.5gb"),
        ("h100-1g.10gb", "h100-80gb-1g.10gb"), ("h200-141gb-1g.18gb", "h200-141gb"),
    ],
)  # fmt: skip
def test_an_unknown_gpu_names_those_there_are(name: str, near: str) -> None:
    with pytest.raises(InvalidArgument, match="--gpu: found") as raised:
        pick_gpu(name, "--gpu")
    assert f"did you mean {near}?" in str(raised.value)
    assert all(known in str(raised.value) for known in GPUS)


def test_a_folder_says_its_own_sizes(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = pick_model(str(tmp_path), "--draft")
    assert (found.num_weights, found.is_tied) == (MODELS["qwen2.5-0.5b"].num_weights, True)
    assert found.name == tmp_path.name


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json: no such file"):
        pick_model(str(tmp_path), "--draft")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InvalidArgument, match="of type gpt2', allowed is a dense decoder"):
        pick_model(str(tmp_path), "--draft")


@pytest.mark.parametrize(
    ("given", "message"),
    [("recal=0.5", "did you mean recall?"), ("recall", "NAME=VALUE"), ("recall=2", "less than or equal to 1"),
     ("gap_s=soon", "a valid number")],
)  # fmt: skip
def test_an_assumption_is_checked(given: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Assumptions().replaced([given])
    assert message in str(raised.value)
    assert raised.value.field == "--assume"
