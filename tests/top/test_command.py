"""`outrider top` against endpoints of the test's own: where they are, what they say, and what is wrong with them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments import cli
from deployments.top.endpoints import endpoints_of, local_endpoints
from engine.errors import InvalidArgument, Unavailable
from tests.top.made import AFTER, BEFORE, exposition

Top = Callable[..., tuple[int, str, str]]


class Node(ThreadingHTTPServer):
    """Answers with the next of `answers` each time, and with the last of them from then on."""

    answers: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Node)
        assert self.path == "/metrics"
        answers = self.server.answers
        body = (answers.pop(0) if len(answers) > 1 else answers[0]).encode()
        self.send_response(200 if body else 503)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr, which is what is tested."""


@pytest.fixture
def node() -> Iterator[Node]:
    server = Node(("127.0.0.1", 0), _Handler)
    server.answers = [exposition(BEFORE), exposition(AFTER)]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def top(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Top:
    """Runs the command as a shell with 80 columns would: status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exited:
            cli.main(["top", *arguments, "--every", "0.2"])
        captured = capsys.readouterr()
        return int(exited.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def silent() -> Iterator[str]:
    """A URL that nothing listens on, held so that nothing else takes it."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


def test_one_view_after_two_samples(top: Top, node: Node) -> None:
    status, out, err = top("--metrics", node.url, "--once")
    assert (status, err) == (0, "")
    assert out.startswith("outrider top  ")
    assert "draft_model      75% 4.0" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_says_the_same_and_who_did_not_answer(top: Top, node: Node, silent: str) -> None:
    status, out, _ = top("--metrics", node.url, "--metrics", silent, "--once", "--json")
    content = json.loads(out)
    assert status == 0
    assert content["drafters"][0]["acceptance"] == 0.75
    assert content["endpoints"] == [f"{node.url}/metrics", f"{silent}/metrics"]
    assert content["no_answer"].keys() == {f"{silent}/metrics"}
    assert content["tokens_per_s"] == pytest.approx(500.0 / content["seconds"])


def test_a_node_that_falls_silent_is_said_so(top: Top, node: Node) -> None:
    node.answers = [exposition(BEFORE), ""]
    status, out, _ = top("--metrics", node.url, "--once")
    assert status == 0
    assert "no answer from" in out
    assert "HTTP 503" in out


@pytest.mark.parametrize(
    ("answer", "said"),
    [("ray_gcs_nodes 1.0\n", "no metrics of outrider at "), ('ray_outrider_x{a="b 1\n', "not metrics in Prometheus'")],
)
def test_an_endpoint_of_another_kind_is_refused(top: Top, node: Node, answer: str, said: str) -> None:
    node.answers = [answer]
    status, out, err = top("--metrics", node.url, "--once")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert said in err


def test_where_nothing_answers_the_address_is_named(top: Top, silent: str) -> None:
    status, _, err = top("--metrics", silent, "--once")
    assert status == 1
    assert err.startswith(f"error: nothing answers at {silent}/metrics: ")


def test_a_view_that_goes_on_needs_a_terminal(top: Top, node: Node) -> None:
    status, _, err = top("--metrics", node.url)
    assert (status, err) == (2, "error: Invalid value: standard output is no terminal; give --once or --json\n")


def test_urls_are_made_whole() -> None:
    assert endpoints_of(["http://a:8080", "http://a:8080/metrics", "https://b/proxy/metrics"]) == [
        "http://a:8080/metrics",
        "https://b/proxy/metrics",
    ]
    with pytest.raises(InvalidArgument, match="a:8080"):
        endpoints_of(["a:8080"])


def test_the_latest_cluster_that_still_runs_is_found(tmp_path: Path) -> None:
    def session(name: str, at: int, **ports: str) -> None:
        folder = tmp_path / name / "session_latest"
        folder.mkdir(parents=True)
        for node, port in ports.items():
            (folder / f"metrics_export_port_{node}").write_text(port)
        os.utime(folder, (at, at))

    session("outrider-old", 1, a="4001")
    session("ray", 2, a="4002", b="4003")
    session("outrider-ended", 3, a="4004", b="soon")
    found = local_endpoints(tmp_path, lambda port: port != 4004)
    assert found == ["http://127.0.0.1:4002/metrics", "http://127.0.0.1:4003/metrics"]
    with pytest.raises(Unavailable, match="no system runs on this machine"):
        local_endpoints(tmp_path, lambda _: False)
