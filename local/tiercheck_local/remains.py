"""What a cluster may leave on the machine, and how to remove all of it: processes by their marker, folders by their name."""

from __future__ import annotations

import shutil
from pathlib import Path

from tiercheck_local import markers

MEMORY_FILE_SYSTEM = Path("/dev/shm")
SCRATCH = Path("/tmp")
"""Not the temporary folder that the environment names: Unix sockets in it need short paths."""


def folders(cluster: str) -> tuple[Path, Path]:
    """Where the cluster's memory volumes and its other volumes lie."""
    return MEMORY_FILE_SYSTEM / f"tiercheck-{cluster}", SCRATCH / f"tiercheck-{cluster}"


def remove(cluster: str) -> None:
    """Kill every other process of the cluster and delete its folders. Raises Unkillable."""
    markers.kill(markers.CLUSTER, cluster)
    for folder in folders(cluster):
        shutil.rmtree(folder, ignore_errors=True)


def remove_all_at(octet: int) -> None:
    """For the holder of an octet: what else carries it belongs to a cluster whose process was killed."""
    for root in (MEMORY_FILE_SYSTEM, SCRATCH):
        for left in root.glob(f"tiercheck-{octet}-*"):
            remove(left.name.removeprefix("tiercheck-"))
