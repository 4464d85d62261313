"""Who is let in by a key: with one that is right, and none that is nearly right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from deployments import cli
from deployments.access import Gate
from deployments.access_config import Access, read_api_keys
from deployments.config_file import ConfigError, parse_config
from deployments.watched_file import LOOK_EVERY_S
from router.access import EVERYBODY, Limits, Tenant
from router.api_keys import key_hash, key_id, make_key
from tests.deployments.calling import Clock, bearer, entry, refused, write_keys


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_without_keys_everybody_may_call(clock: Clock) -> None:
    gate = Gate(Access(), clock)
    assert gate.tenant([]) == gate.tenant(bearer("whatever")) == EVERYBODY


def test_a_key_tells_the_tenant_and_its_limits(path: Path, clock: Clock) -> None:
    one, other, second = make_key(), make_key(), make_key()
    write_keys(path, entry(one, "a", requests_per_minute=5), entry(other, "b"), entry(second, "b"))
    gate = Gate(Access(api_keys=str(path)), clock)
    assert gate.tenant(bearer(one)) == Tenant("a", Limits(requests_per_minute=5, concurrent_streams=64))
    assert gate.tenant(bearer(other)) == gate.tenant(bearer(second)) == Tenant("b", Limits(concurrent_streams=64))
    assert gate.tenant([("Authorization", f"bEARER  {one} ")]).name == "a"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic dXNlcjpwYXNz")],
        [("authorization", b"Bearer x")],
        [("x-api-key", "x")],
    ],
)
def test_who_sends_no_key_is_told_how(path: Path, clock: Clock, metadata: list[tuple[str, Any]]) -> None:
    write_keys(path, entry(make_key(), "a"))
    said = refused(Gate(Access(api_keys=str(path)), clock), metadata)
    assert "send `authorization: Bearer KEY`" in said


def test_two_keys_in_one_call_are_none(path: Path, clock: Clock) -> None:
    key = make_key()
    write_keys(path, entry(key, "a"))
    refused(Gate(Access(api_keys=str(path)), clock), bearer(key) + bearer(key))


def test_who_sends_a_wrong_key_is_not_told_why(path: Path, clock: Clock) -> None:
    key = make_key()
    write_keys(path, entry(key, "a"))
    gate = Gate(Access(api_keys=str(path)), clock)
    wrong = [make_key(), key[:-1], key.upper(), key_hash(key), f"outrider_{key_id(key)}_", "x.y.z", "\U0001f98a"]
    assert len({refused(gate, bearer(each)) for each in wrong}) == 1


def test_keys_come_and_go_with_the_file(path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    revoked, added = make_key(), make_key()
    write_keys(path, entry(revoked, "a"))
    gate = Gate(Access(api_keys=str(path)), clock)
    gate.tenant(bearer(revoked))
    write_keys(path, entry(added, "a"))
    clock.now += LOOK_EVERY_S
    refused(gate, bearer(revoked))
    assert gate.tenant(bearer(added)).name == "a"
    assert "was read again" in caplog.text


@pytest.mark.parametrize("change", ["[}", "- {name: a}", None])
def test_a_slip_in_the_file_locks_nobody_out(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, change: str | None
) -> None:
    key, mended = make_key(), make_key()
    write_keys(path, entry(key, "a"))
    gate = Gate(Access(api_keys=str(path)), clock)
    path.unlink()
    if change is not None:
        path.write_text(change)
    for _ in range(5):
        clock.now += LOOK_EVERY_S
        assert gate.tenant(bearer(key)).name == "a"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "said once for each change"
    write_keys(path, entry(mended, "a"))
    clock.now += LOOK_EVERY_S
    refused(gate, bearer(key))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a: b", "valid list"),
        ("- {name: a}", "id: field required"),
        ("- {name: a, id: zz, sha256: ff, limits: {request_per_minute: 3}}", "did you mean `requests_per_minute`"),
        ("- {nam: a}", "did you mean `name`"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(path: Path, content: str, fault: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=fault) as caught:
        read_api_keys(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_entries_must_not_contradict_each_other(path: Path) -> None:
    one, other = make_key(), make_key()
    write_keys(path, entry(one, "a"), entry(one, "b"))
    with pytest.raises(ConfigError, match=f"{key_id(one)} is given twice"):
        read_api_keys(path)
    write_keys(path, entry(one, "a", requests_per_minute=1), entry(other, "a", requests_per_minute=2))
    with pytest.raises(ConfigError, match="`a` have different limits"):
        read_api_keys(path)


def test_nobody_is_let_in_by_an_empty_file_and_a_missing_one_is_a_fault(path: Path, clock: Clock) -> None:
    path.write_text("")
    refused(Gate(Access(api_keys=str(path)), clock), bearer(make_key()))
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Gate(Access(api_keys=str(path)), clock)


def test_the_command_makes_a_key_and_its_entry(path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("")
    for name in ("billing agent", "other"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["api-key", name, "--requests-per-minute", "60"])
        assert not ended.value.code
        printed = capsys.readouterr()
        key = printed.err.split()[0]
        assert key not in printed.out
        path.write_text(path.read_text() + printed.out)
        gate = Gate(Access(api_keys=str(path)), clock)
        assert gate.tenant(bearer(key)) == Tenant(name, Limits(requests_per_minute=60, concurrent_streams=64))


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"api_key": "/x"}, "did you mean `api_keys`"),
        ({"api_keys": "keys.yaml"}, "absolute path"),
        ({"jwt": {"jwks": "/x", "issuer": "i"}}, r"access\.jwt\.audience"),
        ({"jwt": {"jwks": "/x", "issuer": "i", "audience": "a", "plans": {"gold": {}}}}, "plan_claim"),
        (
            {
                "jwt": {
                    "jwks": "/x",
                    "issuer": "i",
                    "audience": "a",
                    "plan_claim": "p",
                    "plans": {"gold": {"tokens_per_minut": 1}},
                }
            },
            r"access\.jwt\.plans\.gold\.tokens_per_minut: unknown key; did you mean `tokens_per_minute`",
        ),
        ({"requests": {"max_stop_strings": 0}}, r"access\.requests\.max_stop_strings"),
    ],
)
def test_a_section_that_cannot_be(section: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse_config({"access": section}, "x.yaml")
