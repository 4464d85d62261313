"""Certificates as an authority makes them, and the folders that hold them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)
CLIENT, SERVER = x509.ExtendedKeyUsageOID.CLIENT_AUTH, x509.ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM."""

    chain: bytes
    key: bytes


class Authority:
    """Signs certificates; itself with a key of its own."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        builder = _builder(self._name, self._name, self._key.public_key())
        made = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def issue(
        self,
        *names: str,
        days: float = 1.0,
        usages: Sequence[x509.ObjectIdentifier] = (CLIENT, SERVER),
        self_signed: bool = False,
    ) -> Issued:
        """A certificate for DNS names, valid from two days ago to `days` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _common_name("process")
        issuer, signing_key = (subject, key) if self_signed else (self._name, self._key)
        builder = _builder(issuer, subject, key.public_key(), days)
        if names:
            alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternative, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        chain = builder.sign(signing_key, hashes.SHA256()).public_bytes(_PEM)
        private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Issued(chain, private)


def put(folder: Path, issued: Issued, authorities: bytes) -> Path:
    """Makes `folder` hold them the way the kubelet does: all three change in one moment, by one link. Returns it."""
    version = folder / f"..{sum(1 for each in folder.glob('..[0-9]*')) if folder.exists() else 0}"
    version.mkdir(parents=True)
    for name, content in (("tls.crt", issued.chain), ("tls.key", issued.key), ("ca.crt", authorities)):
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    (folder / "..new").symlink_to(version.name)
    os.replace(folder / "..new", folder / "..data")
    return folder


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float = 1.0
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - 2 * _DAY, now + days * _DAY)
