"""Owns what people write about access: the section `access` of the configuration, and the file of API keys it names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from deployments.yaml_file import ConfigError, Section, explain, read_yaml
from router.access import Limits, Tenant
from router.api_keys import ApiKey, ApiKeys
from router.requests import DEFAULT_LIMITS, RequestLimits

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError("give an absolute path: it is read where routers run")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class TenantLimits(Section):
    """What one tenant may use of each router, so of N routers up to N times as much; null does not limit."""

    requests_per_minute: Count | None = None
    """Calls of any method, as many at once where none came before."""
    tokens_per_minute: Count | None = None
    """Prompt and output tokens. A stream reserves its max_tokens when it begins and gives back what it did not use."""
    concurrent_streams: Count | None = 64
    """Generate calls open at a time."""

    def as_limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_streams)


class Jwt(Section):
    """JSON Web Tokens of one issuer. Only asymmetric signatures count: RS, PS, ES and EdDSA."""

    jwks: AbsolutePath
    """Path of the issuer's public keys, a JSON Web Key Set, where routers run; read again when it changes."""
    issuer: Name
    """What `iss` must be."""
    audience: Name
    """What `aud` must be or hold."""
    tenant_claim: Name = "sub"
    """The claim that names the tenant."""
    leeway_s: Annotated[float, Field(ge=0.0, le=600.0)] = 30.0
    """Seconds by which the clocks of issuer and router may differ."""
    limits: TenantLimits = TenantLimits()
    """Limits of each tenant."""
    plan_claim: Name | None = None
    """The claim that names one of `plans`; unset, `limits` is for all."""
    plans: dict[str, TenantLimits] = Field(default_factory=dict)
    """Limits of the tenants whose `plan_claim` names them; who names none or another has `limits`."""

    @model_validator(mode="after")
    def _plans_are_chosen(self) -> Self:
        if self.plans and self.plan_claim is None:
            raise ValueError("plans needs plan_claim: nothing says who has which")
        return self


class Requests(Section):
    """Most that one request may hold; more is refused with INVALID_ARGUMENT before anything is done for it."""

    max_message_bytes: Annotated[int, Field(ge=1024)] = DEFAULT_LIMITS.max_message_bytes
    """Of the whole message. gRPC itself refuses more than RAY_SERVE_GRPC_MAX_MESSAGE_SIZE, before reading it."""
    max_prompt_tokens: Count | None = None
    """Unset: what the target's window takes."""
    max_output_tokens: Count | None = None
    """The largest max_tokens; unset: any, cut to what the window leaves."""
    max_stop_strings: Count = DEFAULT_LIMITS.max_stop_strings
    """Stop strings."""
    max_stop_chars: Count = DEFAULT_LIMITS.max_stop_chars
    """Characters of each."""
    max_stop_token_ids: Count = DEFAULT_LIMITS.max_stop_token_ids
    """Stop token ids."""
    max_messages: Count = DEFAULT_LIMITS.max_messages
    """Turns of a chat."""
    max_name_chars: Count = DEFAULT_LIMITS.max_name_chars
    """Characters of `request_id`, which every reply repeats, and of a role."""

    def as_limits(self) -> RequestLimits:
        return RequestLimits(**self.model_dump())


class Access(Section):
    """Who may call, and how much. Without api_keys and jwt everybody may."""

    api_keys: AbsolutePath | None = None
    """Path of the file of API keys where routers run, e.g. in a mounted Secret; read again when it changes.
    `outrider api-key NAME` makes a key and prints the entry to add."""
    jwt: Jwt | None = None
    """Tokens to accept; with api_keys too, a caller may send either."""
    requests: Requests = Requests()
    """Most that one request may hold."""

    @property
    def is_open(self) -> bool:
        """Whether everybody may call."""
        return self.api_keys is None and self.jwt is None


class KeyEntry(Section):
    """One key in the file of API keys. A tenant may have several, so that one can be replaced without a pause."""

    name: Name
    """The tenant."""
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    """Public part of the key."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of the whole key, in hex."""
    limits: TenantLimits = TenantLimits()
    """The same in all entries of a tenant."""

    def as_key(self) -> ApiKey:
        return ApiKey(self.id, self.sha256, Tenant(self.name, self.limits.as_limits()))


_ENTRIES = TypeAdapter(list[KeyEntry])


def read_api_keys(path: Path) -> ApiKeys:
    """The keys of a file: a YAML list of entries; an empty file accepts none. Raises ConfigError."""
    content = read_yaml(path, str(path))
    try:
        entries = _ENTRIES.validate_python([] if content is None else content)
    except ValidationError as error:
        known = {True: TenantLimits.model_fields, False: KeyEntry.model_fields}
        raise ConfigError(f"{path}: {explain(error, lambda place: known['limits' in place])}") from error
    _check_consistent(entries, str(path))
    return ApiKeys(entry.as_key() for entry in entries)


def _check_consistent(entries: list[KeyEntry], source: str) -> None:
    twice = [each for each, number in Counter(entry.id for entry in entries).items() if number > 1]
    if twice:
        raise ConfigError(f"{source}: the id {twice[0]} is given twice")
    limits: dict[str, TenantLimits] = {}
    for entry in entries:
        if limits.setdefault(entry.name, entry.limits) != entry.limits:
            raise ConfigError(f"{source}: the keys of `{entry.name}` have different limits, which are one tenant's")
