"""Owns what a tenant may use of one router: requests and tokens a minute, streams at a time. Pure; the clock is given.

Who a tenant is, is settled before (`deployments.access`). What is counted is counted in this process: of N routers a
tenant may use up to N times its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import LimitExceeded

_MINUTE_S = 60.0
_ROUNDING = 1e-9  # of a request or token, lost in adding up what has flowed back
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_STREAM_RETRY_S = 1.0
_FORGET_FROM = 1024  # tenants; tokens may name any number of them

Clock = Callable[[], float]
Spend = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one tenant may use of one router; None does not limit.

    Attributes:
        requests_per_minute: calls of any method.
        tokens_per_minute: prompt and output together.
        concurrent_streams: Generate calls that are open at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_streams: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls.

    Attributes:
        name: unique among those of one issuer.
        issuer: who vouches for the name: "" this system's own keys, else the issuer of the token. Tenants of two
            issuers are two, whatever their names.
    """

    name: str
    limits: Limits = Limits()
    issuer: str = ""


EVERYBODY = Tenant("")
"""The tenant of every call where no key is asked for."""


class Budget:
    """A token bucket: `per_minute` flow back evenly, and no more than that is ever there. It may be overdrawn."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._left, self._at = float(per_minute), clock()

    def wait_s(self) -> float:
        """Seconds until there is one; 0 if there is."""
        missing = 1.0 - _ROUNDING - self._refilled()
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: int) -> None:
        self._left = self._refilled() - amount

    def give_back(self, amount: int) -> None:
        self._left = min(self._refilled() + amount, float(self.per_minute))

    @property
    def is_full(self) -> bool:
        return self._refilled() >= self.per_minute - _ROUNDING

    def _refilled(self) -> float:
        now = self._clock()
        gained = (now - self._at) * self.per_minute / _MINUTE_S
        self._left, self._at = min(self._left + gained, float(self.per_minute)), now
        return self._left


class Reserve:
    """What one stream has taken from a budget in advance: it is used up first, and given back as far as it is left.

    So streams that begin together do not each take the whole budget, and a long reply is never cut in the middle: what
    it uses beyond its reserve (its prompt, say) overdraws the budget, and has to flow back before the next one begins.
    """

    def __init__(self, budget: Budget, expected: int) -> None:
        self._budget, self._left = budget, min(expected, budget.per_minute)
        budget.take(self._left)

    def spend(self, amount: int) -> None:
        reserved = min(amount, self._left)
        self._left -= reserved
        self._budget.take(amount - reserved)

    def close(self) -> None:
        self._budget.give_back(self._left)
        self._left = 0


class Account:
    """What one tenant has used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limits = Limits()
        self.requests: Budget | None = None
        self.tokens: Budget | None = None
        self.open_streams = 0

    def limit(self, limits: Limits) -> None:
        """Changed limits begin with full budgets; unchanged ones go on."""
        if limits.requests_per_minute != self._limits.requests_per_minute:
            self.requests = self._budget(limits.requests_per_minute)
        if limits.tokens_per_minute != self._limits.tokens_per_minute:
            self.tokens = self._budget(limits.tokens_per_minute)
        self._limits = limits

    def check(self, *, is_stream: bool) -> None:
        """Raises LimitExceeded when one more request, or stream, is too many now."""
        most = self._limits.concurrent_streams
        if is_stream and most is not None and self.open_streams >= most:
            raise LimitExceeded(f"{most} streams are open, the most that this tenant may have", _STREAM_RETRY_S)
        _check_budget(self.requests, "requests")
        if is_stream:
            _check_budget(self.tokens, "tokens")

    @property
    def is_idle(self) -> bool:
        """Whether a new account would be the same."""
        budgets = (self.requests, self.tokens)
        return not self.open_streams and all(budget is None or budget.is_full for budget in budgets)

    def _budget(self, per_minute: int | None) -> Budget | None:
        return None if per_minute is None else Budget(per_minute, self._clock)


class Accounts:
    """The accounts of all tenants that have called lately.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[tuple[str, str], Account] = {}
        self._forget_from = _FORGET_FROM

    def __len__(self) -> int:
        return len(self._accounts)

    def count_request(self, tenant: Tenant) -> None:
        """One call that generates nothing. Raises LimitExceeded."""
        self._admit(tenant, is_stream=False)

    @contextmanager
    def stream(self, tenant: Tenant, expected_tokens: int) -> Iterator[Spend]:
        """One Generate call, open as long as the block runs; yields what is told of tokens as they are used.

        Args:
            expected_tokens: output tokens it may use, reserved until they are used or the block ends.

        Raises:
            LimitExceeded: the tenant has used up one of its limits; says when to come back.
        """
        account = self._admit(tenant, is_stream=True)
        reserve = None if account.tokens is None else Reserve(account.tokens, expected_tokens)
        account.open_streams += 1
        try:
            yield spend_nothing if reserve is None else reserve.spend
        finally:
            account.open_streams -= 1
            if reserve is not None:
                reserve.close()

    def _admit(self, tenant: Tenant, *, is_stream: bool) -> Account:
        account = self._account(tenant)
        account.limit(tenant.limits)
        account.check(is_stream=is_stream)
        if account.requests is not None:
            account.requests.take(1)
        return account

    def _account(self, tenant: Tenant) -> Account:
        name = (tenant.issuer, tenant.name)
        if name not in self._accounts:
            if len(self._accounts) >= self._forget_from:
                self._forget_idle()
            self._accounts[name] = Account(self._clock)
        return self._accounts[name]

    def _forget_idle(self) -> None:
        self._accounts = {name: account for name, account in self._accounts.items() if not account.is_idle}
        self._forget_from = max(_FORGET_FROM, 2 * len(self._accounts))


def _check_budget(budget: Budget | None, what: str) -> None:
    wait_s = 0.0 if budget is None else budget.wait_s()
    if budget is not None and wait_s:
        hint_s = min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
        raise LimitExceeded(f"this tenant's {budget.per_minute} {what} a minute are used up", hint_s)


def spend_nothing(num_tokens: int) -> None:
    """Nobody counts."""
