"""What a tenant may use, counted on a clock that the test turns."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from engine.errors import LimitExceeded
from router.access import EVERYBODY, Accounts, Limits, Tenant
from router.api_keys import ApiKey, ApiKeys, key_hash, key_id, make_key


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(clock: Clock) -> Accounts:
    return Accounts(clock)


def tenant(name: str = "a", issuer: str = "", **limits: int) -> Tenant:
    return Tenant(name, Limits(**limits), issuer)


def refusal(accounts: Accounts, of: Tenant, expected_tokens: int = 1) -> LimitExceeded | None:
    """What a stream that ends at once is refused with."""
    try:
        with accounts.stream(of, expected_tokens):
            return None
    except LimitExceeded as error:
        return error


def test_requests_come_back_one_by_one(accounts: Accounts, clock: Clock) -> None:
    two = tenant(requests_per_minute=2)
    accounts.count_request(two)
    assert refusal(accounts, two) is None
    error = refusal(accounts, two)
    assert error is not None
    assert "2 requests a minute" in str(error)
    assert error.retry_after_s == pytest.approx(30.0)
    clock.now += error.retry_after_s
    accounts.count_request(two)
    with pytest.raises(LimitExceeded):
        accounts.count_request(two)


def test_an_idle_tenant_saves_up_one_minute_and_no_more(accounts: Accounts, clock: Clock) -> None:
    three = tenant(requests_per_minute=3)
    accounts.count_request(three)
    clock.now += 3600.0
    assert [refusal(accounts, three) is None for _ in range(4)] == [True, True, True, False]


def test_streams_count_while_they_are_open(accounts: Accounts) -> None:
    two = tenant(concurrent_streams=2)
    with accounts.stream(two, 1):
        with accounts.stream(two, 1):
            error = refusal(accounts, two)
            assert error is not None
            assert "2 streams are open" in str(error)
            assert error.retry_after_s > 0
            accounts.count_request(two)
        assert refusal(accounts, two) is None


def test_a_stream_that_fails_is_closed_too(accounts: Accounts) -> None:
    one = tenant(concurrent_streams=1, tokens_per_minute=100)
    with pytest.raises(ZeroDivisionError), accounts.stream(one, 100):
        raise ZeroDivisionError
    assert refusal(accounts, one, 100) is None


def test_tokens_are_reserved_and_what_is_left_is_given_back(accounts: Accounts) -> None:
    hundred = tenant(tokens_per_minute=100)
    with accounts.stream(hundred, 100) as spend:
        assert refusal(accounts, hundred) is not None
        spend(30)
    with accounts.stream(hundred, 60) as spend:
        assert refusal(accounts, hundred) is None, "10 are left"
        spend(60)


def test_what_a_reply_uses_beyond_its_reserve_has_to_flow_back(accounts: Accounts, clock: Clock) -> None:
    hundred = tenant(tokens_per_minute=100)
    with accounts.stream(hundred, 10) as spend:
        spend(140)  # a long prompt
        spend(9)
    error = refusal(accounts, hundred)
    assert error is not None
    assert "100 tokens a minute" in str(error)
    assert error.retry_after_s == pytest.approx(30.0)
    clock.now += 29.9
    assert refusal(accounts, hundred) is not None
    clock.now += 0.1
    assert refusal(accounts, hundred) is None


def test_over_an_hour_a_tenant_gets_its_tokens_and_no_more(accounts: Accounts, clock: Clock) -> None:
    thousand, used = tenant(tokens_per_minute=1000), 0
    while clock.now < 3650.0:
        try:
            with accounts.stream(thousand, 256) as spend:
                spend(700)
                used += 700
        except LimitExceeded as error:
            clock.now += error.retry_after_s
    assert 60_000 <= used <= 60_000 + 1000 + 2 * 700


def test_a_request_larger_than_the_budget_is_served_and_paid_for_later(accounts: Accounts, clock: Clock) -> None:
    hundred = tenant(tokens_per_minute=100)
    with accounts.stream(hundred, 10**9) as spend:
        error = refusal(accounts, hundred)
        assert error is not None
        assert error.retry_after_s <= 60.0, "a reserve is a minute's budget at most"
        spend(100)
    clock.now += 1.0
    assert refusal(accounts, hundred) is None


def test_tenants_do_not_touch_each_other(accounts: Accounts) -> None:
    """Neither those with other names nor those that another issuer calls the same."""
    one = {"requests_per_minute": 1, "concurrent_streams": 1, "tokens_per_minute": 1}
    with ExitStack() as streams:
        for other in (tenant("a", **one), tenant("b", **one), tenant("a", "https://issuer", **one)):
            streams.enter_context(accounts.stream(other, 1))(5)
            assert refusal(accounts, other) is not None


def test_changed_limits_hold_at_once_and_unchanged_ones_are_not_forgotten(accounts: Accounts) -> None:
    accounts.count_request(tenant(requests_per_minute=1, tokens_per_minute=10))
    with pytest.raises(LimitExceeded):
        accounts.count_request(tenant(requests_per_minute=1, tokens_per_minute=99))
    accounts.count_request(tenant(requests_per_minute=2, tokens_per_minute=99))
    accounts.count_request(tenant())


def test_everybody_has_no_limits(accounts: Accounts) -> None:
    with ExitStack() as streams:
        for _ in range(500):
            streams.enter_context(accounts.stream(EVERYBODY, 10**6))(10**6)


def test_accounts_of_tenants_that_are_idle_are_forgotten(accounts: Accounts, clock: Clock) -> None:
    busy = tenant("busy", requests_per_minute=1)
    with accounts.stream(tenant("open", concurrent_streams=1), 1):
        for number in range(3000):
            accounts.count_request(tenant(str(number), requests_per_minute=60))
            clock.now += 1.0
        accounts.count_request(busy)
        for number in range(3000):
            accounts.count_request(tenant(str(number), requests_per_minute=60))
            clock.now += 0.001
        assert refusal(accounts, tenant("open", concurrent_streams=1)) is not None
        with pytest.raises(LimitExceeded):
            accounts.count_request(busy)
    clock.now += 3600.0
    for number in range(10_000):
        accounts.count_request(tenant(f"later {number}"))
    assert len(accounts) <= 4096


def test_a_key_is_known_by_its_hash_alone() -> None:
    one, other = make_key(), make_key()
    assert one != other
    assert len(one.split("_", 2)[2]) == 43
    assert key_id(one) != key_id(other) != ""
    keys = ApiKeys(
        [ApiKey(key_id(one), key_hash(one), Tenant("a")), ApiKey(key_id(other), key_hash(other), Tenant("b"))]
    )
    assert (keys.tenant_of(one), keys.tenant_of(other)) == (Tenant("a"), Tenant("b"))


@pytest.mark.parametrize("change", ["secret", "id", "prefix", "empty", "hash", "longer", "shorter"])
def test_a_wrong_key_is_nobodys(change: str) -> None:
    key, other = make_key(bytes), make_key()
    keys = ApiKeys(
        [ApiKey(key_id(key), key_hash(key), Tenant("a")), ApiKey(key_id(other), key_hash(other), Tenant("b"))]
    )
    wrong = {
        "secret": f"outrider_{key_id(key)}_{other.split('_', 2)[2]}",
        "id": f"outrider_{key_id(other)}_{key.split('_', 2)[2]}",
        "prefix": key.removeprefix("outrider_"),
        "empty": "",
        "hash": key_hash(key),
        "longer": key + "A",
        "shorter": key[:-1],
    }
    assert keys.tenant_of(key) == Tenant("a")
    assert keys.tenant_of(wrong[change]) is None
