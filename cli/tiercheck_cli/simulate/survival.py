"""Says fast which lost workers have their state elsewhere in memory.

The planner's own stock is asked once for each shape of a loss, fast enough for a hundred thousand losses.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Share, Version
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.placement.placement import Placement
from tiercheck_operator.planning.recovery.availability import Availability
from tiercheck_operator.planning.recovery.inventory import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    RestoreSeconds,
    decide_recovery,
)

_HISTORY = History((Branch(1, 0),))
_SOME = Version(1, 1)
_KEPT = Artifacts(snapshots=frozenset({_SOME}))
_NO_REMOTE = RemoteInventory(configured=False)


class Survival:
    """Of one placement."""

    def __init__(self, placement: Placement) -> None:
        self._holders = placement.holders
        self._group: dict[int, CodeGroup] = {
            member: group for group in placement.groups for member in group.members
        }

    def in_memory(self, lost: Collection[int], empty: Collection[int]) -> bool:
        """Whether every lost worker's state can be had from peers. `empty` are workers that keep nothing for
        others (yet)."""
        seen: set[tuple[int, ...]] = set()
        for worker in lost:
            group = self._group.get(worker)
            if group is None:
                if not any(holder not in lost and holder not in empty for holder in self._holders[worker]):
                    return False
            elif group.members not in seen:
                seen.add(group.members)
                gone = tuple(index for index, member in enumerate(group.members) if member in lost)
                blocks = tuple(
                    index
                    for index, keeper in enumerate(group.holders)
                    if keeper not in lost and keeper not in empty
                )
                if not _decodable(len(group.members), gone, blocks):
                    return False
        return True


@lru_cache(maxsize=4096)
def _decodable(members: int, gone: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    """Whether a group of that many members can be rebuilt without those, from those blocks."""
    share = tuple(range(members))
    inventories = [JobInventory(worker, {worker: _KEPT}) for worker in share if worker not in gone]
    inventories += [JobInventory(members + index, blocks={Share(index, share): _KEPT}) for index in blocks]
    return not Availability(members, 1, _HISTORY, inventories, _NO_REMOTE).lacking(_SOME)


@lru_cache(maxsize=65536)
def find_fallback(
    *,
    lost: bool,
    survives: bool,
    own: int,
    peer: int | None,
    remote: int | None,
    step_seconds: float,
    restore: RestoreSeconds,
) -> tuple[Tier, int] | None:
    """The tier and the steps lost that a recovery decides on; None: from scratch.

    `own`, `peer` and `remote` are how many steps behind the newest each tier is; None: it has nothing. One
    worker stands for those that are well and one for those that are lost, because the decision asks of each
    rank only what it can rebuild.
    """
    newest = 1 + max(own, peer or 0, remote or 0)
    history, survivor, victim = _HISTORY, 0, 1
    held = {Version(newest - own, 1)} | (set() if peer is None else {Version(newest - peer, 1)})
    copy = Artifacts(snapshots=frozenset() if peer is None else frozenset({Version(newest - peer, 1)}))
    mine = Artifacts(snapshots=frozenset(held))
    inventories = [JobInventory(survivor, {survivor: mine}, {victim: copy} if survives else {})]
    if not lost:
        inventories.append(JobInventory(victim, {victim: mine}))
    stored = frozenset() if remote is None else frozenset({Version(newest - remote, 1)})
    decision = decide_recovery(
        RecoveryProblem(
            ranks=2,
            ranks_per_worker=1,
            history=history,
            inventories=inventories,
            remote=RemoteInventory(remote is not None, True, stored),
            step_seconds=step_seconds,
            last_step=newest,
            restore_seconds=restore,
        )
    )
    if not isinstance(decision, Recover):
        return None
    return [tier for tier in Tier if tier in decision.tier_counts][-1], decision.lost_steps
