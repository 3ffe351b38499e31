"""Prepares the training command's environment, and checks for torch and runs the user's health check.

`torchrun train.py` and `python train.py` must both work unchanged. An image without torch is reported in a
sentence, not as a stack trace per restart. The exit code of the user's check decides, and its last lines are
the reason.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tiercheck.launcher import command as processes
from tiercheck.launcher.command import RelayedOutput
from tiercheck.protocol.directive import HealthCheck
from tiercheck.protocol.local import Order
from tiercheck.protocol.names import ENV_ATTEMPT, ENV_JOINS, ENV_POD_IP, ENV_WORKER

log = logging.getLogger(__name__)


def seconds_of(environment: Mapping[str, str], name: str, usual: float) -> float:
    """Returns a variable as seconds; if it is invalid, logs that and returns `usual`.

    An invalid setting of TierCheck must not prevent the command from starting."""
    text = environment.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if seconds >= 0:
        return seconds
    log.warning("%s is no number of seconds: %r; it is taken for %g", name, text[:40], usual)
    return usual


def command_environment(
    base: Mapping[str, str], order: Order, local_rank: int | None = None
) -> dict[str, str]:
    """Returns the training command's environment for `order`; `base` is the container's own environment.

    With `local_rank`: that of one rank, which the launcher starts as torchrun would."""
    environment = {
        **base,
        ENV_ATTEMPT: str(order.attempt),
        ENV_WORKER: str(order.worker),
        "MASTER_ADDR": order.master_host,
        "MASTER_PORT": str(order.master_port),
        "PET_NNODES": str(order.workers),
        "PET_NPROC_PER_NODE": str(order.procs_per_worker),
        "PET_NODE_RANK": str(order.worker),
        "PET_MASTER_ADDR": order.master_host,
        "PET_MASTER_PORT": str(order.master_port),
        "PET_RDZV_BACKEND": "static",
        # A failed rank must end the attempt: torchrun's own restart would begin without the other workers.
        "PET_MAX_RESTARTS": "0",
    }
    # Set by other controllers in attached pods. With them torchrun would use a rendezvous that does not
    # distinguish attempts.
    for name in ("PET_RDZV_ENDPOINT", "PET_STANDALONE"):
        environment.pop(name, None)
    if order.joins:
        environment[ENV_JOINS] = "1"
    if pod_ip := base.get(ENV_POD_IP):
        environment["PET_LOCAL_ADDR"] = pod_ip
    if local_rank is None and order.procs_per_worker > 1:
        return environment
    size, local = order.procs_per_worker, local_rank or 0
    environment |= {
        "RANK": str(order.worker * size + local),
        "WORLD_SIZE": str(order.workers * size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(size),
        # Lightning derives the rank from the node's number.
        "GROUP_RANK": str(order.worker),
        "GROUP_WORLD_SIZE": str(order.workers),
    }
    if local_rank is None:
        environment["NODE_RANK"] = str(order.worker)
    else:
        environment |= {
            "ROLE_NAME": "default",
            "ROLE_RANK": environment["RANK"],
            "ROLE_WORLD_SIZE": environment["WORLD_SIZE"],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
    return environment


_PROBE = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('torch') is None else 0)"


def torch_missing(command: Sequence[str]) -> str:
    """Returns a sentence if `command` is python or torchrun without torch; empty if it is not known to be."""
    name = Path(command[0]).name
    if name == "torchrun":
        script, interpreter = locate(command[0])
        if not script:
            return (
                "The image has no torchrun, so torch is not installed in it: use an image with torch "
                "2.6 or newer."
            )
    elif name.startswith("python"):
        interpreter = command[0]
    else:
        return ""
    if not interpreter:
        return ""
    try:
        probe = subprocess.run([interpreter, "-c", _PROBE], timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # starting the command will report the reason
    if probe.returncode != 3:
        return ""
    return (
        f"{interpreter} of the image cannot import torch: use an image with torch 2.6 or newer, or "
        "install it there."
    )


def locate(program: str) -> tuple[str, str]:
    """Returns the path of a program on the PATH, and the Python in its first line; empty strings if none."""
    path = shutil.which(program)
    if path is None:
        return "", ""
    with open(path, "rb") as file:
        first = os.fsdecode(file.readline(4096)).strip()
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(words[1]) or ""] if len(words) == 2 else []
    return path, words[0] if words and Path(words[0]).name.startswith("python") else ""


_LAST_WAIT = 2.0
"""Seconds that killed processes have to disappear."""


class RunningCheck:
    """A running health check. Its output is logged too. Raises OSError if the command cannot be executed."""

    def __init__(self, wanted: HealthCheck, attempt: int, environment: Mapping[str, str]) -> None:
        self.wanted, self.attempt = wanted, attempt
        self.output = RelayedOutput()
        try:
            writing = self.output.writing
            self.pid = processes.start(wanted.command, environment, output=writing, errors=writing)
        except OSError:
            self.output.close()
            raise
        finally:
            self.output.close_writing()
        self._deadline = time.monotonic() + wanted.seconds
        self._stays = ""
        """A description of the processes that SIGKILL does not end; empty if none."""
        self.code: int | None = None
        """The exit code; None if the command has not ended by itself."""
        self._killed = False

    def ended(self, code: int) -> None:
        """Records that the command itself has ended; its descendants may still exist."""
        if not self._killed:
            self.code = code

    @property
    def over(self) -> bool:
        return self.code is not None or time.monotonic() >= self._deadline

    @property
    def due(self) -> float:
        """Returns the seconds until its deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def kill(self, spared: Collection[int]) -> bool:
        """Kills all its processes. Returns True once none is left, or the rest is found unkillable."""
        left = processes.kill_descendants(spared)
        if not left:
            return True
        self._killed = True
        self._deadline = min(self._deadline, time.monotonic())
        if time.monotonic() < self._deadline + _LAST_WAIT:
            return False
        self._stays = processes.describe_stuck(left)
        return True

    def failure(self) -> str:
        """Returns the reason of its failure, a clause; empty: it passed. Call once it is over and killed."""
        check = f"failurePolicy.healthCheck ({os.path.basename(self.wanted.command[0])})"
        if self.code == 0 and not self._stays:
            return ""
        if self._stays:
            why = f"left something behind ({self._stays})"
        elif self.code is None:
            why = f"did not end within {self.wanted.seconds:g} s"
        elif name := processes.signal_of(self.code):
            why = f"was ended by {name}"
        else:
            why = f"ended with exit code {self.code}"
        said = self.output.last_lines()
        return f"{check} {why}{': ' + said if said else ' and said nothing'}"

    def close(self) -> None:
        self.output.close()
