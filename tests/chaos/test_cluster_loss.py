"""Ray's own head process dies: what runs goes on, since no token passes through Ray."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cluster.local import free_port
from deployments.client import Ask, Client
from tests.serve.test_serve_command import processes_of, serving
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.chaos, pytest.mark.timeout(240)]


def test_a_stream_outlives_the_gcs(model_folders: tuple[Path, Path], tmp_path: Path) -> None:
    config, home = tmp_path / "small.yaml", tmp_path / "home"
    target, draft = model_folders
    config.write_text(
        f"target: {{model: {target}, dtype: float32}}\n"
        f"draft: {{model: {draft}, dtype: float32}}\n"
        f"server: {{grpc_port: {free_port()}, http_port: {free_port()}}}\n"
    )
    ask = Ask(prompt="the fox", sampling={"max_tokens": 440, "ignore_eos": True})
    try:
        with (
            serving(config, home) as (serve, printed),
            Client(printed.removeprefix("serving on "), resume_for_s=0.0) as client,
        ):
            undisturbed = client.generate(ask)
            children = psutil.Process(serve.pid).children(recursive=True)
            (gcs,) = [process for process in children if process.name() == "gcs_server"]

            def kill(_: str) -> None:
                gcs.kill()

            result = client.generate(ask, kill)
            assert result.token_ids == undisturbed.token_ids
            assert client.generate(ask).token_ids == undisturbed.token_ids  # nor do requests that come later need it
    finally:
        for process in processes_of(home):
            process.kill()
    assert until(lambda: not processes_of(home), 10.0)
