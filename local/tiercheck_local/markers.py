"""Marks and finds what a cluster has on this machine: processes, folders, links, addresses, ports.

An octet of 127.0.0.0/8 is held by an abstract Unix socket: it belongs to the same network namespace as the
addresses do, and the kernel frees it when the holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CLUSTER = "TIERCHECK_LOCAL_CLUSTER"
"""An environment variable with the cluster's id, on everything that the laptop cluster starts."""
POD = "TIERCHECK_LOCAL_POD"
"""An environment variable, on everything in a pod: <cluster>/<node>/<pod uid>/<container>."""


class Unkillable(RuntimeError):
    """Processes are still there seconds after SIGKILL; the message lists them."""


def pids(variable: str, where: str) -> list[int]:
    """Returns other processes of this user with `variable` at or below `where`; zombies have no variables."""
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
    """Signals these processes once; returns how many there were."""
    found = pids(variable, where)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(found)


def kill(variable: str, where: str, patience: float = 10.0) -> None:
    """Sends SIGKILL until none is left, since a process may fork meanwhile. Raises Unkillable."""
    end = time.monotonic() + patience
    while send(variable, where, signal.SIGKILL):
        if time.monotonic() > end:
            raise Unkillable(f"still alive after SIGKILL: {pids(variable, where)}")
        time.sleep(0.005)


def place(cluster: str, node: str, pod_uid: str = "", container: str = "") -> str:
    """Returns the value of `POD`, or the prefix that all containers of a pod, or pods of a node, share."""
    return "/".join(part for part in (cluster, node, pod_uid, container) if part)


MEMORY_FILE_SYSTEM = Path("/dev/shm")
SCRATCH = Path("/tmp")
"""A fixed folder, not the environment's temporary one: Unix sockets in it need short paths."""


def folders(cluster: str) -> tuple[Path, Path]:
    """Returns the folder of the cluster's memory volumes and that of its other volumes."""
    return MEMORY_FILE_SYSTEM / f"tiercheck-{cluster}", SCRATCH / f"tiercheck-{cluster}"


def remove(cluster: str) -> None:
    """Kills every other process of the cluster and deletes its folders. Raises Unkillable."""
    kill(CLUSTER, cluster)
    for folder in folders(cluster):
        shutil.rmtree(folder, ignore_errors=True)


def remove_all_at(octet: int) -> None:
    """Removes what killed clusters with this octet left; only the holder of the octet may call this."""
    for root in (MEMORY_FILE_SYSTEM, SCRATCH):
        for left in root.glob(f"tiercheck-{octet}-*"):
            remove(left.name.removeprefix("tiercheck-"))


CUTS = "TIERCHECK_LOCAL_CUTS"
"""An environment variable with the path of the cuts file; processes that have it load `link_hook`."""
_HOOK = Path(__file__).with_name("link_hook")
OPERATOR = "127.0.0.1"
"""The address at which the operator's connections start."""


def hooked_environment(env: Mapping[str, str], cuts: str | None) -> dict[str, str]:
    """Returns `env` for a process with links that can be cut; unchanged if `cuts` is None."""
    if not cuts:
        return dict(env)
    path = os.pathsep.join([str(_HOOK), *filter(None, [env.get("PYTHONPATH")])])
    return {**env, CUTS: cuts, "PYTHONPATH": path}


def write_cuts(path: Path, pairs: Iterable[frozenset[str]]) -> None:
    """Replaces the list of cut links: pairs of addresses."""
    replace_file(path, "".join(" ".join(sorted(pair)) + "\n" for pair in pairs))


def replace_file(path: Path, content: str) -> None:
    """Writes a file atomically: other processes read all of it, or what was there."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(content)
    os.replace(fresh, path)


_USUAL = (32_768, 60_999)


class NoAddressLeft(RuntimeError):
    """Every octet is taken by another cluster on this machine."""


class Octet:
    """A reservation of 127.<value>.0.0/16 until `release`."""

    def __init__(self) -> None:
        """Reserves a free octet. Raises NoAddressLeft."""
        start = os.getpid()
        for offset in range(253):
            value = 2 + (start + offset) % 253
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                holder.bind(f"\0tiercheck-local-{value}")
            except OSError:
                holder.close()
                continue
            self.value, self._holder = value, holder
            return
        raise NoAddressLeft("253 laptop clusters run on this machine already")

    def release(self) -> None:
        self._holder.close()


def free_ports(count: int) -> list[int]:
    """Returns TCP ports that no socket of this machine has, at any address.

    They are held until all are chosen, so that they differ. Ports that the kernel assigns to clients, or to
    listeners at port 0, are excluded: between here and their use it would assign some, and a server that
    listens everywhere (torch's TCPStore) needs a port that is free at every address.
    """
    candidates = _given_by_nobody()
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", random.choice(candidates)))  # bound, and never listening
                found.append(one.getsockname()[1])
        return found


def _given_by_nobody() -> Sequence[int]:
    first, last = _USUAL
    with contextlib.suppress(OSError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return max(range(30_000, first), range(last + 1, 65_536), key=len) or [0]
