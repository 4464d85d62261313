"""Owns keeping a router's PeerSet in step with the replicas that Serve runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from cluster.discovery import BroadcastHandle, Discovery, Endpoint
from engine.errors import OutriderError
from router.peers import Pool
from rpc.clients import DraftClient, TargetClient

ANSWER_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)

ClientT = TypeVar("ClientT", bound=TargetClient | DraftClient)


class PeerKeeper(Generic[ClientT]):
    """Connects to each replica of one deployment once, and drops those that are gone.

    Args:
        handle: of the deployment.
        pool: what sessions pick from.
        connect: makes a client of an address.
        seen: told the endpoints of every look.
        period_s: seconds between two looks.
        tokenizer: fingerprint of the vocabulary; replicas that have another are left out.
    """

    def __init__(
        self,
        handle: BroadcastHandle,
        pool: Pool[Any],
        connect: Callable[[str], Awaitable[ClientT]],
        seen: Callable[[Sequence[Endpoint]], None],
        period_s: float,
        tokenizer: str,
    ) -> None:
        self._pool, self._connect, self._seen, self._tokenizer = pool, connect, seen, tokenizer
        self._clients: dict[str, ClientT] = {}
        self._strangers: set[str] = set()
        self._unreached: dict[str, str] = {}
        self._discovery = Discovery(handle, self._found, self._ask_each, period_s=period_s)
        self._watching = asyncio.create_task(self._discovery.run())

    def look_now(self) -> None:
        """A session failed: its replica may be gone."""
        self._discovery.look_now()

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        for client in self._clients.values():
            await client.close()

    async def _found(self, endpoints: Sequence[Endpoint]) -> None:
        self._seen(endpoints)
        here = {endpoint.address for endpoint in endpoints if self._shares_vocabulary(endpoint)}
        gone = [self._clients.pop(address) for address in set(self._clients) - here]
        self._unreached = {address: why for address, why in self._unreached.items() if address in here}
        for address in here - set(self._clients):
            try:
                self._clients[address] = await self._connect(address)
            except OutriderError as error:
                self._report(address, str(error))  # the next look tells whether it came up
        self._pool.replace(self._clients)
        for client in gone:
            await client.close()

    def _shares_vocabulary(self, endpoint: Endpoint) -> bool:
        if endpoint.info.tokenizer == self._tokenizer:
            return True
        if endpoint.address not in self._strangers:
            _log.warning("%s at %s has another vocabulary: left out", endpoint.info.model, endpoint.address)
            self._strangers.add(endpoint.address)
        return False

    def _report(self, address: str, why: str) -> None:
        """A replica said where it is, and does not answer there, or not us. Said once for each reason."""
        if self._unreached.get(address) != why:
            _log.warning("the replica at %s cannot be used: %s", address, why)
        self._unreached[address] = why

    async def _ask_each(self) -> None:
        """Nobody knows who is there: those that do not answer are let go of, and their sessions go on elsewhere."""
        asked = dict(self._clients)
        answers = await asyncio.gather(
            *(client.refresh(ANSWER_TIMEOUT_S) for client in asked.values()), return_exceptions=True
        )
        silent = [address for address, answer in zip(asked, answers, strict=True) if isinstance(answer, OutriderError)]
        gone = [self._clients.pop(address) for address in silent]
        self._pool.replace(self._clients)
        for client in gone:
            await client.close()
