"""Promise: what replicas hold differently is never mixed into a state that nobody had: a restore brings equal replicas, or each its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercheck.trainer.equality import Looked, saved_whole, unequal

SCRIPT = Path(__file__).parent / "drifting_script.py"


def run(folder: Path, steps: int, drifts_after: int, how: str = "local", world: int = 2) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(steps), str(drifts_after), how],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    return [json.loads(text.splitlines()[-1]) for text in said]


def complete(folder: Path, world: int = 2) -> list[int]:
    """Steps of which every rank has completed its part."""
    held = [
        {int(p.stem.partition("-")[0]) for p in (folder / f"rank-{r}-of-{world}").glob("*.json")} for r in range(world)
    ]
    return sorted(set.intersection(*held))


def test_no_version_of_replicas_that_drifted_is_completed_in_shares_and_each_comes_back_with_its_own(
    tmp_path: Path,
) -> None:
    first = run(tmp_path, 8, drifts_after=2)
    assert first[0]["end"] != first[1]["end"]
    steps = complete(tmp_path)
    assert steps[:2] == [1, 2]
    assert 3 not in steps  # the first one after they drifted
    assert steps[-1] == 8  # whole copies by then
    for rank in first:
        assert "should hold the same bits" in rank["whole"]
        assert rank["skipped"] >= 1 or rank is not first[0]
    said = [text for rank in first for text in rank["warnings"]]
    assert any("model/0.weight" in text and "ReplicasDiffer" in text for text in said), said
    assert max(len([t for t in rank["warnings"] if "ReplicasDiffer" in t]) for rank in first) == 1

    again = run(tmp_path, 8, drifts_after=2)
    assert [rank["first"] for rank in again] == [8, 8]
    assert [rank["restored"] for rank in again] == [rank["end"] for rank in first]

    elsewhere = run(tmp_path, 8, drifts_after=2, world=1)
    assert "different bits" in elsewhere[0]["refused"]  # of which of the two should it have been?


def test_replicas_that_are_equal_go_on_in_shares(tmp_path: Path) -> None:
    for rank in run(tmp_path, 4, drifts_after=9):
        assert (rank["whole"], rank["warnings"], rank["captured"]) == ("", [], 4)
    assert complete(tmp_path) == [1, 2, 3, 4]


def test_a_part_of_one_tensor_that_differs_is_found(tmp_path: Path) -> None:
    for rank in run(tmp_path, 4, drifts_after=1, how="element"):
        assert "model/0.weight" in rank["whole"]
    assert 2 not in complete(tmp_path)


def test_shares_that_nobody_compared_when_they_were_saved_are_compared_before_they_are_put_together(
    tmp_path: Path,
) -> None:
    run(tmp_path, 4, drifts_after=2, how="hidden")
    assert complete(tmp_path) == [1, 2, 3, 4]
    for rank in run(tmp_path, 8, drifts_after=9):
        assert "different bits" in rank["refused"]


def written(whole: bool, *sums: dict[str, int | None]) -> str:
    return Looked(1, whole, {f"ring{number}": each for number, each in enumerate(sums)}).written()


def test_slots_of_a_version_disagree_if_any_ring_does() -> None:
    equal: Sequence[str] = [written(False, {"a": 1}, {"b": 2}), written(False, {"a": 1}, {"b": 2})]
    assert not unequal(equal)
    assert unequal([*equal, written(False, {"a": 1}, {"b": 3})])
    assert not unequal([*equal, "", written(False, {"a": None}, {"b": 2})])  # not all of it was sampled


def test_whole_copies_of_replicas_are_told_from_a_state_without_replicas() -> None:
    assert saved_whole(written(True, {"a": 1}))
    assert not saved_whole(written(False, {"a": 1}))
    assert not saved_whole(written(True))
    assert not saved_whole("")
