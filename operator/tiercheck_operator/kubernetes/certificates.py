"""Issues certificates that need no management, and the credentials of a job.

An authority signs one certificate. Its key is never stored, so not even the operator can issue a second one
under it.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tiercheck.protocol.names import TLS_SERVER_NAME
from tiercheck_operator.manifests.owned import Credentials

_CLOCK_SKEW = datetime.timedelta(days=365)
"""Covers nodes whose clocks are behind the issuer's: a certificate that is not valid yet there would cut a
worker off. One that was valid earlier gives nothing away, because its key did not exist."""


@dataclass(frozen=True)
class KeyPair:
    """PEM texts: the authority (or authorities), and the certificate and key of a server."""

    ca: bytes
    certificate: bytes
    key: bytes


def issue_pair(
    authority: str, hosts: Sequence[str], lifetime: datetime.timedelta, now: datetime.datetime | None = None
) -> KeyPair:
    """Issues a new pair. `authority`: its common name. `hosts`: one or more DNS names or IP addresses."""
    now = now or datetime.datetime.now(datetime.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, authority)])
    root = (
        _builder(authority_name, authority_name, authority_key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    server_key = ec.generate_private_key(ec.SECP256R1())
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    server = (
        _builder(server_name, authority_name, server_key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    return KeyPair(
        ca=root.public_bytes(serialization.Encoding.PEM),
        certificate=server.public_bytes(serialization.Encoding.PEM),
        key=server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


_LIFETIME = datetime.timedelta(days=3650)


def issue(job_uid: str) -> Credentials:
    """Creates new, random credentials for one job."""
    pair = issue_pair(f"tiercheck job {job_uid}", [TLS_SERVER_NAME], _LIFETIME)
    operator = Ed25519PrivateKey.generate()
    return Credentials(
        ca=pair.ca,
        certificate=pair.certificate,
        key=pair.key,
        token=secrets.token_urlsafe(32),
        operator_key=operator.private_bytes_raw(),
        operator_public=operator.public_key().public_bytes_raw(),
    )
