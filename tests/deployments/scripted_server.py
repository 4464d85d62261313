"""A public API server in a process of its own, to be killed: counts from what was delivered up to its end, then stops.

Run as a module with the port (0 takes a free one) and the number of tokens; prints the port once it listens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc

PAUSE_S = 0.01  # between two tokens, so that the one who kills it does so in mid-stream


class Counting(pb_grpc.GenerationServicer):
    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for number in range(len(request.resume_from), self._num_tokens):
            yield pb.GenerateResponse(delta=pb.Delta(text=f"{number} ", token_ids=[number]))
            await asyncio.sleep(PAUSE_S)
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason="length"))


async def main(port: int, num_tokens: int) -> None:
    server = grpc.aio.server()
    pb_grpc.add_GenerationServicer_to_server(Counting(num_tokens), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(bound, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
