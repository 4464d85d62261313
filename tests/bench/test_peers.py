"""Systems beside this one: what each adapter gives back, whose turn it is, and the arithmetic of the table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from bench.counts import Counts
from bench.modes import PLAIN
from bench.peers.measuring import PeerSample, measure, num_measurements, summarize_systems, systems_as_json
from bench.peers.openai_peer import SPECULATIVE, OpenAIPeer
from bench.peers.peer import Arrivals, Output
from bench.peers.transformers_peer import ASSISTED, PROMPT_LOOKUP, TransformersPeer
from bench.prompts import Prompt
from deployments import cli
from deployments.commands.peers import OutriderPeer, _servers, _table, _transformers
from deployments.config import OutriderConfig
from deployments.console import out
from engine.errors import InvalidArgument, ModelNotFound, Unavailable
from engine.settings import EngineSettings
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc
from tests.deployments.conftest import byte_tokenizer
from tests.engine.models import make_folder, plain_greedy

CHAT = Prompt("chat", "code", [{"role": "user", "content": "Hi"}], None, {"max_tokens": 5})
RAW = Prompt("raw", "tool", None, "the other", {"max_tokens": 12, "temperature": 0.7})

Ticking = Callable[[], float]


@pytest.fixture
def ticking() -> Ticking:
    """A clock that is a second later at every look."""
    return iter(float(second) for second in range(1000)).__next__


# --- arrivals


def test_tokens_of_the_first_arrival_are_not_decoded(ticking: Ticking) -> None:
    arrivals = Arrivals(ticking)
    for token_ids in ([1, 2, 3], [], [4], [5, 6]):
        arrivals.came(token_ids)
    assert arrivals.output() == Output((1, 2, 3, 4, 5, 6), num_decoded=3, decode_s=2.0)


def test_nothing_that_came_took_no_time(ticking: Ticking) -> None:
    assert Arrivals(ticking).output() == Output((), 0, 0.0)


# --- servers


class Scripted(ThreadingHTTPServer):
    """Streams the same lines to everybody, and notes what it was asked."""

    daemon_threads = True

    def __init__(self, lines: Iterable[str], status: int = 200, model: str = "tiny") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lines, self.status, self.model = list(lines), status, model
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._reply([json.dumps({"data": [{"id": self.server.model}]} if self.server.model else {})], 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self._reply(self.server.lines, self.server.status)

    def _reply(self, lines: Iterable[str], status: int) -> None:
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = f"{line}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Tests have nothing to say on stderr."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    servers = list[Scripted]()

    def start(lines: Iterable[str], **rest: Any) -> Scripted:
        servers.append(Scripted(lines, **rest))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def event(**content: Any) -> str:
    return f"data: {json.dumps(content)}"


def chat_lines(*pieces: str, num_tokens: int) -> list[str]:
    """As vLLM streams a chat: a role, text, an end without text, usage without choices."""
    return [
        event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
        ": still here",
        *(event(choices=[{"delta": {"content": piece}}]) for piece in pieces),
        event(choices=[{"delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage={"completion_tokens": num_tokens}),
        "data: [DONE]",
    ]


def peer_of(plain: Scripted, speculative: Scripted, clock: Ticking) -> OpenAIPeer:
    return OpenAIPeer("vllm", plain.url, speculative.url + "/v1/", lambda text: list(text.encode()), clock)


def test_a_chat_is_timed_from_its_first_text_to_its_end(serve: Any, ticking: Ticking) -> None:
    plain = serve(chat_lines("a", "b", "c", num_tokens=4))
    peer = peer_of(plain, serve(chat_lines("ab", "c", num_tokens=4), model="tiny-fast"), ticking)
    assert peer.modes == [PLAIN, SPECULATIVE]
    # Looks at the clock: role, a, b, c, end.
    assert peer.generate(CHAT, PLAIN) == Output(tuple(b"abc"), num_decoded=3, decode_s=3.0)
    assert peer.generate(CHAT, SPECULATIVE) == Output(tuple(b"abc"), num_decoded=3, decode_s=2.0)


def test_a_server_is_asked_for_greedy_tokens_of_the_model_it_names(serve: Any, ticking: Ticking) -> None:
    lines = [event(choices=[{"text": "x"}]), event(choices=[], usage={"completion_tokens": 1}), "data: [DONE]"]
    plain, fast = serve(lines), serve(lines, model="tiny-fast")
    peer = peer_of(plain, fast, ticking)
    peer.generate(CHAT, PLAIN)
    peer.generate(RAW, SPECULATIVE)
    ((chat_path, chat),), ((raw_path, raw),) = plain.asked, fast.asked
    assert (chat_path, raw_path) == ("/v1/chat/completions", "/v1/completions")
    assert (chat["model"], chat["messages"], chat["max_tokens"], chat["temperature"]) == ("tiny", CHAT.messages, 5, 0.0)
    assert (raw["model"], raw["prompt"], raw["max_tokens"], raw["temperature"]) == ("tiny-fast", "the other", 12, 0.0)
    assert raw["stream_options"] == {"include_usage": True}


def test_thoughts_are_text_of_the_output(serve: Any, ticking: Ticking) -> None:
    server = serve(
        [
            event(choices=[{"delta": {"content": None, "reasoning_content": "why"}}]),
            event(choices=[{"delta": {"content": "so"}, "finish_reason": "length"}]),
            event(choices=[], usage={"completion_tokens": 2}),
        ]
    )
    assert peer_of(server, server, ticking).generate(CHAT, PLAIN) == Output(tuple(b"whyso"), 1, 1.0)


def test_an_output_without_text_took_no_time(serve: Any, ticking: Ticking) -> None:
    server = serve(chat_lines(num_tokens=1))
    assert peer_of(server, server, ticking).generate(CHAT, PLAIN) == Output((), 0, 0.0)


@pytest.mark.parametrize(
    ("lines", "status", "expected"),
    [
        (["no such thing"], 404, "/v1/chat/completions: HTTP 404: no such thing"),
        ([event(choices=[{"delta": {"content": "a"}}]), "data: [DONE]"], 200, "without usage"),
        ([event(error={"message": "out of memory"})], 200, "out of memory"),
        (["data: {"], 200, "not JSON"),
    ],
)
def test_what_a_server_does_wrong_is_said(
    serve: Any, ticking: Ticking, lines: list[str], status: int, expected: str
) -> None:
    server = serve(lines, status=status)
    with pytest.raises(Unavailable, match=expected):
        peer_of(server, server, ticking).generate(CHAT, PLAIN)


def test_a_server_that_is_not_there_or_names_no_model_is_found_out_at_once(serve: Any, ticking: Ticking) -> None:
    good = serve([])
    with pytest.raises(Unavailable, match="names no model"):
        peer_of(good, serve([], model=""), ticking)
    with pytest.raises(InvalidArgument, match="http or https"):
        OpenAIPeer("vllm", "file:///etc/passwd", good.url, list)
    gone = serve([])
    gone.shutdown()
    gone.server_close()
    with pytest.raises(Unavailable, match=f"{gone.url}/v1/models: .*refused"):
        peer_of(gone, good, ticking)


def test_both_servers_of_a_system_are_given_or_none() -> None:
    with pytest.raises(typer.BadParameter, match="--vllm-plain and --vllm-spec are given together"):
        _servers({"vllm": ("http://here", None)}, tokenizer=None)
    peers, skipped = _servers({"llama.cpp": (None, None)}, tokenizer=None)
    assert (peers, [(each.system, each.reason) for each in skipped]) == (
        [],
        [("llama.cpp", "no --llama-cpp-plain and --llama-cpp-spec")],
    )


# --- transformers


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return _with_tokenizer(make_folder(tmp_path / "target", vocab=300))


def _with_tokenizer(folder: Path) -> Path:
    byte_tokenizer([("t", "h"), ("th", "e")], ["<end>"]).save(str(folder / "tokenizer.json"))
    return folder


def _changed(folder: Path, **fields: Any) -> Path:
    """The folder, its configuration saying something else."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_transformers_speculates_without_changing_a_token(target: Path, tmp_path: Path) -> None:
    assistant = _with_tokenizer(make_folder(tmp_path / "assistant", seed=1, layers=1, vocab=300))
    peer = TransformersPeer(EngineSettings(target, dtype="float32"), 4, assistant)
    assert list(peer.modes) == [PLAIN, ASSISTED, PROMPT_LOOKUP]
    plain = peer.generate(RAW, PLAIN)
    prompt = byte_tokenizer([("t", "h"), ("th", "e")], ["<end>"]).encode("the other").ids
    assert list(plain.token_ids) == plain_greedy(target, prompt, max_tokens=12)
    assert plain.num_decoded == len(plain.token_ids) - 1
    assert plain.decode_s > 0.0
    for mode in (ASSISTED, PROMPT_LOOKUP):
        output = peer.generate(RAW, mode)
        assert output.token_ids == plain.token_ids
        assert output.num_decoded < len(output.token_ids)


def test_without_an_assistant_there_is_no_assisted_generation(target: Path) -> None:
    config = OutriderConfig.model_validate({"target": {"model": str(target), "dtype": "float32"}, "draft": {}})
    (peer,), (skipped,) = _transformers(config, None, 4)
    assert list(peer.modes) == [PLAIN, PROMPT_LOOKUP]
    assert (skipped.system, skipped.mode) == ("transformers", ASSISTED)


def test_a_target_that_one_process_cannot_run_is_left_out_with_the_reason() -> None:
    config = OutriderConfig.model_validate({"target": {"tensor_parallel_size": 4}})
    peers, (skipped,) = _transformers(config, None, 4)
    assert (peers, skipped.reason) == ([], "the target takes 4 processes, and this is one")


def test_outriders_own_draft_is_no_assistant(target: Path, tmp_path: Path) -> None:
    draft = _changed(make_folder(tmp_path / "draft", vocab=300), outrider_draft={})
    config = OutriderConfig.model_validate({"target": {"model": str(target)}})
    with pytest.raises(typer.BadParameter, match="made by `outrider train draft`"):
        _transformers(config, str(draft), 4)


def test_a_folder_that_transformers_cannot_load_is_named(target: Path) -> None:
    _changed(target, model_type="no-such-architecture")
    with pytest.raises(ModelNotFound, match=f"{target}: transformers cannot load it"):
        TransformersPeer(EngineSettings(target), 4)


# --- outrider


class FakeStream(list[pb.GenerateResponse]):
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClient:
    def __init__(self, stream: FakeStream) -> None:
        self._stream, self.asked = stream, list[Any]()

    def stream(self, ask: Any) -> FakeStream:
        self.asked.append(ask)
        return self._stream


def test_outrider_is_asked_greedily_whatever_the_line_says_of_temperature() -> None:
    deltas = [pb.GenerateResponse(delta=pb.Delta(token_ids=ids)) for ids in ([7], [8, 9])]
    stream = FakeStream([*deltas, pb.GenerateResponse(complete=pb.Complete(finish_reason="length"))])
    client = FakeClient(stream)
    output = OutriderPeer(client).generate(RAW, PLAIN)
    assert (output.token_ids, output.num_decoded) == ((7, 8, 9), 2)
    (ask,) = client.asked
    assert (ask.prompt, ask.speculation, ask.sampling) == (
        "the other", "off", {"max_tokens": 12, "temperature": 0.0},
    )  # fmt: skip
    assert stream.cancelled


# --- turns and table


class FakePeer:
    """Notes its turns in a list that all share."""

    def __init__(self, name: str, modes: list[str], turns: list[tuple[str, str, str]]) -> None:
        self.name, self.modes, self._turns = name, modes, turns

    def generate(self, prompt: Prompt, mode: str) -> Output:
        self._turns.append((self.name, mode, prompt.id))
        return Output((1, 2, 3), 2, 1.0)


def test_every_prompt_goes_to_all_in_an_order_that_turns() -> None:
    turns: list[tuple[str, str, str]] = []
    peers = [FakePeer("ours", [PLAIN, "auto"], turns), FakePeer("theirs", [PLAIN], turns)]
    ticks: list[int] = []
    samples = measure(peers, [CHAT, RAW], lambda: ticks.append(1))
    everyone = [("ours", PLAIN), ("ours", "auto"), ("theirs", PLAIN)]
    asked = [turn[:2] for turn in turns]
    assert asked == [*everyone, *everyone, *everyone[1:], everyone[0]]  # warming up, then the prompts
    assert [turn[2] for turn in turns] == ["chat"] * 6 + ["raw"] * 3
    assert len(ticks) == num_measurements(peers, [CHAT, RAW]) == 9
    assert [(sample.system, sample.mode, sample.prompt_id) for sample in samples] == [
        (system, mode, prompt_id) for system, mode in everyone for prompt_id in ("chat", "raw")
    ]


def sample(system: str, mode: str, prompt_id: str, decode_s: float, *token_ids: int) -> PeerSample:
    return PeerSample(prompt_id, prompt_id, mode, token_ids, decode_s, Counts(), system=system, num_decoded=100)


@pytest.fixture
def samples() -> list[PeerSample]:
    return [
        sample("ours", PLAIN, "a", 10.0, 1, 2, 3),
        sample("ours", PLAIN, "b", 10.0, 1, 2, 3),
        sample("ours", "auto", "a", 4.0, 1, 2, 3),
        sample("ours", "auto", "b", 6.0, 1, 2, 3),
        sample("theirs", PLAIN, "a", 20.0, 1, 2, 3),
        sample("theirs", PLAIN, "b", 20.0, 1, 2, 3),
        sample("theirs", "fast", "a", 10.0, 1, 9),
        sample("theirs", "fast", "b", 40.0, 1, 2, 3),
    ]


def test_each_system_is_held_against_its_own_plain_decoding(samples: list[PeerSample]) -> None:
    rows = summarize_systems(samples)
    assert [row.kind for _, row in rows] == ["a"] * 4 + ["b"] * 4 + ["all"] * 4
    whole = {(system, row.mode): row for system, row in rows if row.kind == "all"}
    ours, theirs = whole["ours", "auto"], whole["theirs", "fast"]
    assert (ours.tokens_per_s, ours.speedup) == pytest.approx((20.0, 2.0))
    assert (theirs.tokens_per_s, theirs.speedup) == pytest.approx((4.0, 0.8))
    assert (theirs.speedup_p10, theirs.speedup_median, theirs.speedup_p90) == pytest.approx((0.5, 1.25, 2.0))
    assert (ours.differing_tokens, theirs.differing_tokens) == (0, 2)


def test_the_table_names_each_class_and_system_once(samples: list[PeerSample]) -> None:
    with out.capture() as capture:
        out.print(_table(summarize_systems(samples)))
    lines = capture.get().splitlines()
    assert [line.split() for line in lines[-4:]] == [
        ["all", "ours", "off", "10.0"],
        ["auto", "20.0", "2.00", "2.08", "1.67–2.50", "0"],
        ["theirs", "off", "5.0"],
        ["fast", "4.0", "0.80", "1.25", "0.50–2.00", "2"],
    ]
    assert max(map(len, lines)) <= 80


def test_json_has_the_rows_and_samples_of_each_system(samples: list[PeerSample]) -> None:
    content = json.loads(json.dumps(systems_as_json(samples)))
    assert list(content) == ["ours", "theirs"]
    assert content["theirs"]["rows"][-1]["speedup"] == pytest.approx(0.8)
    assert len(content["theirs"]["samples"]) == 4


# --- the command


class Counting(pb_grpc.GenerationServicer):
    """Outrider's API: the same four tokens to everybody."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        for token_id in range(4):
            yield pb.GenerateResponse(delta=pb.Delta(token_ids=[token_id]))
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason="length"))


@pytest.fixture
def outrider_address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_GenerationServicer_to_server(Counting(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def run(target: Path, *options: str) -> int:
    """`outrider bench-peers` on one raw prompt and the tiny target; its status."""
    config, prompts = target / "system.yaml", target / "prompts.jsonl"
    config.write_text(f"target: {{model: {target}, dtype: float32}}")
    prompts.write_text(json.dumps({"id": "a", "class": "code", "prompt": "the other", "max_tokens": 4}))
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench-peers", "--config", str(config), "--prompts", str(prompts), *options])
    return int(exited.value.code or 0)


def test_the_command_measures_all_that_it_is_given(
    target: Path, outrider_address: str, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [event(choices=[{"text": piece}]) for piece in "abc"] + [event(choices=[], usage={"completion_tokens": 4})]
    url = serve(lines).url
    options = ("--address", outrider_address, "--vllm-plain", url, "--vllm-spec", url, "--json")
    assert run(target, *options) == 0
    content = json.loads(capsys.readouterr().out)
    modes = {name: [row["mode"] for row in system["rows"]] for name, system in content["systems"].items()}
    assert modes == {
        "outrider": [PLAIN, "auto"], "transformers": [PLAIN, PROMPT_LOOKUP], "vllm": [PLAIN, SPECULATIVE],
    }  # fmt: skip
    assert all(row["differing_tokens"] == 0 for system in content["systems"].values() for row in system["rows"])
    assert [(each["system"], each["mode"]) for each in content["skipped"]] == [
        ("llama.cpp", ""), ("transformers", ASSISTED),
    ]  # fmt: skip


def test_a_server_that_does_not_answer_ends_the_command_in_one_line(
    target: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve([], model="").url
    assert run(target, "--llama-cpp-plain", url, "--llama-cpp-spec", url) == 1
    assert capsys.readouterr().err == f"error: {url}/v1/models: names no model\n"
