"""A cgroup per node, so that the kubelets do not meet each other's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OURS = "tiercheck-testbed"
_SHARES = {"cpu.shares": "8192", "cpu.weight": "800"}
"""All pods of all nodes together weigh as much as eight processes of the machine; else it would be one."""


def is_unified() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def node_root(number: int) -> str:
    """As the kubelet's `cgroupRoot` names it."""
    return f"/{_OURS}/n{number}"


def make_node_root(number: int) -> None:
    for hierarchy in _hierarchies():
        for path in (hierarchy / _OURS, hierarchy / _OURS / f"n{number}"):
            path.mkdir(exist_ok=True)
            if is_unified():
                for parent in (path.parent, path):
                    for name in (_ROOT / "cgroup.controllers").read_text().split():
                        with contextlib.suppress(OSError):
                            (parent / "cgroup.subtree_control").write_text(f"+{name}")
            elif (path / "cpuset.cpus").exists():
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (path / name).write_text((path.parent / name).read_text())
        for name, value in _SHARES.items():
            if (hierarchy / _OURS / name).exists():
                (hierarchy / _OURS / name).write_text(value)


def processes_of(number: int) -> list[tuple[int, str]]:
    """(pid, cgroup) of everything that runs in the node's pods."""
    base = _ROOT if is_unified() else _ROOT / "memory"
    found = []
    for folder, _, _ in os.walk(base / _OURS / f"n{number}"):
        with contextlib.suppress(OSError):
            found += [(int(pid), folder) for pid in Path(folder, "cgroup.procs").read_text().split()]
    return found


def remove_all() -> None:
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / _OURS, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _hierarchies() -> list[Path]:
    if is_unified():
        return [_ROOT]
    return [
        path
        for path in sorted(_ROOT.iterdir())
        if path.is_dir() and not path.is_symlink() and path.name != "unified"
    ]
