"""Defines the statements that the operator signs (Ed25519) and that sidecars verify.

The job's Secret holds the private key, which no pod mounts, and the public one, which every sidecar has. So
a compromised sidecar cannot send directives, and write access to the bucket is not enough to end an attempt.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER = "TierCheck-Operator"
"""The header with the signature of `pod_statement` in operator requests. Only that pod receives it."""


class SignedAttempt(NamedTuple):
    """An attempt that has begun, with the operator's signature of `attempt_statement` in hex."""

    attempt: int
    signature: str = ""


def pod_statement(pod_uid: str) -> bytes:
    """Returns the statement for one pod: that the operator calls its sidecar."""
    return f"tiercheck operator of pod {pod_uid}".encode()


def attempt_statement(job_uid: str, attempt: int) -> bytes:
    """Returns the statement for all pods: that this attempt of the job has begun."""
    return f"tiercheck attempt {attempt} of job {job_uid}".encode()
