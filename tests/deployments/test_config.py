"""Every fault of a configuration file is one line that names file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import OutriderConfig, Section
from deployments.config_file import CONFIGS, ConfigError, load_config, parse_config


@pytest.fixture
def error_of(tmp_path: Path):
    def load(text: str) -> str:
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
        return message.removeprefix(f"{path}: ")

    return load


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_bundled_configurations_load_by_name_and_by_path(name: str) -> None:
    assert load_config(name) == load_config(CONFIGS / f"{name}.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == OutriderConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("targt: {}", "targt: unknown key; did you mean `target`?"),
        ("target: {dtyp: float32}", "target.dtyp: unknown key; did you mean `dtype`?"),
        ("target: {kv_cache: {num_block: 4}}", "target.kv_cache.num_block: unknown key; did you mean `num_blocks`?"),
        ("target: {threads: many}", "target.threads: input should be a valid integer"),
        ("target: {threads: 0}", "target.threads: input should be greater than or equal to 1, found 0"),
        ("target: {stall_limit_s: 0}", "target.stall_limit_s: input should be greater than 0, found 0"),
        ("target: {tensor_parallel_size: 0}", "target.tensor_parallel_size: input should be greater than or equal to"),
        (
            "target: {tensor_parallel_size: 4, ray_actor_options: {num_cpus: 0}}",
            "target: ray_actor_options asks for nothing, but each of the 4 processes",
        ),
        ("target: {kv_cache: {block_size: 16}}", "target.kv_cache: give exactly one of num_blocks and memory_gib"),
        ("speculation: {drafters: [medusa]}", "speculation.drafters.0: input should be 'draft_model' or 'ngram'"),
        ("speculation: {costs: {verify_s: 0}}", "speculation.costs.verify_s: input should be greater than 0, found 0"),
        ("speculation: {costs: {overhead_s: .inf}}", "speculation.costs.overhead_s: input should be a finite number"),
        ("speculation: {costs: {draft_s: 1}}", "speculation.costs.draft_s: unknown key; did you mean `draft_token_s`?"),
        ("speculation: {costs: 0.1}", "speculation.costs: input should be a valid dictionary"),
        ("speculation: {max_draft_tokens: 8}", "speculation.max_draft_tokens is 8, but target.reproducible"),
        ("server: {grpc_port: 70000}", "server.grpc_port: input should be less than or equal to 65535, found 70000"),
        ("target: demo", "target: input should be a valid dictionary"),
        ("- target", "found list, expected sections"),
        ("target: [", "not YAML: "),
        ("target: {model: a, model: b}", "not YAML: `model` is given twice"),
        ("zzz: 1", "zzz: unknown key; known are target, draft, speculation, router, server"),
    ],
)
def test_a_fault_names_its_field(error_of, text: str, expected: str) -> None:
    assert error_of(text).startswith(expected)


def test_each_engine_has_a_stall_limit_of_its_own() -> None:
    config = parse_config({"target": {"stall_limit_s": 600}}, "test")
    assert (config.target.stall_limit_s, config.draft.stall_limit_s) == (600.0, 60.0)


def test_several_faults_are_counted(error_of) -> None:
    assert error_of("target: {threads: 0, dtype: int8}").endswith("(and 1 more)")


def test_a_missing_file_lists_what_is_bundled() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file; bundled configurations are demo, "):
        load_config("nowhere.yaml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_every_field_says_what_it_is_for() -> None:
    sections = [OutriderConfig, *Section.__subclasses__()]
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert undocumented == []
