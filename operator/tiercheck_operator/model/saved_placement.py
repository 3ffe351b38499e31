"""Writes and reads a placement, for the controller that made it and whoever looks at the job.

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
"""Characters of a ConfigMap that is far from the 1 MiB which the API server allows."""


@dataclass(frozen=True)
class CodeGroup:
    """Workers by index. Block j of the members' artifacts lies at holders[j]; no holder is a member."""

    members: tuple[int, ...]
    """In coding order."""
    holders: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """All that the group rests on. As many of them as it has holders may be lost at once."""
        return self.members + self.holders


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
class SavedDomains:
    """Labels of the members' nodes, for whoever looks at the job and may not read nodes."""

    keys: tuple[str, ...]
    """Of the job's levels, widest first."""
    values: tuple[tuple[str, tuple[str, ...]], ...]
    """By node, in their order; empty where the node's labels do not say."""

    def labels(self) -> dict[str, dict[str, str]]:
        """By node, as the nodes had them."""
        return {
            node: {k: v for k, v in zip(self.keys, values, strict=True) if v} for node, values in self.values
        }


@dataclass(frozen=True)
class Replanning:
    """What re-planning has to remember. Times are unix seconds."""

    checked: str = ""
    """Digest of what the placement was last compared with; while that is the same, nothing is decided."""
    wish: str = ""
    """Digest of the moves that would be made, if they are still wanted in a while; empty: none."""
    since: float = 0.0
    """Since when."""
    moved: float = 0.0
    """When moves last began."""


@dataclass(frozen=True)
class SavedPlacement:
    """The placement of `attempt`, as kept in a ConfigMap of the job."""

    attempt: int
    members: tuple[SavedMember, ...]
    groups: tuple[CodeGroup, ...] = ()
    """With parity in place of copies."""
    domains: SavedDomains | None = None
    """Where the nodes stood; None: not written down."""
    leaving: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(worker, those of its holders that stop when the others are complete)."""
    replanning: Replanning = Replanning()

    def holders(self) -> dict[int, tuple[int, ...]]:
        """Everybody who keeps copies now."""
        return {member.worker: member.holders for member in self.members}

    def lasting(self) -> dict[int, tuple[int, ...]]:
        """Without those that are about to stop."""
        gone = dict(self.leaving)
        return {
            member.worker: tuple(
                holder for holder in member.holders if holder not in gone.get(member.worker, ())
            )
            for member in self.members
        }

    def same_holders(self, other: SavedPlacement) -> bool:
        """Whether the two ask the same of every worker."""
        return (self.members, self.groups, self.leaving) == (other.members, other.groups, other.leaving)

    def with_holders(self, holders: Mapping[int, tuple[int, ...]]) -> SavedPlacement:
        """With other holders for these workers."""
        members = (
            replace(member, holders=holders.get(member.worker, member.holders)) for member in self.members
        )
        return replace(self, members=tuple(members))


def placement_name(job: str) -> str:
    """The ConfigMap of the job of that name."""
    return f"{job}-placement"


def placement_data(placement: SavedPlacement) -> dict[str, str]:
    """`workers` has one JSON list per line: worker, pod, pod UID, incarnation, node, holders; `groups`, with
    parity, one per group: members, holders; `leaving`, while copies move: worker, holders that stop;
    `replanning` is one JSON object; `nodes`, as far as there is room, the keys of the levels' labels, and
    then one per node: node, values."""
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
    """Raises ValueError if it was not made by `placement_data`."""
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
