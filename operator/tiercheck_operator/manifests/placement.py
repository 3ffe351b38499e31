"""The ConfigMap that holds who keeps whose copies or parity: one line per worker, too long for the status of a large job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tiercheck_operator.controller.observation import JobView, SavedMember, SavedPlacement
from tiercheck_operator.manifests import owned
from tiercheck_operator.planning.code_group import CodeGroup


def build_placement(job: JobView, placement: SavedPlacement) -> dict[str, Any]:
    """`data.workers` has one JSON list per line: worker, pod, pod UID, incarnation, node, holders; `data.groups`, with parity,
    one per group: members, holders.
    """
    lines = [
        json.dumps([m.worker, m.pod, m.pod_uid, m.incarnation, m.node, list(m.holders)], separators=(",", ":"))
        for m in placement.members
    ]
    groups = [
        json.dumps([list(group.members), list(group.holders)], separators=(",", ":")) for group in placement.groups
    ]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owned.metadata(job, owned.placement_name(job)),
        "data": {"attempt": str(placement.attempt), "workers": "\n".join(lines), "groups": "\n".join(groups)},
    }


def parse_placement(raw: Mapping[str, Any]) -> SavedPlacement:
    """Raises ValueError if it was not made by `build_placement`."""
    data = raw.get("data") or {}
    try:
        members = tuple(
            SavedMember(int(worker), str(pod), str(uid), int(incarnation), str(node), tuple(int(h) for h in holders))
            for worker, pod, uid, incarnation, node, holders in map(json.loads, data["workers"].splitlines())
        )
        groups = tuple(
            CodeGroup(tuple(int(member) for member in inside), tuple(int(holder) for holder in holders))
            for inside, holders in map(json.loads, (data.get("groups") or "").splitlines())
        )
        return SavedPlacement(int(data["attempt"]), members, groups)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a placement: {error}") from error
