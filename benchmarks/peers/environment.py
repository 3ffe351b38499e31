"""Builds a peer's environment with pinned versions, so that the comparison can be repeated anywhere.

Each peer has its own, because their requirements exclude each other. torch is the version that TierCheck
itself runs on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import CACHE, ROOT

_SECONDS = 600.0


class CannotInstall(RuntimeError):
    """The registry at hand does not have it; the message is pip's."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment under the cache folder. No `packages`: the one that runs this."""

    name: str
    packages: tuple[str, ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        return (f"torch=={torch.__version__.partition('+')[0]}", *self.packages)

    def python(self) -> Path:
        """Its interpreter; built first if it is not there. Raises CannotInstall."""
        if not self.packages:
            return Path(sys.executable)
        folder = CACHE / "peers" / self.name
        marker = folder / "installed"
        if not marker.exists() or marker.read_text() != "\n".join(self.wanted):
            self._build(folder)
            marker.write_text("\n".join(self.wanted))
        return folder / "bin" / "python"

    def run(
        self, module: str, arguments: Sequence[object], answer: Path, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """What the module, run here with these arguments, writes into `answer` as JSON. Raises CannotInstall,
        or RuntimeError with its last line if it fails."""
        try:
            done = subprocess.run(
                [str(self.python()), "-m", module, *map(str, arguments)],
                env={**os.environ, **(env or {}), "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no answer within {_SECONDS:.0f} s") from error
        if not answer.exists():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise RuntimeError(lines[-1])
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def _build(self, folder: Path) -> None:
        print(f"installing {', '.join(self.wanted)} under {folder}", file=sys.stderr, flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent.parent / ".gitignore").write_text("*\n")
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, "-c", str(ROOT / "constraints.txt"), *self.wanted],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotInstall(f"{self.name}: {_last_line(done.stderr or done.stdout)}")


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    return (errors or text.splitlines() or ["no output"])[-1]


OURS = Environment("ours")
DLROVER = Environment("dlrover", ("dlrover[k8s,torch]==0.6.1", "numpy"))
NVRX = Environment("nvrx", ("nvidia-resiliency-ext==0.4.1", "numpy"))
TORCHFT = Environment("torchft", ("torchft==0.2.0", "numpy"))
