"""The operator's keys of the tests' jobs, and what it signs with them."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tiercheck.protocol import signing
from tiercheck.protocol.signing import SignedAttempt

_KEY = Ed25519PrivateKey.from_private_bytes(b"the key of the tests' operator.."[:32])
PUBLIC = _KEY.public_key().public_bytes_raw()


def sign_pod(pod_uid: str) -> dict[str, str]:
    """Returns the header by which the pod's sidecar knows the operator."""
    return {signing.HEADER: _KEY.sign(signing.pod_statement(pod_uid)).hex()}


def sign_attempt(job_uid: str, attempt: int) -> SignedAttempt:
    return SignedAttempt(attempt, _KEY.sign(signing.attempt_statement(job_uid, attempt)).hex())
