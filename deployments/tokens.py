"""Owns JSON Web Tokens (RFC 7519): whose one is, by the public keys of its issuer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt

from deployments.access_config import Jwt
from deployments.watched_file import WatchedFile
from deployments.yaml_file import ConfigError
from router.access import Tenant

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric ones alone: what checks a signature cannot make one."""

_log = logging.getLogger(__name__)


class Tokens:
    """Checks the tokens of one issuer.

    A token is checked by the algorithm of the key that it names, never by one that it names itself; keys of symmetric
    algorithms are refused when they are read. So neither `none` nor a public key used as an HMAC secret passes.

    Raises:
        ConfigError: the key set cannot be read.
    """

    def __init__(self, config: Jwt, clock: Callable[[], float]) -> None:
        self._config = config
        self._keys = WatchedFile(config.jwks, read_jwks, clock)
        self._plans = {name: limits.as_limits() for name, limits in config.plans.items()}
        self._limits = config.limits.as_limits()

    def tenant_of(self, token: str) -> Tenant | None:
        """Whose token it is; None for one that is not accepted."""
        try:
            claims = self._claims(token)
        except (jwt.PyJWTError, RecursionError) as error:  # the latter by brackets within brackets
            _log.debug("a token was refused: %s", error)
            return None
        name = claims.get(self._config.tenant_claim)
        if not isinstance(name, str) or not name:
            return None
        plan = claims.get(self._config.plan_claim) if self._config.plan_claim is not None else None
        limits = self._plans.get(plan, self._limits) if isinstance(plan, str) else self._limits
        return Tenant(name, limits, self._config.issuer)

    def _claims(self, token: str) -> dict[str, Any]:
        """Raises PyJWTError."""
        key = self._key(jwt.get_unverified_header(token).get("kid"))
        claims: dict[str, Any] = jwt.decode(
            token,
            key=key,
            algorithms=[key.algorithm_name],
            audience=self._config.audience,
            issuer=self._config.issuer,
            leeway=self._config.leeway_s,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
        return claims

    def _key(self, kid: object) -> jwt.PyJWK:
        """The key with this id; a token may name none where there is one only. Raises PyJWTError."""
        keys = self._keys.content()
        matching = [key for key in keys if key.key_id == kid] if kid is not None else keys
        if len(matching) != 1:
            raise jwt.InvalidKeyError(f"{len(matching)} keys match")
        return matching[0]


def read_jwks(path: Path) -> list[jwt.PyJWK]:
    """The keys of a JSON Web Key Set (RFC 7517) that sign. Raises ConfigError."""
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(path.read_text(encoding="utf-8"))).keys
    except (OSError, ValueError, AttributeError, jwt.PyJWTError) as error:
        raise ConfigError(f"{path}: no JSON Web Key Set: {error}") from error
    signing = [key for key in keys if key.public_key_use in (None, "sig")]
    for key in signing:
        if key.algorithm_name not in ALGORITHMS:
            allowed = ", ".join(ALGORITHMS)
            raise ConfigError(f"{path}: key {key.key_id!r} is for {key.algorithm_name}; allowed are {allowed}")
    if not signing:
        raise ConfigError(f"{path}: no key for signatures")
    return signing
