"""Reads from a job's spec what planning needs, with the CRD's defaults, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck_operator.model.quantity import parse_quantity
from tiercheck_operator.planning.parity.parity import ParityPolicy
from tiercheck_operator.planning.placement.placement import PlacementPolicy
from tiercheck_operator.planning.topology import Level, levels_from_spec, spread_level

SIZE_LIMIT = "8Gi"
REMOTE_EVERY = 500


@dataclass(frozen=True)
class Wanted:
    """What the user asks for."""

    workers: int
    procs_per_worker: int
    spares: int
    levels: tuple[Level, ...]
    level: str
    """The level that copies are spread over."""
    copies: int
    parity: tuple[int, int] | None
    """(data, parity), in place of copies."""
    required: bool
    size_limit: int
    """Bytes of a worker's memory volume."""
    state_size: int | None
    """Bytes of one rank's snapshot; None: not known before the job runs."""
    snapshot_every: int | None
    """Steps; None: chosen from the sizes."""
    deltas: bool
    remote_every: int | None
    """Steps; None: no remote tier."""

    @staticmethod
    def of(spec: Mapping[str, Any], found: tuple[Level, ...] | None = None) -> Wanted:
        """`found`: the levels of the Kueue Topology, if the spec names one. Raises ValueError with a sentence
        for what the CRD would refuse or planning cannot use.
        """
        workers = _whole(spec, "workers")
        if workers is None:
            raise ValueError("spec.workers is missing")
        topology, tiers = _part(spec, "topology"), _part(spec, "tiers")
        peer, remote = _part(tiers, "peer"), _part(tiers, "remote")
        spread, checkpoint = _part(peer, "spread"), _part(spec, "checkpoint")
        parity = _part(peer, "parity")
        copies = _whole(peer, "copies")
        if topology.get("kueueTopology") and found is None:
            raise ValueError(
                f"its levels are those of the Kueue Topology {topology['kueueTopology']}, which is not at "
                "hand; "
                "name them in topology.levels to plan without it"
            )
        levels = found or levels_from_spec(topology.get("preset"), topology.get("levels"))
        size = checkpoint.get("stateSize")
        return Wanted(
            workers=workers,
            procs_per_worker=_whole(spec, "procsPerWorker") or 1,
            spares=_whole(spec, "spares") or 0,
            levels=levels,
            level=spread_level(levels, spread.get("level")).name,
            copies=0 if parity else copies if copies is not None else int(workers > 1),
            parity=(int(parity["data"]), int(parity["parity"])) if parity else None,
            required=spread.get("mode") == "Required",
            size_limit=parse_quantity(_part(tiers, "local").get("sizeLimit") or SIZE_LIMIT),
            state_size=None if size is None else parse_quantity(size),
            snapshot_every=_whole(_part(checkpoint, "snapshot"), "everySteps"),
            deltas=_part(checkpoint, "delta").get("mode") != "None",
            remote_every=(_whole(remote, "everySteps") or REMOTE_EVERY) if remote else None,
        )

    @property
    def policy(self) -> PlacementPolicy | ParityPolicy:
        """As the controller asks the planner."""
        if self.parity is not None:
            return ParityPolicy(*self.parity, self.level, self.required)
        return PlacementPolicy(self.copies, self.level, self.required)


def _part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = raw.get(name)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} must be a mapping, and is {part!r}")
    return part


def _whole(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number, and is {value!r}")
    return value
