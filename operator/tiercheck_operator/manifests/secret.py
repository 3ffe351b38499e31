"""The job's Secret: what proves to a sidecar that a caller belongs to this job, and to a caller that the sidecar does."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from tiercheck_operator.manifests import owned
from tiercheck_operator.model.observed import JobView


@dataclass(frozen=True)
class Credentials:
    """PEM texts and the bearer token of one job. Made once by `credentials.issue`."""

    ca: bytes
    certificate: bytes
    key: bytes
    token: str


def build_secret(job: JobView, credentials: Credentials) -> dict[str, Any]:
    data = {
        "ca.crt": credentials.ca,
        "tls.crt": credentials.certificate,
        "tls.key": credentials.key,
        "token": credentials.token.encode(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": owned.metadata(job, owned.credentials_name(job)),
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def parse_secret(secret: dict[str, Any]) -> Credentials:
    """Raises ValueError if a part is missing or not base64."""
    data = secret.get("data") or {}
    try:
        parts = {
            name: base64.b64decode(data[name], validate=True) for name in ("ca.crt", "tls.crt", "tls.key", "token")
        }
    except (KeyError, binascii.Error) as error:
        raise ValueError(f"not a credentials Secret of a job: {error}") from error
    return Credentials(parts["ca.crt"], parts["tls.crt"], parts["tls.key"], parts["token"].decode())
