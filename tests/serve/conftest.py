"""One local Ray and Serve for the tests of this folder, with a tiny random target and a draft that always agrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.local import free_port
from deployments.client import Client
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from deployments.system import local_system
from engine.info import EngineInfo
from rpc.codecs import decode_info
from rpc.pb import drafting_pb2_grpc, generation_pb2_grpc, session_pb2, verification_pb2_grpc
from tests.deployments.conftest import byte_tokenizer
from tests.serve.collector import Collector, collecting

WINDOW = 512


@pytest.fixture(scope="package")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft with the same random weights: every draft token is accepted."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    place = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer([("t", "h"), ("th", "e")], ["<end>"])
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-tokenizer.get_vocab_size() // 4) * 4,  # four ranks can share it
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=WINDOW, eos_token_id=258,
            bos_token_id=None, tie_word_embeddings=False, initializer_range=0.3,
        )
    )  # fmt: skip
    for name in ("target", "draft"):
        model.save_pretrained(place / name)
        tokenizer.save(str(place / name / "tokenizer.json"))
        (place / name / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        )
    return place / "target", place / "draft"


@pytest.fixture(scope="package")
def config(model_folders: tuple[Path, Path]) -> OutriderConfig:
    target, draft = model_folders
    engine = {"dtype": "float32", "kv_cache": {"num_blocks": 512, "block_size": 16}, "max_sessions": 256}
    return parse_config(
        {
            "target": {**engine, "model": str(target)},
            "draft": {**engine, "model": str(draft)},
            "router": {"peer_refresh_s": 0.5, "max_concurrent": 256},
            "server": {"grpc_port": free_port(), "http_port": free_port()},
        },
        "tests",
    )


@dataclass(frozen=True)
class System:
    """The running system: its public address, and what its engines say of themselves."""

    address: str
    http_port: int

    def engine(self, name: str) -> EngineInfo:
        """The engine of deployment `name`, asked over its own server."""
        stub = {"Target": verification_pb2_grpc.VerificationStub, "Draft": drafting_pb2_grpc.DraftingStub}[name]
        with grpc.insecure_channel(self.endpoint(name)) as channel:
            return decode_info(stub(channel).GetInfo(session_pb2.EngineInfoRequest(), timeout=5))

    def endpoint(self, name: str) -> str:
        """Address of the one live replica of deployment `name`."""
        return str(self.broadcast(name, "endpoint")[0].address)

    def broadcast(self, name: str, method: str) -> list[Any]:
        """Calls `method` on every replica of a deployment."""
        from ray import serve

        results: list[Any] = serve.get_deployment_handle(name, "outrider").broadcast(method).results(timeout_s=30)
        return results


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="package")
def system(config: OutriderConfig, collector: Collector) -> Iterator[System]:
    """The system with tracing on, as an operator turns it on: by the standard environment variables."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield from _running(config)


def _running(config: OutriderConfig) -> Iterator[System]:
    with local_system(config) as address:
        yield System(address, config.server.http_port)


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with Client(system.address) as client:
        yield client


@pytest.fixture
def stub(system: System) -> Iterator[Any]:
    """The generated stub, for requests that the client would not make."""
    with grpc.insecure_channel(system.address, [("grpc.max_send_message_length", -1)]) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)
