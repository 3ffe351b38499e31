"""A kubelet is heard of when its lease changes, whatever the node's clock says."""

from __future__ import annotations

from typing import Any, cast

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.cluster_facts import NodeLeases

NOW = 1_800_000_000.0
RIGHT, BEHIND, AHEAD = "2027-01-15T07:59:55.000000Z", "2027-01-15T07:00:00Z", "2027-01-15T09:00:00Z"
"""By the node's clock, where it is 2027-01-15T08:00:00Z."""


class Leases:
    def __init__(self, **renewed: str) -> None:
        self.renewed = renewed

    async def get(self, path: str, *, name: str) -> dict[str, Any] | None:
        if name == "forbidden":
            raise ApiFailure(403, "forbidden")
        return {"spec": {"renewTime": self.renewed[name]}} if name in self.renewed else None


async def test_lease_counts_by_its_own_time_first_and_then_by_when_it_was_seen_to_change() -> None:
    server = Leases(right=RIGHT, behind=BEHIND, ahead=AHEAD)
    leases, nodes = NodeLeases(cast(Kube, server)), ("right", "behind", "ahead", "gone", "forbidden")
    first = await leases.heard(nodes, NOW)
    assert first == {"right": NOW - 5, "behind": NOW - 3600, "ahead": NOW}
    assert await leases.heard(nodes, NOW + 20) == first, "nothing was renewed"
    server.renewed["behind"] = "2027-01-15T07:00:10Z"
    assert (await leases.heard(nodes, NOW + 30))["behind"] == NOW + 30
