"""What a job's own labels and annotations tell Kueue, handed on to each of its pods, spares and replacements included.

Each pod is a workload of its own there. Kueue's pod groups are not used: they remove pods beyond the group's count, which a
spare and the replacement of a pod that is about to leave are, and refuse pods that differ, which one that avoids a node does.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "kueue.x-k8s.io/"
_OF_GROUPS = ("pod-group-", "retriable-in-group", "role-hash")


def handed_on(given: Mapping[str, object] | None) -> dict[str, str]:
    """Those of Kueue, without what makes a pod group."""
    return {
        key: str(value)
        for key, value in (given or {}).items()
        if key.startswith(PREFIX) and not key.removeprefix(PREFIX).startswith(_OF_GROUPS)
    }
