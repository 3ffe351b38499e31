"""Writes and reads a placement, for the controller that made it and for inspection by users.

It is kept in a ConfigMap of the job, one line per worker: too long for the status of a large job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec import ValidationError, convert

from tiercheck.protocol.plain_json import parse_json

_Workers = tuple[int, ...]
_ROOM = 900_000
"""Characters of the data. Leaves a margin below the 1 MiB that the API server allows."""


@dataclass(frozen=True)
class CodeGroup:
    """Workers by index. Block j of the members' artifacts lies at holders[j]; no holder is a member."""

    members: tuple[int, ...]
    """The members in coding order."""
    holders: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """All members and holders. As many of them as there are holders may be lost at once."""
        return self.members + self.holders


@dataclass(frozen=True)
class SavedMember:
    """A worker's pod at the time of the placement."""

    worker: int
    pod: str
    pod_uid: str
    incarnation: int
    node: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class SavedDomains:
    """Labels of the members' nodes, for users with access to the job but not to nodes."""

    keys: tuple[str, ...]
    """The label keys of the job's levels, widest first."""
    values: tuple[tuple[str, tuple[str, ...]], ...]
    """The label values by node, in the order of `keys`; empty where the node lacks the label."""

    def labels(self) -> dict[str, dict[str, str]]:
        """The labels by node."""
        return {
            node: {k: v for k, v in zip(self.keys, values, strict=True) if v} for node, values in self.values
        }


@dataclass(frozen=True)
class Replanning:
    """The state that re-planning keeps between reconciles. Times are unix seconds."""

    checked: str = ""
    """Digest of the last compared inputs; while it is unchanged, the placement is not compared again."""
    wish: str = ""
    """Digest of the moves to be made if they stay desirable for a while; empty: none."""
    since: float = 0.0
    """The time since which these moves have been desirable."""
    moved: float = 0.0
    """The time when moves last began."""


@dataclass(frozen=True)
class SavedPlacement:
    """The placement of `attempt`, as kept in a ConfigMap of the job."""

    attempt: int
    members: tuple[SavedMember, ...]
    groups: tuple[CodeGroup, ...] = ()
    """The code groups, with parity in place of copies."""
    domains: SavedDomains | None = None
    """The members' topology labels; None: not recorded."""
    leaving: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(worker, its holders that stop holding once the others are complete)."""
    replanning: Replanning = Replanning()

    def holders(self) -> dict[int, tuple[int, ...]]:
        """Returns the present holders by worker, including those that are about to stop."""
        return {member.worker: member.holders for member in self.members}

    def lasting(self) -> dict[int, tuple[int, ...]]:
        """Returns the holders by worker, without those that are about to stop."""
        gone = dict(self.leaving)
        return {
            member.worker: tuple(
                holder for holder in member.holders if holder not in gone.get(member.worker, ())
            )
            for member in self.members
        }

    def same_holders(self, other: SavedPlacement) -> bool:
        """Returns whether both placements require the same of every worker."""
        return (self.members, self.groups, self.leaving) == (other.members, other.groups, other.leaving)

    def with_holders(self, holders: Mapping[int, tuple[int, ...]]) -> SavedPlacement:
        """Returns the placement with other holders for these workers."""
        members = (
            replace(member, holders=holders.get(member.worker, member.holders)) for member in self.members
        )
        return replace(self, members=tuple(members))


def placement_name(job: str) -> str:
    """Returns the name of the job's placement ConfigMap."""
    return f"{job}-placement"


def placement_data(placement: SavedPlacement) -> dict[str, str]:
    """Renders a placement as the data of a ConfigMap, with one JSON list per line.

    `workers`: worker, pod, pod UID, incarnation, node, holders; `groups`, with parity: members, holders;
    `leaving`, while copies move: worker, holders that stop; `nodes`, if there is room: the keys of the
    levels' labels, then one line per node with its name and values. `replanning` is one JSON object."""
    data = {
        "attempt": str(placement.attempt),
        "workers": _lines(
            [m.worker, m.pod, m.pod_uid, m.incarnation, m.node, list(m.holders)] for m in placement.members
        ),
        "groups": _lines([list(group.members), list(group.holders)] for group in placement.groups),
        "leaving": _lines([worker, list(holders)] for worker, holders in placement.leaving),
        "replanning": json.dumps(asdict(placement.replanning), separators=(",", ":")),
    }
    if placement.domains is not None:
        known = placement.domains
        nodes = _lines([list(known.keys), *([node, list(values)] for node, values in known.values)])
        if sum(map(len, data.values())) + len(nodes) <= _ROOM:
            data["nodes"] = nodes
    return data


def read_placement_data(data: Mapping[str, str]) -> SavedPlacement:
    """Parses the data of `placement_data`. Raises ValueError for any other data."""
    try:
        members = convert(_rows(data["workers"]), list[tuple[int, str, str, int, str, _Workers]])
        groups = convert(_rows(data.get("groups")), list[tuple[_Workers, _Workers]])
        leaving = convert(_rows(data.get("leaving")), tuple[tuple[int, _Workers], ...])
        replanning = convert(parse_json(data.get("replanning") or "{}"), Replanning)
        keys, *nodes = _rows(data.get("nodes")) or [None]
        return SavedPlacement(
            int(data["attempt"]),
            tuple(SavedMember(*member) for member in members),
            tuple(CodeGroup(*group) for group in groups),
            None if keys is None else convert({"keys": keys, "values": nodes}, SavedDomains),
            leaving,
            replanning,
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, ValidationError) as error:
        raise ValueError(f"not a placement: {error}") from error


def _rows(text: str | None) -> list[Any]:
    return [parse_json(line) for line in (text or "").splitlines()]


def _lines(rows: Iterable[list[Any]]) -> str:
    return "\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
