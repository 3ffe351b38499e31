"""Promise: nothing that only some ranks have is dropped in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.lives import Lives
from tiercheck_cli.commands import app

SCRIPT = Path(__file__).with_name("rank_scripts.py")


def run(lives: Lives, folder: Path, kind: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """What each rank ended with."""
    argv = [SCRIPT, folder, kind, steps]
    return [line for (line,) in lives.run([], argv, ranks=ranks)]


def exported(folder: Path) -> str:
    arguments = [
        "--folder",
        str(folder / "checkpoints"),
        "--format",
        "safetensors",
        "--to",
        str(folder / "to"),
    ]
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def experts(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    run(lives, folder, "experts", 2, 2)
    return folder


def test_ranks_own_parameters_come_back_on_the_same_ranks(lives: Lives, experts: Path) -> None:
    assert [each["first"] for each in run(lives, experts, "experts", 2, 3)] == [2, 2]


def test_ranks_own_parameters_are_refused_on_another_number_of_ranks(lives: Lives, experts: Path) -> None:
    (alone,) = run(lives, experts, "experts", 1, 4)
    assert "model/experts.0.weight is each rank's own" in alone["refused"]
    assert "Start the script on 2 ranks" in alone["refused"]


def test_ranks_own_parameters_are_told_of_in_an_export(experts: Path) -> None:
    assert "model/experts.0.weight" in exported(experts)


def test_parameters_that_are_alike_and_statistics_that_are_not_go_to_another_number_of_ranks(
    lives: Lives, tmp_path: Path
) -> None:
    run(lives, tmp_path, "alike", 2, 2)
    assert [each["first"] for each in run(lives, tmp_path, "alike", 1, 3)] == [2]


def test_group_that_was_added_to_a_spread_optimizer_comes_back_and_may_be_added_once_more(
    lives: Lives, tmp_path: Path
) -> None:
    whole = run(lives, tmp_path / "whole", "zero", 2, 5)
    run(lives, tmp_path / "cut", "zero", 2, 3)
    shutil.copytree(tmp_path / "cut", tmp_path / "fewer")
    again = run(lives, tmp_path / "cut", "zero", 2, 5)
    assert [each["first"] for each in again] == [3, 3]
    for resumed, undisturbed in zip(again, whole, strict=True):
        assert resumed["losses"].items() <= undisturbed["losses"].items()
        assert resumed["groups"] == undisturbed["groups"]
    (alone,) = run(lives, tmp_path / "fewer", "zero", 1, 5)
    assert (alone["first"], alone["groups"]) == (3, whole[0]["groups"])
