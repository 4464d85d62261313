"""A call through the real ingress, router, draft and target, on Ray and gRPC, with nothing replaced."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments import cli
from deployments.client import Ask, CallFailed, Client
from deployments.config import Draft, OutriderConfig
from rpc.pb import generation_pb2 as pb
from tests.serve.collector import Collector
from tests.serve.conftest import WINDOW, System
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

PROMPTS = ("the", "x", "a longer prompt, with the word the in it", "grüße 🦊")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "auto"])
def test_greedy_output_is_the_same_with_and_without_speculation(client: Client, prompt: str, drafter: str) -> None:
    sampling = {"max_tokens": 48, "ignore_eos": True}
    plain = client.generate(Ask(prompt=prompt, sampling=sampling, speculation="off"))
    speculated = client.generate(Ask(prompt=prompt, sampling=sampling, drafter=drafter))
    assert speculated.token_ids == plain.token_ids
    assert speculated.text == plain.text
    assert len(plain.token_ids) == plain.complete.usage.completion_tokens == 48
    assert plain.complete.speculation.switched_off_reason == "request"
    assert plain.complete.speculation.draft_tokens == 0


def test_a_draft_that_always_agrees_is_always_accepted(client: Client) -> None:
    """With K fixed, for a policy that looks at time may rightly find that such a target is too fast to be helped."""
    assert until(lambda: speculates(client), 30.0)
    sampling = {"max_tokens": 64, "ignore_eos": True}
    result = client.generate(Ask(prompt="the", drafter="draft_model", num_speculative_tokens=3, sampling=sampling))
    stats = result.complete.speculation
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert set(stats.drafters) == {"draft_model"}
    assert list(stats.accepted_per_position) == list(stats.drafted_per_position)


def test_a_seeded_request_repeats_itself_beside_others(client: Client, system: System) -> None:
    ask = Ask(prompt="the", sampling={"temperature": 0.8, "seed": 11, "max_tokens": 32, "ignore_eos": True})
    alone = client.generate(ask)
    neighbour = threading.Thread(
        target=client.generate,
        args=(Ask(prompt="other", sampling={"temperature": 0.8, "max_tokens": 64, "ignore_eos": True}),),
    )
    neighbour.start()
    beside = client.generate(ask)
    neighbour.join()
    assert beside.token_ids == alone.token_ids


def test_hot_requests_are_decoded_plainly(client: Client) -> None:
    result = client.generate(Ask(prompt="the", sampling={"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}))
    assert result.complete.speculation.switched_off_reason == "temperature"
    assert result.complete.speculation.draft_tokens == 0


def test_chat_messages_go_through_the_template(client: Client, stub: Any) -> None:
    messages = [{"role": "user", "content": "the"}]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages])
    ids = stub.Tokenize(pb.TokenizeRequest(chat=chat)).input_ids
    assert list(ids) == list(stub.Tokenize(pb.TokenizeRequest(text="user: the\n")).input_ids)
    result = client.generate(Ask(messages=messages, sampling={"max_tokens": 4}))
    assert result.complete.usage.prompt_tokens == len(ids)


def test_the_command_line_prints_one_json_object(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--prompt", "the", "--max-tokens", "8", "--json", "--address", system.address]
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    assert not exited.value.code
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"}
    assert (printed["failovers"], printed["resumes"]) == (0, 0)
    assert set(printed["timing"]) >= {"ttft_ms", "decode_tokens_per_s", "itl_ms_p50", "itl_ms_p95"}
    assert len(printed["token_ids"]) == printed["usage"]["completion_tokens"] <= 8


def test_the_command_line_streams_what_the_json_holds(
    system: System, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    text = client.generate(Ask(prompt="the", sampling={"max_tokens": 8})).text
    with pytest.raises(SystemExit):
        cli.main(["generate", "--prompt", "the", "--max-tokens", "8", "--address", system.address])
    assert capsys.readouterr().out == text + "\n"


def test_model_info(client: Client) -> None:
    info = client.model_info()
    assert (info.vocab_size, info.max_context_length) == (259, WINDOW)
    assert list(info.eos_token_ids) == [258]
    assert sorted(info.drafters) == ["draft_model", "ngram"]


SAMPLING = "sampling_params"
BAD_REQUESTS = {
    "empty prompt": (pb.GenerateRequest(prompt=""), "prompt"),
    "no input": (pb.GenerateRequest(), "input"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatMessages()), "chat.messages"),
    "token id out of range": (
        pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 259])),
        "tokenized.input_ids",
    ),
    "max_tokens 0": (
        pb.GenerateRequest(prompt="a", sampling_params=pb.SamplingParams(max_tokens=0)),
        f"{SAMPLING}.max_tokens",
    ),
    "negative temperature": (
        pb.GenerateRequest(prompt="a", sampling_params=pb.SamplingParams(temperature=-1)),
        f"{SAMPLING}.temperature",
    ),
    "temperature not a number": (
        pb.GenerateRequest(prompt="a", sampling_params=pb.SamplingParams(temperature=float("nan"))),
        f"{SAMPLING}.temperature",
    ),
    "top_p 2": (pb.GenerateRequest(prompt="a", sampling_params=pb.SamplingParams(top_p=2)), f"{SAMPLING}.top_p"),
    "unknown drafter": (
        pb.GenerateRequest(prompt="a", speculation=pb.Speculation(drafter="medusa")),
        "speculation.drafter",
    ),
    "prompt past the window": (pb.GenerateRequest(prompt="xy" * WINDOW), "prompt"),
    "10 MB prompt": (pb.GenerateRequest(prompt="y" * 10_000_000), "prompt"),
}


@pytest.fixture
def refusal(stub: Any, client: Client) -> Callable[[pb.GenerateRequest], grpc.RpcError]:
    """What the server says to a bad request, which must leave the next request unharmed."""

    def refuse(request: pb.GenerateRequest) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=30))
        assert len(client.generate(Ask(prompt="the", sampling={"max_tokens": 2, "ignore_eos": True})).token_ids) == 2
        return caught.value

    return refuse


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_names_its_field(refusal: Callable[[pb.GenerateRequest], grpc.RpcError], name: str) -> None:
    request, field = BAD_REQUESTS[name]
    error = refusal(request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    assert "Traceback" not in error.details()
    trailers = dict(error.trailing_metadata())
    assert trailers["outrider-field"] == field
    assert trailers["outrider-request-id"] == trailers["request_id"] != "", "the one that Serve made"


def test_bytes_that_are_no_text_name_their_field(system: System) -> None:
    with grpc.insecure_channel(system.address) as channel:
        call = channel.unary_stream("/outrider.v1.Generation/Generate", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\x12\x02\xff\xfe", timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("prompt: ")
    assert dict(caught.value.trailing_metadata())["outrider-request-id"]


def test_engines_answer_health_checks_and_so_does_the_ingress(system: System) -> None:
    for name in ("Target", "Draft"):
        with grpc.insecure_channel(system.endpoint(name)) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with urllib.request.urlopen(f"http://127.0.0.1:{system.http_port}/-/healthz", timeout=10) as response:
        assert response.status == 200


def test_two_hundred_cancelled_streams_leave_nothing_behind(system: System, stub: Any, client: Client) -> None:
    baseline = {name: free_blocks(system, name) for name in ("Target", "Draft")}
    request = pb.GenerateRequest(
        prompt="the long way " * 16, sampling_params=pb.SamplingParams(max_tokens=200, ignore_eos=True)
    )
    calls = [stub.Generate(request, timeout=60) for _ in range(200)]
    for turn, call in enumerate(calls[:60]):
        for _ in range(turn % 3):  # in the prompt, at the first token, amid decoding; the rest wait for a place
            next(call)
    for call in calls:
        call.cancel()
    for _ in range(20):  # and some that are gone before they arrive
        stub.Generate(request, timeout=60).cancel()
    at_rest = until(lambda: all(at_baseline(system, name, blocks) for name, blocks in baseline.items()), 30.0)
    assert at_rest, {name: system.engine(name) for name in baseline}
    for name in baseline:
        system.broadcast(name, "check_integrity")
    assert len(client.generate(Ask(prompt="the", sampling={"max_tokens": 8, "ignore_eos": True})).token_ids) == 8


def test_requests_that_need_many_times_the_blocks_all_complete(system: System, stub: Any) -> None:
    """They get on by turns, instead of robbing each other of their blocks for ever."""
    sampling = pb.SamplingParams(max_tokens=150, ignore_eos=True)
    calls = [
        stub.Generate(pb.GenerateRequest(prompt=f"{turn} ways to go " * 8, sampling_params=sampling), timeout=120)
        for turn in range(120)
    ]
    for call in calls:
        assert sum(len(response.delta.token_ids) for response in call if response.HasField("delta")) == 150


def test_one_draft_serves_the_targets_of_two_applications(
    system: System, config: OutriderConfig, client: Client
) -> None:
    from ray import serve

    from deployments.app import build_app

    ask = Ask(
        prompt="the fox",
        drafter="draft_model",
        num_speculative_tokens=3,
        sampling={"max_tokens": 48, "ignore_eos": True},
    )
    first = client.generate(ask)
    target = config.target.model_copy(update={"ray_actor_options": {"num_cpus": 0}})  # the cluster is full
    second = {"target": target, "draft": Draft(model=config.draft.model, application="outrider")}
    serve.run(build_app(config.model_copy(update=second)), name="second", route_prefix="/second")
    try:
        with Client(system.address, application="second") as other:
            assert until(lambda: knows_a_draft(other), 30.0)
            answer = other.generate(ask)
            assert answer.token_ids == first.token_ids
            assert answer.complete.speculation.accepted_tokens > 0
            assert set(serve.status().applications["second"].deployments) == {"Target", "Router"}
    finally:
        serve.delete("second")
    assert until(lambda: knows_a_draft(client), 30.0)


def test_deadlines_end_the_work_too(system: System, stub: Any) -> None:
    baseline = free_blocks(system, "Target")
    request = pb.GenerateRequest(prompt="the", sampling_params=pb.SamplingParams(max_tokens=500, ignore_eos=True))
    calls = [stub.Generate(request, timeout=0.2) for _ in range(50)]
    codes = [outcome(call) for call in calls]
    assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
    assert until(lambda: at_baseline(system, "Target", baseline), 30.0), system.engine("Target")


def test_a_request_is_one_trace_through_three_processes(
    system: System, client: Client, stub: Any, collector: Collector
) -> None:
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    assert until(lambda: speculates(client), 30.0)
    request = Ask(
        prompt="the fox",
        drafter="draft_model",
        num_speculative_tokens=3,
        sampling={"max_tokens": 64, "ignore_eos": True},
    ).to_pb()
    responses = list(stub.Generate(request, timeout=60, metadata=[("traceparent", f"00-{trace_id}-{caller}-01")]))

    def is_whole() -> bool:
        """Every kind of span has arrived, and so has every span that another one names as its parent."""
        spans = collector.trace(trace_id)
        kinds = {span.name for span in spans} >= {f"outrider.{n}" for n in ("request", "round", "draft", "verify")}
        accepted = sum(s.attributes.get("outrider.num_accepted", 0) for s in spans if s.name == "outrider.verify")
        told = responses[-1].complete.speculation.accepted_tokens  # each process exports in its own time
        return kinds and accepted == told and {s.parent_id for s in spans} <= {s.span_id for s in spans} | {caller}

    assert until(is_whole, 10.0), collector.trace(trace_id)
    spans = {span.span_id: span for span in collector.trace(trace_id)}
    assert {span.service for span in spans.values()} == {"outrider-router", "outrider-draft", "outrider-target"}
    assert [span.parent_id for span in spans.values() if span.name == "outrider.request"] == [caller]
    judged = [
        span
        for span in spans.values()
        if span.attributes.get("outrider.num_proposed") and span.name == "outrider.verify"
    ]
    assert {spans[span.parent_id].name for span in judged} == {"outrider.round"}
    accepted = sum(span.attributes["outrider.num_accepted"] for span in judged)
    assert accepted == responses[-1].complete.speculation.accepted_tokens > 0
    assert not any("fox" in str(value) for span in spans.values() for value in span.attributes.values())


@pytest.mark.chaos
def test_a_killed_draft_changes_no_token_and_comes_back(system: System, client: Client, stub: Any) -> None:
    import ray

    sampling = {"max_tokens": 400, "ignore_eos": True}
    plain = client.generate(Ask(prompt="the fox", sampling=sampling, speculation="off"))
    request = Ask(prompt="the fox", sampling=sampling, drafter="draft_model").to_pb()
    before = system.endpoint("Draft")
    token_ids: list[int] = []
    complete = None
    for response in stub.Generate(request, timeout=120):
        if response.HasField("complete"):
            complete = response.complete
        elif not token_ids:
            ray.kill(replica_actor("Draft"))
        token_ids += response.delta.token_ids
    assert complete is not None
    assert tuple(token_ids) == plain.token_ids
    assert complete.speculation.switched_off_reason == "draft_unavailable"
    assert until(lambda: has_moved(system, before), 90.0)
    assert until(lambda: speculates(client), 30.0)
    assert until(lambda: "outrider_rounds_total{" in (text := metrics()) and "draft_unavailable" in text, 30.0)


def knows_a_draft(client: Client) -> bool:
    try:
        return client.model_info().draft_model != ""
    except CallFailed:  # its router has found no target yet, or the ingress does not know it
        return False


def metrics() -> str:
    """What Prometheus would scrape from this node."""
    import ray

    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def has_moved(system: System, before: str) -> bool:
    try:
        return system.endpoint("Draft") != before
    except Exception:  # Serve says in many ways that a replica is not up yet
        return False


def speculates(client: Client) -> bool:
    ask = Ask(
        prompt="the", drafter="draft_model", num_speculative_tokens=3, sampling={"max_tokens": 32, "ignore_eos": True}
    )
    return client.generate(ask).complete.speculation.accepted_tokens > 0


def replica_actor(deployment: str) -> Any:
    """The one live replica of a deployment, as the actor that it is."""
    import ray
    from ray.util import list_named_actors

    names = [actor for actor in list_named_actors(all_namespaces=True) if f"#{deployment}#" in actor["name"]]
    return ray.get_actor(names[0]["name"], namespace=names[0]["namespace"])


def outcome(call: Any) -> grpc.StatusCode:
    try:
        list(call)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def free_blocks(system: System, name: str) -> int:
    """Free blocks with nothing running."""
    assert until(lambda: system.engine(name).running_sessions == 0, 30.0)
    return system.engine(name).free_blocks


def at_baseline(system: System, name: str, blocks: int) -> bool:
    info = system.engine(name)
    return info.running_sessions == 0 and info.free_blocks == blocks
