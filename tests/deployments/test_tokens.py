"""Who is let in by a token: with one that its issuer signed for us and for now, and no other (RFC 8725)."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.utils import base64url_encode

from deployments.access import Gate
from deployments.access_config import Access
from deployments.config_file import ConfigError
from deployments.tokens import read_jwks
from deployments.watched_file import LOOK_EVERY_S
from router.access import Limits, Tenant
from router.api_keys import make_key
from tests.deployments.calling import Clock, bearer, refused

ISSUER, AUDIENCE = "https://issuer.example", "outrider"

Signer = Callable[..., str]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    return {
        "RS256": rsa.generate_private_key(65537, 2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }


@pytest.fixture
def path(tmp_path: Path, keys: dict[str, Any]) -> Path:
    kinds = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}
    path = tmp_path / "jwks.json"
    jwks = [
        {**kinds[name].to_jwk(key.public_key(), as_dict=True), "kid": name, "use": "sig"} for name, key in keys.items()
    ]
    path.write_text(json.dumps({"keys": jwks}))
    return path


@pytest.fixture
def gate(path: Path, clock: Clock) -> Gate:
    plans = {"gold": {"tokens_per_minute": 9}}
    section = {"jwks": str(path), "issuer": ISSUER, "audience": AUDIENCE, "leeway_s": 5, "plan_claim": "plan"}
    return Gate(Access.model_validate({"jwt": {**section, "plans": plans}}), clock)


@pytest.fixture
def sign(keys: dict[str, Any]) -> Signer:
    def sign(algorithm: str = "RS256", kid: str | None = None, key: Any = None, **claims: Any) -> str:
        now = time.time()
        content = {"sub": "agent", "iss": ISSUER, "aud": AUDIENCE, "exp": now + 60, "nbf": now - 1, **claims}
        payload = {name: value for name, value in content.items() if value is not None}
        headers = {"kid": kid or algorithm}
        return jwt.encode(payload, keys[algorithm] if key is None else key, algorithm, headers)

    return sign


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_tells_the_tenant(gate: Gate, sign: Signer, algorithm: str) -> None:
    assert gate.tenant(bearer(sign(algorithm))) == Tenant("agent", Limits(concurrent_streams=64), ISSUER)


def test_a_claim_chooses_the_limits(gate: Gate, sign: Signer) -> None:
    gold, none = Limits(tokens_per_minute=9, concurrent_streams=64), Limits(concurrent_streams=64)
    said = [gate.tenant(bearer(sign(plan=plan))).limits for plan in ("gold", "silver", None, ["gold"])]
    assert said == [gold, none, none, none]


def test_clocks_may_differ_by_the_leeway(gate: Gate, sign: Signer) -> None:
    gate.tenant(bearer(sign(exp=time.time() - 2, nbf=time.time() + 2)))


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1_000_000_000},
        {"exp": None},
        {"exp": "soon"},
        {"nbf": 40_000_000_000},
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"sub": None},
        {"sub": ""},
        {"kid": "unknown"},
        {"kid": "ES256"},
    ],
)
def test_a_token_that_is_not_for_us_now(gate: Gate, sign: Signer, claims: dict[str, Any]) -> None:
    assert refused(gate, bearer(sign(**claims))) == refused(gate, bearer("nonsense"))


def test_a_token_that_somebody_else_signed(gate: Gate, sign: Signer) -> None:
    refused(gate, bearer(sign(key=rsa.generate_private_key(65537, 2048))))


def test_a_token_that_nobody_signed(gate: Gate, sign: Signer) -> None:
    header, payload, signature = sign().split(".")
    for algorithm in ("none", "None", "NONE", ""):
        forged = base64url_encode(json.dumps({"alg": algorithm, "kid": "RS256"}).encode()).decode()
        for end in ("", signature):
            refused(gate, bearer(f"{forged}.{payload}.{end}"))
    refused(gate, bearer(f"{header}.{payload}."))


@pytest.mark.parametrize("encoding", [Encoding.PEM, Encoding.DER])
def test_a_public_key_is_no_secret(gate: Gate, sign: Signer, keys: dict[str, Any], encoding: Encoding) -> None:
    """HS256 keyed with what everybody knows; PyJWT refuses to sign so, which is why it is done by hand."""
    public = keys["RS256"].public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
    payload = sign().split(".")[1]
    header = base64url_encode(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "RS256"}).encode()).decode()
    signed = f"{header}.{payload}"
    signature = base64url_encode(hmac.digest(public, signed.encode(), hashlib.sha256)).decode()
    refused(gate, bearer(f"{signed}.{signature}"))


def test_payloads_are_not_to_be_swapped(gate: Gate, sign: Signer) -> None:
    header, _, signature = sign().split(".")
    refused(gate, bearer(f"{header}.{sign(sub='root').split('.')[1]}.{signature}"))


@pytest.mark.parametrize("rubbish", ["a", "..", "a.b.c", "e30.e30.", "[" * 4000, "e30." * 1000, "ÿ.ÿ.ÿ"])
def test_rubbish(gate: Gate, rubbish: str) -> None:
    refused(gate, bearer(rubbish))


def test_brackets_within_brackets(gate: Gate) -> None:
    deep = base64url_encode(b"[" * 5000).decode()
    refused(gate, bearer(f"{deep}.{deep}.{deep}"))


def test_an_api_key_is_no_token(gate: Gate) -> None:
    refused(gate, bearer(make_key()))


def test_keys_of_the_issuer_are_read_again(gate: Gate, path: Path, sign: Signer, clock: Clock) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"keys": [key for key in content["keys"] if key["kid"] != "RS256"]}))
    clock.now += LOOK_EVERY_S
    refused(gate, bearer(sign("RS256")))
    gate.tenant(bearer(sign("ES256")))


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"keys": []}',
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "kid": "h"}]}',
    ],
)
def test_a_key_set_without_public_keys(tmp_path: Path, content: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"jwks\.json"):
        read_jwks(path)
