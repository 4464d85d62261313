"""Owns mutual TLS between routers, drafts and targets: who shows which certificate, and who may call whom.

A certificate is for the DNS name of a kind of process, not of a machine: addresses are those of Pods and come and go.
Routers call drafts and targets, and nobody else may.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from engine.errors import PermissionDenied
from rpc.certificates import Certificate, CertificateFiles
from rpc.handlers import rewrapped


class Role(StrEnum):
    """A kind of process."""

    ROUTER = "router"
    DRAFT = "draft"
    TARGET = "target"


class MutualTls:
    """One process's side of every connection between processes.

    Args:
        folder: with tls.crt, tls.key and ca.crt.
        role: what this process is; its certificate is for `role.domain`.
        domain: what the names in all certificates end with.
        clock: Unix time, seconds.

    Raises:
        InvalidArgument: the files cannot be used (rpc.certificates).
    """

    def __init__(
        self, folder: Path, role: Role, domain: str = "outrider", clock: Callable[[], float] = time.time
    ) -> None:
        self._files = CertificateFiles(folder, f"{role}.{domain}", calls=role is Role.ROUTER)
        self._domain, self._clock = domain, clock

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that asks each caller for a certificate, and shows one that is current at each handshake."""
        shown = self._files.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if (now := self._files.current()) is shown:
                return None
            shown = now
            return _server_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(shown),
            renewed,  # type: ignore[arg-type]  # None stands for no change; types-grpcio does not know
            require_client_authentication=True,
        )

    def callers(self) -> CallerInterceptor:
        """Lets routers in, and nobody else."""
        return CallerInterceptor(f"{Role.ROUTER}.{self._domain}")

    def towards(self, role: Role) -> PeerTls:
        """How this process calls those of kind `role`."""
        return PeerTls(self._files, f"{role}.{self._domain}", self._clock)


class PeerTls:
    """How a process calls peers of one kind.

    Args:
        files: its own certificate.
        name: DNS name that the certificate of a peer must be for.
        clock: Unix time, seconds.
    """

    def __init__(self, files: CertificateFiles, name: str, clock: Callable[[], float]) -> None:
        self._files, self._name, self._clock = files, name, clock

    def certificate(self) -> Certificate:
        """The own certificate, as it is now."""
        return self._files.current()

    def channel(self, address: str, certificate: Certificate, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel whose every connection shows `certificate`, and on which nobody but a peer of the kind answers."""
        credentials = grpc.ssl_channel_credentials(certificate.authorities, certificate.key, certificate.chain)
        named = ("grpc.ssl_target_name_override", self._name)
        return grpc.aio.secure_channel(address, credentials, (*options, named))

    def describe(self, certificate: Certificate) -> str:
        """What either side could have refused: a server that refuses closes the connection without a word."""
        ends = f"{datetime.fromtimestamp(certificate.expires_at, UTC):%Y-%m-%d %H:%M} UTC"
        valid = f"valid until {ends}" if self._clock() < certificate.expires_at else f"which expired on {ends}"
        return f"over TLS as {self._files.name} ({valid}), to whoever is {self._name}"


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls, to whatever service on the port, from everybody whose certificate is not for `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else rewrapped(handler, self._guard)

    def _guard(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._check(context)
            return await behaviour(request, context)

        async def generates(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            self._check(context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return generates if inspect.isasyncgenfunction(behaviour) else answers

    def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises PermissionDenied."""
        names = [name.decode() for name in context.auth_context().get("peer_dns", ())]
        if self._name not in names:
            found = f"is for {', '.join(names)}" if names else "has no DNS name"
            raise PermissionDenied(f"the caller's certificate {found}, allowed is {self._name} alone")


def _server_configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], root_certificates=certificate.authorities
    )
