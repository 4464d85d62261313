"""Rendering serveConfigV2: what is added, what is refused, and that --check sees a difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments import cli
from deployments.yaml_file import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import

SERVER = {"host": "0.0.0.0"}


def rendered(given: dict[str, object]) -> dict[str, object]:
    from deployments.render import serve_config

    (application,) = serve_config(given, "test.yaml")["applications"]
    return application["args"]["config"]


def test_each_kind_of_replica_asks_for_the_resource_of_its_group() -> None:
    config = rendered({"target": {"ray_actor_options": {"num_gpus": 1, "resources": {"fast": 1}}}, "server": SERVER})
    assert config["target"] == {"ray_actor_options": {"num_gpus": 1, "resources": {"fast": 1, "outrider_target": 1}}}
    assert config["draft"] == {"ray_actor_options": {"num_cpus": 1, "resources": {"outrider_draft": 1}}}
    assert config["router"] == {"ray_actor_options": {"num_cpus": 0, "resources": {"outrider_router": 1}}}


@pytest.mark.parametrize("draft", [{"enabled": False}, {"application": "another"}])
def test_an_application_without_drafts_of_its_own_asks_no_place_for_one(draft: dict[str, object]) -> None:
    assert rendered({"draft": draft, "server": SERVER})["draft"] == draft


def test_what_was_given_is_not_changed() -> None:
    given = {"target": {"ray_actor_options": {"num_cpus": 1}}, "server": SERVER}
    before = yaml.safe_dump(given)
    rendered(given)
    assert yaml.safe_dump(given) == before


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "server.host: nobody outside a Pod reaches 127.0.0.1"),
        ({"server": {**SERVER, "haproxy": False}}, "server.haproxy: k8s/base/ray.env decides"),
        ({"targt": {}}, "targt: unknown key; did you mean `target`?"),
    ],
)
def test_what_could_not_work_is_refused(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rendered(given)
    assert str(caught.value).startswith(f"test.yaml: {field}")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exited:
        cli.main(["render", *arguments])
    return int(exited.value.code or 0)


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "mine"
    overlay.mkdir()
    (overlay / "outrider.yaml").write_text(yaml.safe_dump({"server": SERVER}))
    arguments = ("--overlay", "mine", "--overlays", str(tmp_path))
    assert run(*arguments, "--check") == 1
    assert not (overlay / "serve-config.yaml").exists()
    assert run(*arguments) == 0
    assert run(*arguments, "--check") == 0
    (overlay / "outrider.yaml").write_text(yaml.safe_dump({"server": SERVER, "router": {"max_queued": 1}}))
    capsys.readouterr()
    assert run(*arguments, "--check") == 1
    assert "run outrider render --overlay mine" in " ".join(capsys.readouterr().err.split())


def test_an_overlay_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--overlay", "mine", "--overlays", str(tmp_path)) == 2
    assert "no such file; overlays are nowhere here: see --overlays" in " ".join(capsys.readouterr().err.split())
