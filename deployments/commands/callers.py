"""Owns a benchmark's side of the public API: requests under a mode, and many of them at once.

All run on one thread, so that the cores are left to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from bench.modes import Mode
from deployments.channels import bearer
from deployments.client import Ask, CallFailed, Result
from rpc.pb import generation_pb2_grpc as pb_grpc

_STREAMS_PER_CHANNEL = 50  # HAProxy takes 100 at once on one connection, and holds the others back
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # channels with the same address share a connection otherwise


def ask(mode: Mode, **request: Any) -> Ask:
    """The request with the fields `request`, under `mode`."""
    return Ask(
        speculation=mode.speculation,
        drafter=mode.drafter,
        num_speculative_tokens=mode.num_speculative_tokens,
        run_ahead=mode.run_ahead,
        **request,
    )


def decode_s(result: Result) -> float:
    """Seconds from its first token to its last; 0 for a single one."""
    speed = result.complete.timing.decode_tokens_per_s
    return (len(result.token_ids) - 1) / speed if speed else 0.0


class Callers:
    """Connections to one server. Use it in a `with` block.

    Args:
        address: host:port of the public gRPC API.
        most: requests at once.
    """

    def __init__(self, address: str, most: int) -> None:
        self._address, self._most = address, most
        self._runner = asyncio.Runner()
        self._channels: list[Any] = []

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._close())
        self._runner.close()

    def generate(self, asks: Sequence[Ask]) -> list[Result]:
        """Runs all requests side by side; results are in their order. Not resumed: a broken one raises CallFailed."""
        return self._runner.run(self._generate_all(asks))

    async def _open(self) -> None:
        number = -(-self._most // _STREAMS_PER_CHANNEL)
        self._channels = [grpc.aio.insecure_channel(self._address, options=_OPTIONS) for _ in range(number)]

    async def _close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _generate_all(self, asks: Sequence[Ask]) -> list[Result]:
        stubs: list[Any] = [pb_grpc.GenerationStub(channel) for channel in self._channels]
        calls = [_generate(stubs[number % len(stubs)], asked) for number, asked in enumerate(asks)]
        return await asyncio.gather(*calls)


async def _generate(stub: Any, asked: Ask) -> Result:
    pieces: list[str] = []
    token_ids: list[int] = []
    try:
        async for response in stub.Generate(asked.to_pb(), metadata=bearer(None)):
            if response.HasField("complete"):
                return Result("".join(pieces), tuple(token_ids), response.complete)
            pieces.append(response.delta.text)
            token_ids += response.delta.token_ids
    except grpc.aio.AioRpcError as error:
        raise CallFailed.of(error) from error
    raise CallFailed("the server ended the stream without a final message", grpc.StatusCode.DATA_LOSS)
