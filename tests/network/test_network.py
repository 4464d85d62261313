"""Two hosts with a wire between them that is slow, loses packets, and is cut: one is a network namespace.

Near are the callers, the router and a target; far are the draft and another target.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.local import OBJECT_STORE_BYTES, LocalCluster, free_port, settings_of
from deployments.client import Ask, CallFailed, Client
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from router.placement import nearest_with_room, prefix_key
from rpc.pb import generation_pb2 as pb
from tests.chaos.conftest import System
from tests.network.wire import Conditions, NotPermitted, Wire
from tests.serve.conftest import model_folders  # noqa: F401 - a fixture
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

CONDITIONS = Conditions(delay_s=0.005, jitter_s=0.001, loss=0.02, seed=3)
NUM_SILENT_LAYERS = 46
CUT_AT = 30  # tokens
GREEDY: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def slow_target(model_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The draft's weights and layers that add nothing: its output exactly, but slow enough to be worth speculating."""
    from transformers import LlamaForCausalLM

    target, draft = model_folders
    small = LlamaForCausalLM.from_pretrained(draft)
    num_layers = small.config.num_hidden_layers
    small.config.num_hidden_layers += NUM_SILENT_LAYERS
    model = LlamaForCausalLM(small.config)
    model.load_state_dict(small.state_dict(), strict=False)
    for layer in model.model.layers[num_layers:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    place = tmp_path_factory.mktemp("slow")
    model.save_pretrained(place)
    (place / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return place


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        try:
            wire = stack.enter_context(Wire(CONDITIONS))
        except NotPermitted as error:
            pytest.skip(str(error))
        yield wire


@pytest.fixture(scope="module")
def config(slow_target: Path, model_folders: tuple[Path, Path]) -> OutriderConfig:  # noqa: F811
    _, draft = model_folders
    return parse_config(
        {
            "target": {
                "model": str(slow_target),
                "dtype": "float32",
                "num_replicas": 2,
                "ray_actor_options": {"num_cpus": 0, "resources": {"target": 1}},
            },
            "draft": {
                "model": str(draft),
                "dtype": "float32",
                "ray_actor_options": {"num_cpus": 0, "resources": {"far": 1}},
            },
            "router": {"peer_refresh_s": 0.5, "ray_actor_options": {"num_cpus": 0, "resources": {"near": 1}}},
            "server": {"host": "0.0.0.0", "grpc_port": free_port(), "http_port": free_port()},
        },
        "tests",
    )


@pytest.fixture(scope="module")
def running(wire: Wire, config: OutriderConfig) -> Iterator[System]:
    with settings_of(LocalCluster(num_cpus=2)) as folder:
        import ray
        from ray import serve

        from deployments.app import APPLICATION, build_app, start_serve

        try:
            ray.init(
                address="local",
                num_cpus=2,
                resources={"near": 1, "target": 1},
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                _node_ip_address=wire.near,
            )
            with far_host(wire, ray.get_runtime_context().gcs_address):
                assert until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60.0)
                start_serve(config.server, "HeadOnly")
                serve.run(build_app(config), name=APPLICATION, route_prefix="/")
                yield System(f"127.0.0.1:{config.server.grpc_port}")
                serve.shutdown()
        finally:
            ray.shutdown()


@contextmanager
def far_host(wire: Wire, gcs_address: str) -> Iterator[None]:
    """A node of the cluster at the other end of the wire."""
    options = {
        "address": gcs_address,
        "node-ip-address": wire.far,
        "num-cpus": "2",
        "resources": json.dumps({"far": 1, "target": 1}),
        "object-store-memory": str(OBJECT_STORE_BYTES),
        "include-log-monitor": "false",
    }
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--block", *(f"--{name}={value}" for name, value in options.items())]
    node = subprocess.Popen(wire.beyond(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        node.terminate()
        node.wait()


@pytest.fixture
def system(running: System) -> Iterator[System]:
    """Whole at the beginning of every test and at its end, with every block accounted for."""
    assert until(lambda: is_whole(running), 90.0)
    yield running
    assert until(lambda: is_whole(running) and running.is_at_rest(), 90.0)
    running.check_integrity()


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with Client(system.address) as client:
        yield client


def is_whole(system: System) -> bool:
    """Every engine answers, and the router has found the draft."""
    if (len(system.endpoints("Target")), len(system.endpoints("Draft"))) != (2, 1):
        return False
    with Client(system.address) as client:
        try:
            return bool(client.model_info().draft_model)
        except CallFailed:
            return False


def prompt_for(host: str, system: System) -> Sequence[int]:
    """A prompt that routers send to the target on `host`, as long as both are there."""
    addresses = [endpoint.address for endpoint in system.endpoints("Target")]
    prompts = [(first, 40, 41) for first in range(64)]
    return next(
        prompt for prompt in prompts if nearest_with_room(addresses, {}, prefix_key(prompt)).startswith(f"{host}:")
    )


def runs_on(host: str, ask: Ask, client: Client, system: System) -> bool:
    """Whether a request is sent to the target on `host`."""
    stream = client.stream(ask)
    try:
        next(iter(stream))
        busy = [each.address for each in system.endpoints("Target") if each.info.running_sessions]
    finally:
        stream.cancel()
    return any(address.startswith(f"{host}:") for address in busy)


def speculating(prompt: Sequence[int], sampling: dict[str, Any]) -> Ask:
    """Asks for proposals short enough to be back before a verification would be over."""
    return Ask(token_ids=prompt, sampling=sampling, drafter="draft_model", num_speculative_tokens=3)


def cut_off(client: Client, ask: Ask, wire: Wire, mended: ExitStack) -> tuple[tuple[int, ...], pb.Complete]:
    """Runs a request, and cuts the wire when it has some tokens, until `mended` is left."""
    stream, is_cut = client.stream(ask), False
    for response in stream:
        if not is_cut and len(stream.token_ids) >= CUT_AT:
            mended.enter_context(wire.cut())
            is_cut = True
        if response.HasField("complete"):
            assert response.complete.finish_reason == "length"
            return tuple(stream.token_ids), response.complete
    raise AssertionError("a stream ends with its final message or raises")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_far_away_costs_no_token(system: System, client: Client, wire: Wire, sampling: dict[str, Any]) -> None:
    prompt = prompt_for(wire.near, system)
    plain = client.generate(Ask(token_ids=prompt, sampling=sampling, speculation="off"))
    speculated = client.generate(speculating(prompt, sampling))
    assert (speculated.token_ids, speculated.text) == (plain.token_ids, plain.text)
    assert speculated.complete.speculation.accepted_tokens > 0
    assert speculated.complete.failovers == 0


def test_a_draft_out_of_reach_is_done_without_until_it_is_back(system: System, client: Client, wire: Wire) -> None:
    ask = speculating(prompt_for(wire.near, system), SEEDED)
    undisturbed = client.generate(replace(ask, speculation="off"))
    with ExitStack() as mended:
        token_ids, complete = cut_off(client, ask, wire, mended)
        assert token_ids == undisturbed.token_ids
        assert complete.failovers == 0
        assert complete.speculation.accepted_tokens < 2 * CUT_AT  # none since the cut
        assert until(lambda: not client.model_info().draft_model, 30.0)  # the router has given it up
        without = client.generate(ask)
        assert without.token_ids == undisturbed.token_ids
        assert without.complete.speculation.switched_off_reason == "draft_unavailable"
    assert until(lambda: client.generate(ask).complete.speculation.accepted_tokens > 0, 60.0)


def test_a_target_out_of_reach_is_left_for_the_one_at_hand(system: System, client: Client, wire: Wire) -> None:
    ask = Ask(token_ids=prompt_for(wire.far, system), sampling=GREEDY, speculation="off")
    assert until(lambda: runs_on(wire.far, ask, client, system), 30.0)
    undisturbed = client.generate(ask)
    with ExitStack() as mended:
        token_ids, complete = cut_off(client, ask, wire, mended)
    assert token_ids == undisturbed.token_ids
    assert complete.failovers >= 1
    assert until(lambda: is_whole(system), 90.0)
    again = replace(ask, token_ids=prompt_for(wire.far, system))  # it may have been built anew, at another address
    assert until(lambda: runs_on(wire.far, again, client, system), 30.0)
