"""A target or a draft in a process of its own, on emulated devices, traced as its environment says.

``python -m tests.traces.engine_process target FOLDER`` prints its address and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench.emulated_model import make_folder
from engine.drafting import build_draft_engine
from engine.loop import draft_loop, target_loop
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from router.tokenizer import Tokenizer
from rpc import tracing
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.rounds.emulated import EMULATION


async def serve(kind: str, folder: Path) -> None:
    tracing.setup_tracing(f"outrider-{kind}")
    vocab_size = Tokenizer(make_folder(folder)).vocab_size
    settings = EngineSettings(folder, num_blocks=1024, vocab_size=vocab_size, max_num_batched_tokens=512)
    if kind == "target":
        loop = target_loop(build_target_engine(settings, device=EMULATION.target_device(settings)))
        servicer = VerificationServicer(loop)
    else:
        loop = draft_loop(build_draft_engine(DraftSettings(settings), EMULATION.draft_device(settings)))
        servicer = DraftingServicer(loop)
    loop.start()
    server = await serve_engine(servicer)
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    await loop.close()
    tracing.shutdown_tracing()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
