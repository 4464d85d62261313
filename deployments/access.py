"""Owns finding out who calls: the credential in a call's metadata, checked against files that are read again when they
change. What a tenant may then use is `router.access`'s.

A caller sends `authorization: Bearer CREDENTIAL` (RFC 6750), an API key or a JSON Web Token. It is checked when a call
begins; a stream that has begun goes on when its key is revoked or its token expires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deployments.access_config import Access, read_api_keys
from deployments.watched_file import WatchedFile
from engine.errors import Unauthenticated
from router.access import EVERYBODY, Tenant
from router.api_keys import PREFIX

_HEADER, _SCHEME = "authorization", "bearer"
_MISSING = "this server takes calls with a key only: send `authorization: Bearer KEY` in the call's metadata"
_REFUSED = "the key or token in `authorization` is not accepted"


class Gate:
    """Tells who calls.

    Args:
        access: of the configuration.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a file that it names cannot be read.
    """

    def __init__(self, access: Access, clock: Callable[[], float]) -> None:
        self._is_open = access.is_open
        self._keys = None if access.api_keys is None else WatchedFile(access.api_keys, read_api_keys, clock)
        self._tokens: Callable[[str], Tenant | None] | None = None
        if access.jwt is not None:
            from deployments.tokens import Tokens  # and PyJWT and cryptography, which nobody else needs

            self._tokens = Tokens(access.jwt, clock).tenant_of

    def tenant(self, metadata: Iterable[tuple[str, str | bytes]]) -> Tenant:
        """Whose call it is, by its metadata.

        Raises:
            Unauthenticated: it says nothing, or nothing that is accepted; never what is wrong with it.
        """
        if self._is_open:
            return EVERYBODY
        tenant = self._tenant_of(_credential(metadata))
        if tenant is None:
            raise Unauthenticated(_REFUSED)
        return tenant

    def _tenant_of(self, credential: str) -> Tenant | None:
        if credential.startswith(PREFIX):
            return None if self._keys is None else self._keys.content().tenant_of(credential)
        return None if self._tokens is None else self._tokens(credential)


def _credential(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The one credential in a call's metadata. Raises Unauthenticated."""
    sent = [value for name, value in metadata if name.lower() == _HEADER]
    if not sent:
        raise Unauthenticated(_MISSING)
    scheme, _, credential = sent[0].partition(" ") if isinstance(sent[0], str) else ("", "", "")
    if len(sent) > 1 or scheme.lower() != _SCHEME or not credential.strip():
        raise Unauthenticated(_MISSING)
    return credential.strip()
