"""One process that has imported the frameworks, for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


class Lives:
    """Asks for lives of training scripts; see lives.py."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "stderr.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("lives.py"))],
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def run(
        self,
        modules: Sequence[str],
        argv: Sequence[str | Path],
        *,
        ranks: int = 1,
        kill_at: int | None = None,
        env: dict[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """What rank 0 of this life said, in steps. `modules`: what its script imports, each worth to be done once."""
        asked = {
            "modules": list(modules), "argv": [*map(str, argv)], "env": env or {}, "ranks": ranks, "kill_at": kill_at,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it is gone"}')
        assert "error" not in answer, f"{answer['error']}\n{self._log.read_text()[-4000:]}"
        said: list[dict[str, Any]] = answer["said"]
        return said

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    started = Lives(tmp_path_factory.mktemp("lives"))
    yield started
    started.stop()
