"""The Lease object: what is read from it and written to it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from tiercheck_operator.election.candidate import Record

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def parse_lease(raw: Mapping[str, Any]) -> Record:
    """Tolerant: whatever is missing counts as not held."""
    spec = raw.get("spec") or {}
    return Record(
        holder=str(spec.get("holderIdentity") or ""),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        mark=str(spec.get("renewTime") or ""),
    )


def build_lease(
    name: str,
    namespace: str,
    before: Mapping[str, Any] | None,
    *,
    holder: str,
    duration: float,
    now: datetime.datetime,
    belonging: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The lease held by `holder` (empty: released), in place of `before`, whose resourceVersion is the precondition.

    `now` is only for people, and to make each renewal differ from the last one. `belonging`: metadata of a new one.
    """
    old = (before or {}).get("spec") or {}
    same = before is not None and holder == (old.get("holderIdentity") or "")
    stamp = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    metadata |= (belonging or {}) if before is None else before["metadata"]
    transitions = int(old.get("leaseTransitions") or 0)
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            # The shortest there is, for a lease that was given back.
            "leaseDurationSeconds": math.ceil(duration) if holder else 1,
            "acquireTime": old.get("acquireTime") if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions if before is None or same or not holder else transitions + 1,
        },
    }
