"""Promise: a run comes back on another number of ranks, and on another mesh, with the same state to the last bit."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "mesh_changes.py"
STAGES = (
    "fsdp:4", "fsdp:2", "fsdp-tensor:4", "fsdp:4", "tensor:2", "ddp:2", "zero:2", "ddp:2", "fsdp:3", "zero:2", "hybrid:4", "pipeline:2",
    "fsdp:2", "ddp:1", "hybrid:4",
)  # fmt: skip


def test_state_survives_every_change_of_mesh(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(number), str(tmp_path), *STAGES],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    by_rank: list[list[Any]] = [json.loads(text.splitlines()[-1]) for text in said]
    stages = [[rank[index] for rank in by_rank if rank[index]] for index in range(len(STAGES))]
    for number, (before, after) in enumerate(itertools.pairwise(stages), start=1):
        where = f"{STAGES[number - 1]} to {STAGES[number]}"
        assert {rank["first"] for rank in after} == {2 * number}, where
        assert {rank["captured"] for rank in after} == {1}, where
        assert {rank["samples"] for rank in after} == {2 * number + 2}, where
        ended, restored = whole(before, "end"), whole(after, "restored")
        assert restored.keys() == ended.keys(), where
        assert [name for name in ended if ended[name] != restored[name]] == [], where


def whole(ranks: list[dict[str, Any]], moment: str) -> dict[str, str]:
    """What all ranks say together; where several know a tensor, they know the same."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, fingerprint in rank[moment].items():
            assert found.setdefault(name, fingerprint) == fingerprint, name
    return found
