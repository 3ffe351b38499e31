"""Issues and renews the webhook's certificate, and registers its authority with the API server.

The Secret is the only source. Every replica reads it regularly, creates it if it is missing, renews it when
two thirds of its lifetime are over, and writes its authorities into the webhook configuration. A renewed
Secret keeps the last authority too, and a replica serves a new certificate only after it has found the new
authority in the configuration, so that no call fails in between.
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Any

from cryptography import x509

from tiercheck_operator.config import WebhookConfig
from tiercheck_operator.kubernetes.api_server import SECRETS, ApiFailure, ApiResource
from tiercheck_operator.kubernetes.certificates import KeyPair, issue_pair
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.kubernetes.owned_objects import belonging

_CONFIGURATIONS = ApiResource(
    "admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False
)
_LIFETIME = datetime.timedelta(days=90)
_END = b"-----END CERTIFICATE-----\n"


def renew_when_due(current: KeyPair | None, hosts: Sequence[str], now: datetime.datetime) -> KeyPair | None:
    """Returns a replacement, with the last authority beside its own; None: `current` is valid for long."""
    if current is not None and _good(current, hosts, now):
        return None
    pair = issue_pair("tiercheck webhook", hosts, _LIFETIME, now)
    last = current.ca.partition(_END) if current is not None else (b"", b"", b"")
    return replace(pair, ca=pair.ca + last[0] + last[1])


def _good(bundle: KeyPair, hosts: Sequence[str], now: datetime.datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(bundle.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    left = certificate.not_valid_after_utc - now
    covered = {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
    return left > _LIFETIME / 3 and {_plain(host) for host in hosts} <= covered


def _plain(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host


class CertificateManager:
    """Keeps one replica's certificate current. If the settings name an issuer, the Secret is only read.
    `deployment`: namespace and name of the operator's Deployment."""

    def __init__(
        self, kube: Kube, settings: WebhookConfig, deployment: tuple[str, str] | None = None
    ) -> None:
        self._kube, self._deployment = kube, deployment
        self._secret, self._configuration = settings.secret, settings.configuration
        self._hosts, self._issuer = settings.hosts, settings.issuer

    async def establish(self, now: datetime.datetime) -> tuple[KeyPair, bool]:
        """Returns the key pair, and whether its authority was configured already. Raises ApiFailure."""
        namespace, name = self._secret
        raw = await self._kube.find(SECRETS, namespace, name)
        current = None if raw is None else _parsed(raw)
        if self._issuer and current is None:
            raise ApiFailure(
                404, f"{self._issuer} has not made the Secret {namespace}/{name} yet, or lacks ca.crt in it"
            )
        wanted = None if self._issuer else renew_when_due(current, self._hosts, now)
        if wanted is not None:
            body = _secret(namespace, name, wanted)
            if raw is None:
                if self._deployment is not None:
                    owner = partial(belonging, self._kube.server, *self._deployment)
                    body["metadata"] |= await self._kube.run(owner)
                await self._kube.create(SECRETS, namespace, body)
            else:
                # With the version that was read: of two replicas one fails here, and later uses the other's.
                kept = ("resourceVersion", "ownerReferences")
                body["metadata"] |= {key: raw["metadata"][key] for key in kept if key in raw["metadata"]}
                await self._kube.replace(SECRETS, namespace, name, body)
        bundle = wanted or current
        assert bundle is not None
        return bundle, await self._announced(bundle)

    async def _announced(self, bundle: KeyPair) -> bool:
        """Writes the bundle's authorities to the configuration. Returns whether they were there already."""
        raw = await self._kube.find(_CONFIGURATIONS, None, self._configuration)
        if raw is None:
            raise ApiFailure(404, f"there is no MutatingWebhookConfiguration {self._configuration}")
        text = base64.b64encode(bundle.ca).decode()
        stale = [
            hook
            for hook in raw.get("webhooks") or []
            if (hook.get("clientConfig") or {}).get("caBundle") != text
        ]
        if not stale:
            return True
        for hook in stale:
            hook["clientConfig"]["caBundle"] = text
        await self._kube.replace(_CONFIGURATIONS, None, self._configuration, raw)
        return False


def _secret(namespace: str, name: str, bundle: KeyPair) -> dict[str, Any]:
    data = {"ca.crt": bundle.ca, "tls.crt": bundle.certificate, "tls.key": bundle.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "tiercheck"},
        },
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def _parsed(raw: Mapping[str, Any]) -> KeyPair | None:
    """Parses the Secret; None if it is not usable and must be replaced."""
    data = raw.get("data") or {}
    try:
        parts = [base64.b64decode(data[key], validate=True) for key in ("ca.crt", "tls.crt", "tls.key")]
    except (KeyError, binascii.Error):
        return None
    return KeyPair(*parts)
