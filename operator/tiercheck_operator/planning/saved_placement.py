"""How a placement is written down, so that the controller that made it and whoever looks at the job read the same thing.

It is kept in a ConfigMap of the job, one line per worker: too long for the status of a large job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck_operator.planning.code_group import CodeGroup


@dataclass(frozen=True)
class SavedMember:
    """A worker's pod when the placement was made."""

    worker: int
    pod: str
    pod_uid: str
    incarnation: int
    node: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class SavedPlacement:
    """The placement of `attempt`, as kept in a ConfigMap of the job."""

    attempt: int
    members: tuple[SavedMember, ...]
    groups: tuple[CodeGroup, ...] = ()
    """With parity in place of copies."""

    def holders(self) -> dict[int, tuple[int, ...]]:
        return {member.worker: member.holders for member in self.members}


def placement_name(job: str) -> str:
    """The ConfigMap of the job of that name."""
    return f"{job}-placement"


def placement_data(placement: SavedPlacement) -> dict[str, str]:
    """`workers` has one JSON list per line: worker, pod, pod UID, incarnation, node, holders; `groups`, with parity, one per
    group: members, holders.
    """
    return {
        "attempt": str(placement.attempt),
        "workers": _lines(
            [m.worker, m.pod, m.pod_uid, m.incarnation, m.node, list(m.holders)] for m in placement.members
        ),
        "groups": _lines([list(group.members), list(group.holders)] for group in placement.groups),
    }


def read_placement_data(data: Mapping[str, str]) -> SavedPlacement:
    """Raises ValueError if it was not made by `placement_data`."""
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


def _lines(rows: Iterable[list[Any]]) -> str:
    return "\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
