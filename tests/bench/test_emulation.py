"""Emulation profiles: what they hold, what is refused by name, and the model folder they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.emulated_model import EMULATED, NUM_WORDS, VOCAB_SIZE, make_folder
from bench.emulation import Emulation
from deployments.config_file import ConfigError, load_config, parse_config
from deployments.engine_settings import draft_settings, target_settings
from deployments.memory import target_memory
from router.tokenizer import Tokenizer

PROFILES = Path(__file__).parents[2] / "bench" / "profiles"
TIMES = {"step_s": 0.01, "row_share": 0.01}
EMULATION = {"target": TIMES, "draft": TIMES}
MODELS = {"target": {"model": EMULATED}, "draft": {"model": EMULATED}}


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_is_a_configuration_that_starts(path: Path) -> None:
    config = load_config(path)
    assert config.emulation is not None
    target, draft = target_settings(config), draft_settings(config).engine
    for settings in (target, draft):
        assert settings.shapes is None
        assert settings.max_num_batched_tokens >= 64 * 9
        assert settings.num_blocks * settings.block_size > 128 * 1024
        assert settings.max_sessions >= 128
        assert (settings.tokenizer, settings.vocab_size) == (target.tokenizer, target.vocab_size)
    (rank,) = target_memory(config)
    assert rank.weights == 0


def test_the_70b_profile_takes_what_its_sizes_say() -> None:
    emulation = load_config(PROFILES / "70b-1b.yaml").emulation
    assert emulation is not None
    times = emulation.target.forward_time(2.0)
    assert times.base_s == pytest.approx(0.0366)
    assert times.per_row_s == times.per_prompt_row_s == pytest.approx(0.004 * 0.0366)
    assert emulation.draft.forward_time(1.0).base_s == pytest.approx(0.002)
    assert emulation.varied(rtt_s=0.002).target_one_way_s == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("emulation", "error"),
    [
        ({**EMULATION, "alpha": 1.5}, r"emulation\.alpha: .*1\.5"),
        ({**EMULATION, "recal": 0.9}, r"emulation\.recal: unknown key; did you mean `recall`"),
        ({"target": TIMES, "draft": {**TIMES, "step_s": 0}}, r"emulation\.draft\.step_s: "),
        ({"target": TIMES}, r"emulation\.draft: field required"),
    ],
)
def test_what_a_profile_says_wrong_is_named(emulation: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_config({**MODELS, "emulation": emulation}, "profile.yaml")


def test_emulated_models_and_emulated_devices_go_together() -> None:
    with pytest.raises(ConfigError, match="needs the section `emulation`"):
        parse_config(MODELS, "profile.yaml")
    with pytest.raises(ConfigError, match=r"target\.model and draft\.model are `emulated`"):
        parse_config({"target": MODELS["target"], "emulation": EMULATION}, "profile.yaml")
    target = {**MODELS["target"], "tensor_parallel_size": 4}
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1"):
        parse_config({"target": target, "draft": MODELS["draft"], "emulation": EMULATION}, "profile.yaml")


def test_variants_are_checked_like_profiles() -> None:
    emulation = Emulation.model_validate(EMULATION)
    varied = emulation.varied(alpha=0.5, alpha_changes={100: 0.1}, dilation=4.0, rtt_s=0.01)
    assert (varied.alpha, varied.target_one_way_s, varied.draft_one_way_s) == (0.5, 0.02, 0.02)
    assert varied.draft_stub().agreement.alpha == ((0, 0.5), (100, 0.1))
    assert emulation.alpha == 0.8
    far = varied.varied(draft_rtt_s=0.002)
    assert (far.target_one_way_s, far.draft_one_way_s) == (0.02, 0.004)
    with pytest.raises(ValidationError, match="alpha"):
        emulation.varied(alpha=2.0)


def test_words_are_whole_text_and_nothing_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path / EMULATED))
    assert NUM_WORDS < tokenizer.vocab_size <= VOCAB_SIZE
    assert not tokenizer.special_ids & set(range(NUM_WORDS))
    for word in range(NUM_WORDS):
        assert tokenizer.decode([word]).isascii()


def test_a_damaged_folder_is_made_good_and_a_good_one_left_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / EMULATED)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    (folder / "config.json").write_text("{")
    make_folder(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
