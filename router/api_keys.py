"""Owns API keys: how one is made, what is kept of it, and whose a presented one is. Pure; randomness is given.

A key is `outrider_ID_SECRET`: a public id, by which its entry is found, and 256 random bits. Only the SHA-256 of the
whole key is kept. A slow hash (bcrypt, Argon2) is for passwords, which people choose from few enough to try them all;
nobody can try 2^256 keys, so a fast hash gives nothing away, and a check costs a router microseconds instead of the
tenths of a second by which wrong keys would keep it busy.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.access import Tenant

PREFIX = "outrider_"
_ID_BYTES, _SECRET_BYTES = 6, 32


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key.

    Attributes:
        id: its public part.
        sha256: of the whole key, in hex.
    """

    id: str
    sha256: str
    tenant: Tenant


def make_key(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """A new key."""
    secret = urlsafe_b64encode(random_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    return f"{PREFIX}{random_bytes(_ID_BYTES).hex()}_{secret}"


def key_id(key: str) -> str:
    """The public part of a key; "" of what is none."""
    return key.removeprefix(PREFIX).partition("_")[0] if key.startswith(PREFIX) else ""


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys that are accepted.

    Args:
        keys: ids are unique.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.id: key for key in keys}

    def tenant_of(self, key: str) -> Tenant | None:
        """Whose key it is; None for one that is not accepted."""
        kept = self._keys.get(key_id(key))
        if kept is None or not hmac.compare_digest(kept.sha256, key_hash(key)):
            return None
        return kept.tenant
