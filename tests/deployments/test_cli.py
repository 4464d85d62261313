"""The command line: failures are one line on stderr and a status, and nothing needs a server to fail."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import typer

from deployments import cli
from deployments.client import Ask, CallFailed, Client, Result, default_address
from deployments.commands import generate
from deployments.commands.bench import _modes

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command as a shell would: status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def dead_address() -> str:
    """An address that nothing listens on, held so that nothing else takes it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def one_line(text: str) -> str:
    assert text.count("\n") == 1
    assert text.startswith("error: ")
    return text.strip().removeprefix("error: ")


def test_a_config_typo_ends_serve_with_status_2(outrider: Cli, tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("draft: {modle: x}")
    status, _, err = outrider("serve", "--config", str(path))
    assert status == 2
    assert one_line(err) == f"{path}: draft.modle: unknown key; did you mean `model`?"


def test_a_missing_model_ends_serve_before_anything_starts(outrider: Cli, tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    path.write_text("target: {model: /nowhere}")
    status, _, err = outrider("serve", "--config", str(path))
    assert (status, one_line(err).split(":")[0]) == (1, "/nowhere")


def test_a_wrong_pair_ends_serve_before_anything_starts(outrider: Cli, tmp_path: Path, model_folder) -> None:
    target, draft = model_folder("target"), model_folder("draft", specials=["<stop>"])
    path = tmp_path / "pair.yaml"
    path.write_text(f"target: {{model: {target}}}\ndraft: {{model: {draft}}}\n")
    status, _, err = outrider("serve", "--config", str(path))
    assert (status, one_line(err)) == (1, "token id 258 is '<stop>' in draft but '<end>' in target")


def test_check_pair_says_that_it_fits(outrider: Cli, model_folder) -> None:
    status, out, _ = outrider("check-pair", str(model_folder("draft", padding=5)), str(model_folder("target")))
    assert status == 0
    assert "pair fits: 259 token ids" in out
    assert "264 (draft) and 259 (target)" in out


def test_check_pair_names_the_first_differing_token(outrider: Cli, model_folder) -> None:
    draft = model_folder("draft", merges=[("t", "h"), ("i", "n")])
    status, _, err = outrider("check-pair", str(draft), str(model_folder("target")))
    assert (status, one_line(err)) == (1, "token id 257 is 'in' in draft but 'the' in target")


def test_generate_without_a_server_says_how_to_start_one(outrider: Cli, dead_address: str) -> None:
    status, out, err = outrider("generate", "--prompt", "hi", "--address", dead_address)
    assert (status, out) == (1, "")
    assert one_line(err).startswith(f"nothing answers at {dead_address}")


@pytest.mark.parametrize("arguments", [(), ("--prompt", "a", "--message", "b")])
def test_generate_wants_exactly_one_input(outrider: Cli, arguments: tuple[str, ...]) -> None:
    status, _, err = outrider("generate", *arguments)
    assert status == 2
    assert "exactly one of --prompt and --message" in one_line(err)


def test_generate_says_the_class_of_its_request(outrider: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    class Refusing(Client):
        def generate(self, ask: Ask, *_: object, **__: object) -> Result:
            asked.append(ask)
            raise CallFailed("speculation.workload: found 'poem'", grpc.StatusCode.INVALID_ARGUMENT)

    monkeypatch.setattr(generate, "Client", Refusing)
    status, _, err = outrider("generate", "--prompt", "a", "--workload", "poem", "--smooth-stream")
    assert (status, one_line(err)) == (1, "speculation.workload: found 'poem'")
    assert (asked[0].workload, asked[0].smooth_stream) == ("poem", True)


def test_an_unknown_option_is_status_2(outrider: Cli) -> None:
    status, _, err = outrider("generate", "--promt", "a")
    assert status == 2
    assert "--promt" in one_line(err)


def test_bench_names_the_faulty_line(outrider: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "b"}\n')
    status, _, err = outrider("bench", "--prompts", str(path))
    assert status == 1
    assert one_line(err).startswith(f"{path}:2: ")


PROFILE = str(Path(__file__).parents[2] / "bench" / "profiles" / "70b-1b.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give exactly one of --prompts and --emulate"),
        (("--prompts", "p.jsonl", "--emulate", PROFILE), "give exactly one of --prompts and --emulate"),
        (("--prompts", "p.jsonl", "--alpha", "0.5"), "--alpha: needs --emulate"),
        (("--emulate", PROFILE, "--limit", "3"), "--limit: needs --prompts"),
        (("--emulate", PROFILE, "--sessions", "1,x"), "--sessions: found '1,x', allowed are numbers from 1 on"),
        (("--emulate", PROFILE, "--sessions", "8,129"), "--sessions: found 129, allowed are at most 128"),
        (("--emulate", PROFILE, "--modes", "off,fast"), "--modes: found 'fast', allowed is off, auto, draft_model"),
        (("--emulate", "demo"), "--emulate: demo has no section `emulation`"),
        (("--emulate", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_bench_refuses_what_does_not_go_together(outrider: Cli, arguments: tuple[str, ...], said: str) -> None:
    status, out, err = outrider("bench", *arguments)
    assert (status, out) == (2, "")
    assert said in one_line(err)


def test_the_address_is_what_serve_noted(outrider_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_address() == "127.0.0.1:9000"
    (outrider_home / "address").write_text("127.0.0.1:9123")
    assert default_address() == "127.0.0.1:9123"
    monkeypatch.setenv("OUTRIDER_ADDRESS", "gpu1:9000")
    assert default_address() == "gpu1:9000"


def test_bench_modes_begin_with_plain_decoding_and_must_exist() -> None:
    assert [mode.name for mode in _modes("", ["ngram"])] == ["off", "auto", "ngram"]
    with pytest.raises(typer.BadParameter, match="'draft_model', allowed is off, auto, ngram"):
        _modes("draft_model", ["ngram"])
