"""Keys, limits and a caller that does not read, through the real ingress with HAProxy before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cluster.local import free_port
from deployments.client import Ask, CallFailed, Client
from router.api_keys import make_key
from tests.deployments.calling import entry, write_keys
from tests.serve.test_serve_command import serving
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

Code = grpc.StatusCode
SHORT = Ask(prompt="the", sampling={"max_tokens": 4, "ignore_eos": True})


def configuration(model: Path, keys: Path) -> dict[str, Any]:
    """One place for all requests, and replies as large as the caller's request_id."""
    return {
        "target": {"model": str(model), "dtype": "float32"},
        "draft": {"enabled": False},
        "router": {"max_concurrent": 1, "slow_reader_s": 0.5},
        "server": {"grpc_port": free_port(), "http_port": free_port()},
        "access": {"api_keys": str(keys), "requests": {"max_name_chars": 100_000}},
    }


def code_of(client: Client, ask: Ask = SHORT) -> grpc.StatusCode | None:
    try:
        client.generate(ask, timeout_s=60)
    except CallFailed as error:
        return error.code
    return None


def test_keys_and_limits_from_outside(
    model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    keys, config = tmp_path / "keys.yaml", tmp_path / "keyed.yaml"
    free, limited, revoked = make_key(), make_key(), make_key()
    entries = [entry(free, "free"), entry(limited, "limited", tokens_per_minute=1), entry(revoked, "revoked")]
    write_keys(keys, *entries)
    config.write_text(yaml.safe_dump(configuration(model_folders[0], keys)))
    with serving(config, tmp_path / "home") as (_, printed):
        address = printed.removeprefix("serving on ")
        with (
            Client(address) as unknown,
            Client(address, api_key=free) as caller,
            Client(address, api_key=limited) as poor,
            Client(address, api_key=revoked) as former,
            grpc.insecure_channel(address) as channel,
        ):
            channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")(b"", timeout=10)
            with pytest.raises(CallFailed, match=r"not accepted|with a key only") as caught:
                unknown.model_info()
            assert caught.value.request_id, "that of a call whose caller gave none"
            assert code_of(unknown) is Code.UNAUTHENTICATED
            assert [code_of(caller), code_of(former), code_of(poor)] == [None] * 3
            with pytest.raises(CallFailed, match="1 tokens a minute are used up") as caught:
                poor.generate(SHORT)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s > 0
            assert str(caught.value).endswith(f"(request {caught.value.request_id})")
            write_keys(keys, *entries[:2])
            assert until(lambda: code_of(former) is Code.UNAUTHENTICATED, within_s=30)
            assert code_of(caller) is None
            assert code_of(caller, Ask(prompt="x" * (17 << 20))) is Code.RESOURCE_EXHAUSTED
            _a_caller_that_does_not_read_gives_its_place_up(caller)


def _a_caller_that_does_not_read_gives_its_place_up(client: Client) -> None:
    request = Ask(prompt="the", sampling={"max_tokens": 400, "ignore_eos": True}).to_pb()
    request.request_id = "x" * 100_000
    stream = client.call(request, 120)
    next(stream)
    assert code_of(client) is None, "for which the only place has to be free"
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stream:
            pass
    assert (caught.value.code(), "read nothing for 0.5 s" in caught.value.details()) == (Code.RESOURCE_EXHAUSTED, True)
    assert dict(caught.value.trailing_metadata())["outrider-request-id"] == "x" * 256, (
        "as much as trailers have room for"
    )
