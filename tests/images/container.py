"""Runs one container with runc, under exactly the conditions that are asked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE = 90.0
"""Seconds, for what takes a moment on an idle machine."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine in a container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Settings:
    """What a pod's manifest and an image come to."""

    args: Sequence[str]
    env: dict[str, str]
    cwd: str
    user: int
    group: int
    mounts: Sequence[Mount]
    groups: Sequence[int] = ()
    read_only: bool = False
    capabilities: Sequence[str] = ()
    no_new_privileges: bool = False
    hostname: str = "pod"


@dataclass
class Container:
    """Started when made; `remove` ends it. It has this machine's network: pods live on loopback addresses."""

    name: str
    root: Path
    settings: Settings
    folder: Path
    _process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._log, self._pid = self.folder / "log", self.folder / "pid"
        subprocess.run(["runc", "spec", "--bundle", self.folder], check=True)
        file = self.folder / "config.json"
        file.write_text(json.dumps(_configured(json.loads(file.read_text()), self.settings, self.root)))
        run = [*self._runc, "run", "--bundle", str(self.folder), "--pid-file", str(self._pid), self.name]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                run, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self.folder.parent / "runc")]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Of its first process, as this machine sees it; waits until runc has made it."""
        self.wait_for(lambda: self._pid.exists() and self._pid.read_text(), "its first process")
        return int(self._pid.read_text())

    def status(self) -> dict[str, str]:
        """/proc/PID/status of its first process; empty when that has ended."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return {}
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def hears(self, number: int) -> bool:
        """Whether the first process catches the signal; PID 1 does not even notice any other one.

        runc's own process, which becomes the first one, catches every signal: also SIGHUP, as nothing of ours
        does.
        """
        caught = int(self.status().get("SigCgt", "0"), 16)
        return bool(caught >> (number - 1) & 1) and not caught >> (signal.SIGHUP - 1) & 1

    def kill(self, number: int = signal.SIGTERM) -> None:
        """As a runtime does: to the first process only."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = DEADLINE) -> int:
        """The exit code. Raises AssertionError."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} runs after {seconds:.0f} s:\n{self.log}") from None

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Until it holds. Raises AssertionError, also if the container fails before."""
        end = time.monotonic() + DEADLINE
        while not condition():
            ended = self._process.poll()
            assert ended in (None, 0), f"{self.name} ended with {ended} before {what}:\n{self.log}"
            assert time.monotonic() < end, f"{self.name}: no {what}:\n{self.log}"
            time.sleep(0.01)

    def remove(self) -> None:
        """Nothing of it runs any more."""
        if not self.ended:
            subprocess.run([*self._runc, "kill", self.name, "KILL"], check=False, capture_output=True)
            self._process.wait(DEADLINE)
        subprocess.run([*self._runc, "delete", "--force", self.name], check=False, capture_output=True)


def _configured(config: dict[str, Any], settings: Settings, root: Path) -> dict[str, Any]:
    """runc's own example, which has the mounts that every container gets, with what is asked for."""
    config["process"].update(
        terminal=False,
        args=list(settings.args),
        env=[f"{name}={value}" for name, value in settings.env.items()],
        cwd=settings.cwd,
        user={"uid": settings.user, "gid": settings.group, "additionalGids": list(settings.groups)},
        capabilities={kind: list(settings.capabilities) for kind in ("bounding", "effective", "permitted")},
        noNewPrivileges=settings.no_new_privileges,
        rlimits=[],
    )
    config["root"] = {"path": str(root), "readonly": settings.read_only}
    config["hostname"] = re.sub(r"[^a-z0-9-]", "-", settings.hostname)
    config["mounts"] += [
        {
            "destination": mount.target,
            "type": "bind",
            "source": str(mount.source),
            "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
        }
        for mount in settings.mounts
    ]
    linux = config["linux"]
    linux["namespaces"] = [entry for entry in linux["namespaces"] if entry["type"] != "network"]
    return config
