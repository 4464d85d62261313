"""cert-manager's objects: the fields of its API that are used, and that replicas take what they ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cryptography.x509 import ExtendedKeyUsageOID

from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from rpc.security import MutualTls, Role
from tests.k8s.manifests import OVERLAYS, Manifest, Pod, built, of_kind, pods, ray_service
from tests.rpc.authority import Authority, put

HOURS = {"type": "string", "pattern": r"^[1-9]\d*h$"}


def closed(**properties: Any) -> dict[str, Any]:
    """An object that has these fields, all of them, and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def either(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": list(schemas)}


NAME = {"type": "string", "pattern": "^outrider-[a-z-]+$"}
KEY = closed(algorithm={"const": "ECDSA"}, size={"enum": [256, 384, 521]}, rotationPolicy={"enum": ["Never", "Always"]})
ISSUER_REF = closed(group={"const": "cert-manager.io"}, kind={"enum": ["Issuer", "ClusterIssuer"]}, name=NAME)
COMMON = {"secretName": NAME, "privateKey": KEY, "duration": HOURS, "renewBefore": HOURS, "issuerRef": ISSUER_REF}
USAGES = {"type": "array", "items": {"enum": ["digital signature", "client auth", "server auth"]}, "uniqueItems": True}
DNS_NAMES = {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": r"^[a-z0-9.-]+$"}}
SPECS = {
    "Issuer": either(closed(selfSigned=closed()), closed(ca=closed(secretName=NAME))),
    "Certificate": either(
        closed(**COMMON, isCA={"const": True}, commonName={"type": "string", "maxLength": 64, "minLength": 1}),
        closed(**COMMON, dnsNames=DNS_NAMES, usages=USAGES),
    ),
}
"""The part of cert-manager.io/v1 that is used: its CRDs are another project's, and none is here to ask."""
USAGE_IDS = {"client auth": ExtendedKeyUsageOID.CLIENT_AUTH, "server auth": ExtendedKeyUsageOID.SERVER_AUTH}


def configuration(overlay: str) -> OutriderConfig:
    (application,) = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])["applications"]
    return parse_config(application["args"]["config"], overlay)


SECURED = [overlay for overlay in OVERLAYS if overlay != "demo-cpu"]


@pytest.fixture(params=SECURED)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


def objects(overlay: str) -> tuple[Manifest, ...]:
    return built(f"overlays/{overlay}")


def certificates(overlay: str) -> dict[str, Manifest]:
    """Of replicas, by the Secret that holds them."""
    specs = [each["spec"] for each in of_kind(objects(overlay), "Certificate")]
    return {spec["secretName"]: spec for spec in specs if not spec.get("isCA")}


def secrets_mounted(pod: Pod) -> dict[str, str]:
    """Folder by name of the Secret, in each container of a Pod."""
    secrets = {each["name"]: each["secret"]["secretName"] for each in pod.spec.get("volumes", ()) if "secret" in each}
    mounts = [
        mount for container in pod.containers for mount in container.get("volumeMounts", ()) if mount["name"] in secrets
    ]
    assert all(mount["readOnly"] for mount in mounts)
    return {secrets[mount["name"]]: mount["mountPath"] for mount in mounts}


def worker(overlay: str, role: Role) -> Pod:
    (pod,) = (pod for pod in pods(objects(overlay)) if pod.name == role)
    return pod


def test_fields_are_those_of_cert_managers_api(overlay: str) -> None:
    for kind, spec in SPECS.items():
        schema = closed(
            apiVersion={"const": "cert-manager.io/v1"},
            kind={"const": kind},
            metadata=closed(name=NAME, namespace={"const": "outrider"}),
            spec=spec,
        )
        found = of_kind(objects(overlay), kind)
        assert found
        for each in found:
            jsonschema.validate(each, schema)


def test_certificates_have_an_issuer_and_time_to_be_renewed(overlay: str) -> None:
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects(overlay), "Issuer")}
    specs = [each["spec"] for each in of_kind(objects(overlay), "Certificate")]
    authorities = {spec["secretName"] for spec in specs if spec.get("isCA")}
    for spec in specs:
        issuer = issuers[spec["issuerRef"]["name"]]
        assert ("selfSigned" in issuer) == bool(spec.get("isCA"))
        assert "selfSigned" in issuer or issuer["ca"]["secretName"] in authorities
        lasts, margin = (int(re.sub("h$", "", spec[field])) for field in ("duration", "renewBefore"))
        assert 7 * 24 <= margin <= lasts / 2
        assert spec["privateKey"]["rotationPolicy"] == ("Never" if spec.get("isCA") else "Always")


@pytest.mark.parametrize("role", Role)
def test_every_kind_of_pod_finds_its_own_certificate_where_it_looks(overlay: str, role: Role) -> None:
    tls = configuration(overlay).tls
    assert tls is not None
    mounted = secrets_mounted(worker(overlay, role))
    (secret,) = mounted.keys() & certificates(overlay).keys()
    assert mounted[secret] == tls.folder
    assert certificates(overlay)[secret]["dnsNames"] == [f"{role}.{tls.domain}"]


@pytest.mark.parametrize("role", Role)
def test_a_replica_takes_what_an_authority_makes_of_the_manifest(overlay: str, role: Role, tmp_path: Path) -> None:
    (secret,) = secrets_mounted(worker(overlay, role)).keys() & certificates(overlay).keys()
    spec, authority = certificates(overlay)[secret], Authority()
    usages = [USAGE_IDS[usage] for usage in spec["usages"] if usage in USAGE_IDS]
    assert len(usages) == 1
    put(tmp_path, authority.issue(*spec["dnsNames"], usages=usages), authority.certificate)
    MutualTls(tmp_path, role)


def test_nobody_gets_a_certificate_of_another_kind_or_the_authoritys_key(overlay: str) -> None:
    everybody = [secret for pod in pods(objects(overlay)) for secret in secrets_mounted(pod) if "-tls" in secret]
    assert sorted(everybody) == sorted(certificates(overlay))
    assert not any("outrider-ca" in secrets_mounted(pod) for pod in pods(objects(overlay)))


def test_the_demo_needs_no_cert_manager() -> None:
    assert configuration("demo-cpu").tls is None
    assert not of_kind(objects("demo-cpu"), "Certificate")
