"""A job's first attempt may begin from what an earlier job of the same name left in the remote tier.

Its versions carry the earlier job's attempts, so that line is taken over, and our attempts are counted on from there: nothing
that we write can be mistaken for what is already stored.
"""

from __future__ import annotations

from dataclasses import replace

from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.planning.inventory import RemoteInventory


def adopted_history(remote: RemoteInventory, step: int | None) -> History:
    """The history that accepts the version to begin from; empty if the remote tier holds none.

    `step`: the one that the user asked for. Among versions of the same step, and for the newest one, the later attempt
    counts: the earlier one was rolled back.
    """
    usable: list[Version] = [version for version in remote.usable if step is None or version.step == step]
    if not usable:
        return History()
    chosen = max(usable, key=lambda version: (version.attempt, version.step))
    return History((Branch(chosen.attempt, 0, remote.ranks.get(chosen, 0)),))


def with_ranks(history: History, remote: RemoteInventory, ranks: int) -> History:
    """With the numbers of ranks that were not written down: as the remote tier says, or `ranks`."""
    told = {version.attempt: count for version, count in remote.ranks.items()}
    return History(
        tuple(
            branch if branch.ranks else replace(branch, ranks=told.get(branch.attempt, ranks))
            for branch in history.branches
        )
    )


def last_attempt(remote: RemoteInventory) -> int:
    """The newest attempt that left anything in the remote tier; 0: none did."""
    return max((version.attempt for version in remote.usable), default=0)
