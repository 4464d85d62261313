"""Certificate files: what cannot be used is named, and what changes is read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from engine.errors import InvalidArgument
from rpc import certificates
from rpc.certificates import CertificateFiles
from tests.rpc.authority import CLIENT, SERVER, Authority, Issued, put

NAME = "router.outrider"
OURS, OTHERS = Authority(), Authority("others")


def files_of(folder: Path) -> CertificateFiles:
    return CertificateFiles(folder, NAME, calls=True)


def encrypted(issued: Issued) -> Issued:
    key = serialization.load_pem_private_key(issued.key, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    return Issued(issued.chain, locked)


GOOD = OURS.issue(NAME)
FAULTS = {
    "expired": (
        OURS.issue(NAME, days=-1),
        "tls.crt: found 'a certificate that others refuse: certificate has expired'",
    ),
    "of another authority": (OTHERS.issue(NAME), "refuse: unable to get local issuer certificate'"),
    "vouching for itself": (OURS.issue(NAME, self_signed=True), "refuse: self-signed certificate'"),
    "only for servers": (OURS.issue(NAME, usages=[SERVER]), "refuse: unsuitable certificate purpose'"),
    "for a draft": (
        OURS.issue("draft.outrider"),
        "tls.crt: found 'a certificate for draft.outrider', allowed is one for r",
    ),
    "for everybody": (
        OURS.issue("*.outrider"),
        "tls.crt: found 'a certificate for *.outrider', allowed is one for router",
    ),
    "for nobody": (
        OURS.issue(),
        "tls.crt: found 'a certificate without a DNS name', allowed is one for router.outrider",
    ),
    "with another's key": (
        Issued(GOOD.chain, OURS.issue(NAME).key),
        "tls.crt: found 'what makes no pair with tls.key: ",
    ),
    "with a locked key": (encrypted(GOOD), "tls.crt: found 'what makes no pair with tls.key: "),
    "not PEM": (Issued(b"nonsense", GOOD.key), "tls.crt: found 'what makes no pair with tls.key: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_certificate_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    issued, expected = FAULTS[fault]
    with pytest.raises(InvalidArgument) as refused:
        files_of(put(tmp_path, issued, OURS.certificate))
    assert expected in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (put(tmp_path, GOOD, OURS.certificate) / name).unlink()
    with pytest.raises(InvalidArgument, match=f"{name}: found 'No such file or directory', allowed is a file"):
        files_of(tmp_path)


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"ca\.crt: found '\w+', allowed is certificates in PEM"):
        files_of(put(tmp_path, GOOD, b"nonsense"))


@pytest.mark.parametrize(("usage", "calls"), [(CLIENT, True), (SERVER, False)])
def test_a_process_needs_no_more_usages_than_its_side_of_a_call(tmp_path: Path, usage: object, calls: bool) -> None:
    put(tmp_path, OURS.issue(NAME, usages=[usage]), OURS.certificate)
    CertificateFiles(tmp_path, NAME, calls=calls)
    with pytest.raises(InvalidArgument, match="unsuitable certificate purpose"):
        CertificateFiles(tmp_path, NAME, calls=not calls)


def test_what_does_not_change_is_read_once(tmp_path: Path) -> None:
    files = files_of(put(tmp_path, GOOD, OURS.certificate))
    assert files.current() is files.current()


def test_a_renewed_certificate_is_taken(tmp_path: Path) -> None:
    files, renewed = files_of(put(tmp_path, GOOD, OURS.certificate)), OURS.issue(NAME, days=2)
    before = files.current()
    put(tmp_path, renewed, OURS.certificate)
    now = files.current()
    assert (now.chain, now.key) == (renewed.chain, renewed.key)
    assert now.expires_at - before.expires_at == pytest.approx(86400, abs=3600)


def test_broken_new_files_leave_the_old_certificate_in_use_and_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(put(tmp_path, GOOD, OURS.certificate))
    put(tmp_path, FAULTS["expired"][0], OURS.certificate)
    assert [files.current().chain for _ in range(3)] == [GOOD.chain] * 3
    (line,) = caplog.messages
    assert line.startswith("the certificate in use stays, because the new one cannot be used: ")
    assert "certificate has expired" in line
    assert "\n" not in line
    (tmp_path / "tls.key").unlink()
    assert files.current().chain == GOOD.chain
    assert "tls.key: found 'No such file or directory'" in caplog.messages[1]
    put(tmp_path, renewed := OURS.issue(NAME), OURS.certificate)
    assert files.current().chain == renewed.chain


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.ERROR)
    files, shown_to = files_of(put(tmp_path, GOOD, OURS.certificate)), certificates._shown_to
    newest = OURS.issue(NAME)

    def overtaken(*contexts):
        monkeypatch.setattr(certificates, "_shown_to", shown_to)
        put(tmp_path, newest, OURS.certificate)
        return shown_to(*contexts)

    monkeypatch.setattr(certificates, "_shown_to", overtaken)
    put(tmp_path, OURS.issue(NAME), OURS.certificate)
    assert files.current().chain == GOOD.chain
    assert files.current().chain == newest.chain
    assert caplog.messages == []


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    certificate = files_of(put(tmp_path, GOOD, OURS.certificate)).current()
    assert "PRIVATE" not in repr(certificate)
