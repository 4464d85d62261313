"""Owns a process's certificate: three files, checked when they are read and read again when they change.

The folder is laid out as cert-manager lays out a Secret. What is checked is what the other side will check, so that a
wrong file is named here and not by a handshake that fails somewhere else for no reason given.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import InvalidArgument

CHAIN, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """What the files held when they were read. Two of them are the same only if nothing was read in between.

    Attributes:
        chain: the certificate and those between it and an authority, PEM.
        key: its private key, PEM.
        authorities: who vouches for the other side, PEM.
        expires_at: Unix time, seconds.
    """

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    expires_at: float


class CertificateFiles:
    """The files of one process.

    Args:
        folder: where tls.crt, tls.key and ca.crt are.
        name: DNS name that the certificate must be for.
        calls: whether this process shows it to those it calls; else to those who call it.

    Raises:
        InvalidArgument: a file is missing or unreadable, the key is another's, no authority in ca.crt vouches for the
            certificate, it has expired, or it is for another name.
    """

    def __init__(self, folder: Path, name: str, *, calls: bool) -> None:
        self.name = name
        self._folder, self._calls = folder, calls
        self._lock = threading.Lock()  # gRPC asks on threads of its own
        self._seen = self._state()
        self._certificate = self._read()

    def current(self) -> Certificate:
        """What the files hold now. While they are broken, what they held before; one line in the log says so."""
        with self._lock:
            if (state := self._state()) != self._seen:
                self._renew(state)
            return self._certificate

    def _renew(self, state: object) -> None:
        try:
            certificate, fault = self._read(), ""
        except InvalidArgument as error:
            certificate, fault = self._certificate, str(error)
        if self._state() != state:
            return  # they were being written: the next look tells
        self._certificate, self._seen = certificate, state
        if fault:
            _log.error("the certificate in use stays, because the new one cannot be used: %s", fault)
        else:
            _log.info("the certificate for %s was renewed", self.name)

    def _state(self) -> object:
        return tuple(_state_of(self._folder / name) for name in (CHAIN, KEY, AUTHORITIES))

    def _read(self) -> Certificate:
        chain, key, authorities = (_content_of(self._folder / name) for name in (CHAIN, KEY, AUTHORITIES))
        shown = self._as_others_see_it()
        names = [name for kind, name in shown.get("subjectAltName", ()) if kind == "DNS"]
        if self.name not in names:
            raise InvalidArgument(str(self._folder / CHAIN), _for_names(names), f"one for {self.name}")
        return Certificate(chain, key, authorities, ssl.cert_time_to_seconds(shown["notAfter"]))

    def _as_others_see_it(self) -> Mapping[str, Any]:
        """The certificate out of a handshake in memory, in which the other side knows the same authorities."""
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        self._load_pair(server)
        if self._calls:
            self._load_pair(client)
        verifier = server if self._calls else client
        verifier.verify_mode = ssl.CERT_REQUIRED
        verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: ca.crt may name an intermediate alone
        self._load_authorities(verifier)
        try:
            return _shown_to(verifier, server, client)
        except ssl.SSLError as error:
            raise InvalidArgument(
                str(self._folder / CHAIN),
                f"a certificate that others refuse: {getattr(error, 'verify_message', error.reason)}",
                f"one that an authority in {AUTHORITIES} vouches for now",
            ) from None

    def _load_pair(self, context: ssl.SSLContext) -> None:
        chain, key = self._folder / CHAIN, self._folder / KEY
        try:
            context.load_cert_chain(chain, key, password=lambda: b"")
        except OSError as error:
            found, allowed = (
                f"what makes no pair with {KEY}: {_reason(error)}",
                "a certificate in PEM and its key, unencrypted",
            )
            raise InvalidArgument(str(chain), found, allowed) from None

    def _load_authorities(self, context: ssl.SSLContext) -> None:
        authorities = self._folder / AUTHORITIES
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise InvalidArgument(str(authorities), _reason(error), "certificates in PEM") from None


def _shown_to(verifier: ssl.SSLContext, server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any]:
    """Shakes hands in memory; returns what `verifier`, one of the two, has seen. Raises SSLCertVerificationError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        client: client.wrap_bio(to_client, to_server),
        server: server.wrap_bio(to_server, to_client, server_side=True),
    }
    shaking = list(ends.values())
    while shaking:
        shaking = [end for end in shaking if not _shaken(end)]
    return ends[verifier].getpeercert() or {}


def _shaken(end: ssl.SSLObject) -> bool:
    """Goes on with the handshake of one end; whether it is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _reason(error: OSError) -> str:
    """OpenSSL's word for it, or the system's."""
    return str(getattr(error, "reason", None) or error.strerror or error)


def _for_names(names: list[str]) -> str:
    return f"a certificate for {', '.join(names)}" if names else "a certificate without a DNS name"


def _content_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(str(file), _reason(error), "a file that this process may read") from None


def _state_of(file: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written; None without one."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
