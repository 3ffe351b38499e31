"""Promise: unequal replicas are never mixed into a state that nobody had.

A restore brings equal replicas, or each its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lives import Lives
from tiercheck.trainer.replicas.equality import Looked, are_unequal, were_saved_whole

SCRIPT = Path(__file__).with_name("drifting_script.py")
RUNS = {
    "drifting": "drift:8:2:local:2",
    "drifted, again": "drift:8:2:local:2",
    "equal": "equal:4:9:local:2",
    "some elements": "element:4:1:element:2",
    "nobody compares": "hidden:4:2:hidden:2",
    "nobody compared": "hidden:8:9:local:2",
    "drifted, elsewhere": "drift:8:2:local:1",
}
"""Told to the script in this order; those with the same folder go on from each other."""
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drifting")


@pytest.fixture(scope="module")
def runs(lives: Lives, folder: Path) -> Runs:
    """What each rank of each run said."""
    argv = [SCRIPT, folder, *RUNS.values()]
    lines = [line for rank in lives.run([], argv, ranks=2) for line in rank]
    return {name: [line for line in lines if line["run"] == number] for number, name in enumerate(RUNS)}


def complete(folder: Path, world: int = 2) -> list[int]:
    """Steps of which every rank has completed its part."""
    held = [
        {int(p.stem.partition("-")[0]) for p in (folder / f"rank-{r}-of-{world}").glob("*.json")}
        for r in range(world)
    ]
    return sorted(set.intersection(*held))


def test_no_version_of_replicas_that_drifted_is_completed_in_shares(runs: Runs, folder: Path) -> None:
    drifting = runs["drifting"]
    assert drifting[0]["end"] != drifting[1]["end"]
    steps = complete(folder / "drift")
    assert steps[:2] == [1, 2]
    assert 3 not in steps  # the first one after they drifted
    assert steps[-1] == 8  # whole copies by then


def test_a_person_is_told_once_which_ranks_and_which_tensors(runs: Runs) -> None:
    drifting = runs["drifting"]
    for rank in drifting:
        assert "should hold the same bits" in rank["whole"]
        assert len([text for text in rank["warnings"] if "ReplicasDiffer" in text]) <= 1
    assert any(
        "ranks 0 and 1" in text or "ranks 1 and 0" in text
        for text in drifting[0]["warnings"] + drifting[1]["warnings"]
    )
    assert any("model/0.weight" in text for text in drifting[0]["warnings"] + drifting[1]["warnings"])


def test_each_replica_that_drifted_comes_back_with_its_own_bits(runs: Runs) -> None:
    assert [rank["first"] for rank in runs["drifted, again"]] == [8, 8]
    assert [rank["restored"] for rank in runs["drifted, again"]] == [rank["end"] for rank in runs["drifting"]]


def test_replicas_that_drifted_are_not_made_one_on_other_ranks(runs: Runs) -> None:
    (alone,) = runs["drifted, elsewhere"]
    assert "different bits" in alone["refused"]  # which of the two should it have been?


def test_replicas_that_are_equal_go_on_in_shares(runs: Runs, folder: Path) -> None:
    for rank in runs["equal"]:
        assert (rank["whole"], rank["warnings"], rank["captured"]) == ("", [], 4)
    assert complete(folder / "equal") == [1, 2, 3, 4]


def test_a_part_of_one_tensor_that_differs_is_found(runs: Runs, folder: Path) -> None:
    for rank in runs["some elements"]:
        assert "model/0.weight" in rank["whole"]
    assert 2 not in complete(folder / "element")


def test_shares_that_nobody_compared_when_they_were_saved_are_compared_before_they_are_put_together(
    runs: Runs,
) -> None:
    for rank in runs["nobody compared"]:
        assert "different bits" in rank["refused"]


def written(whole: bool, *seen: dict[str, int | None]) -> str:
    samples = {
        f"ring{number}": {
            name: None if byte is None else torch.tensor([byte], dtype=torch.uint8)
            for name, byte in each.items()
        }
        for number, each in enumerate(seen)
    }
    return Looked(1, whole, samples).written()


def test_slots_of_a_version_disagree_if_any_ring_does() -> None:
    equal: Sequence[str] = [written(False, {"a": 1}, {"b": 2}), written(False, {"a": 1}, {"b": 2})]
    assert not are_unequal(equal)
    assert are_unequal([*equal, written(False, {"a": 1}, {"b": 3})])
    assert not are_unequal([*equal, "", written(False, {"a": None}, {"b": 2})])  # not all of it was sampled


def test_whole_copies_of_replicas_are_told_from_a_state_without_replicas() -> None:
    assert were_saved_whole(written(True, {"a": 1}))
    assert not were_saved_whole(written(False, {"a": 1}))
    assert not were_saved_whole(written(True))
    assert not were_saved_whole("")
