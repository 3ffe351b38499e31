"""Names what only the operator can say, and others must be able to check: it signs, by Ed25519.

The job's Secret holds the private key, which no pod mounts, and the public one, which every sidecar has. So
a sidecar that was taken over gives no directives, and nobody who can write the bucket ends an attempt.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER = "TierCheck-Operator"
"""Of each request of the operator: its signature of `pod_statement`. Only that pod ever sees it."""


class SignedAttempt(NamedTuple):
    """An attempt that has begun, and the operator's signature of `attempt_statement`, in hex."""

    attempt: int
    signature: str = ""


def pod_statement(pod_uid: str) -> bytes:
    """Returns what is signed for one pod: that its sidecar is called by the operator."""
    return f"tiercheck operator of pod {pod_uid}".encode()


def attempt_statement(job_uid: str, attempt: int) -> bytes:
    """Returns what is signed for all: that this attempt of the job has begun."""
    return f"tiercheck attempt {attempt} of job {job_uid}".encode()
