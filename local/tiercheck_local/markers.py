"""Finds every process of a pod, a node or a cluster: each carries its place in its environment, children inherit it.

A process group would lose what starts its own session, as launchers do; a PID namespace would need privileges.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

CLUSTER = "TIERCHECK_LOCAL_CLUSTER"
"""Value: the cluster's id. On everything that the laptop cluster starts."""
POD = "TIERCHECK_LOCAL_POD"
"""Value: <cluster>/<node>/<pod uid>/<container>. On everything that runs in a pod."""


class Unkillable(RuntimeError):
    """Processes are still there seconds after SIGKILL; the message lists them."""


def pids(variable: str, where: str) -> list[int]:
    """Processes of this user, other than this one, whose `variable` is `where` or below it. Zombies have no environment."""
    wanted = f"{variable}={where.rstrip('/')}".encode()
    endings = (wanted + b"\0", wanted + b"/")
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            continue  # gone meanwhile, or another user's
        if environment.startswith(endings) or any(b"\0" + ending in environment for ending in endings):
            found.append(int(entry))
    return found


def send(variable: str, where: str, number: int) -> int:
    """Signal them once; how many there were."""
    found = pids(variable, where)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(found)


def kill(variable: str, where: str, patience: float = 10.0) -> None:
    """SIGKILL until none is left: a process may have forked between look and kill. Raises Unkillable."""
    end = time.monotonic() + patience
    while send(variable, where, signal.SIGKILL):
        if time.monotonic() > end:
            raise Unkillable(f"still alive after SIGKILL: {pids(variable, where)}")
        time.sleep(0.005)


def place(cluster: str, node: str, pod_uid: str = "", container: str = "") -> str:
    """The value of `POD`, or the beginning of it that all containers of the pod, all pods of the node share."""
    return "/".join(part for part in (cluster, node, pod_uid, container) if part)
