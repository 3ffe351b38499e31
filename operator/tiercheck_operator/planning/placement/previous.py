"""Says what a placement that is already there is worth, in the words of one that is being made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.parity.parity_tolerance import fits, parity_tolerated
from tiercheck_operator.planning.placement.goals import tolerated
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.placement.problem import PlacementProblem, WorkerSite
from tiercheck_operator.planning.topology import Topology


def existing_placement(
    sites: Sequence[WorkerSite],
    topology: Topology,
    holders: Mapping[int, tuple[int, ...]],
    groups: Sequence[CodeGroup] = (),
    requested_level: str | None = None,
) -> Placement:
    """Tolerance and all else are computed anew from who holds what, so that they are right whoever made it
    and however the nodes are labelled by now. Raises ValueError if `sites` are not the workers 0..n-1.
    """
    copies = max((len(kept) for kept in holders.values()), default=0)
    ground = PlacementProblem.of(sites, topology, copies, None, frozenset())
    kept = tuple(tuple(holders.get(worker, ())) for worker in range(ground.workers))
    last = len(ground.levels) - 1
    if groups:
        parity = max(len(group.holders) for group in groups)
        parted = [
            all(len(g.holders) == parity and fits(ground, level, g) for g in groups)
            for level in range(last + 1)
        ]
        unprotected = {
            member
            for group in groups
            if len(group.holders) < parity or not fits(ground, last, group)
            for member in group.members
        } | (set(range(ground.workers)) - {member for group in groups for member in group.members})
        levels, sentences = parity_tolerated(ground, groups)
        digest = json.dumps([(group.members, group.holders) for group in groups])
    else:
        parted = [
            copies > 0
            and all(
                len(kept[worker]) == copies
                and all(ground.apart(level, worker, holder) for holder in kept[worker])
                for worker in range(ground.workers)
            )
            for level in range(last + 1)
        ]
        unprotected = {
            worker
            for worker in range(ground.workers)
            if len(kept[worker]) < copies
            or all(ground.node[holder] == ground.node[worker] for holder in kept[worker])
        }
        levels, sentences = tolerated(ground, kept)
        digest = json.dumps(kept)
    start = ground.levels.index(requested_level) if requested_level in ground.levels else 0
    return Placement(
        holders=kept,
        requested_level=requested_level,
        achieved_level=next(
            (ground.levels[level] for level in range(start, last + 1) if parted[level]), None
        ),
        unprotected=tuple(sorted(unprotected)),
        tolerates=sentences,
        tolerated_levels=levels,
        digest=hashlib.sha256(digest.encode()).hexdigest()[:12],
        reason="",
        groups=tuple(groups),
    )
