"""Promise: replicas resume as if never stopped, unequal ones are not mixed, no rank's own is dropped.

A restore brings equal replicas, or each its own. Runs with several buckets are stopped after their first,
second and fourth step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.lives import Lives
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import Backend, RestoreError
from tiercheck.trainer.replicas.equality import ReplicaSamples, are_unequal, were_saved_whole
from tiercheck.trainer.restore.restoring import Restoring
from tiercheck_cli.commands import app

SCRIPT = Path(__file__).with_name("replica_runs.py")
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
    argv = [SCRIPT, "drift", folder, *RUNS.values()]
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
    return ReplicaSamples(1, whole, samples).written()


def test_slots_of_a_version_disagree_if_any_ring_does() -> None:
    equal: Sequence[str] = [written(False, {"a": 1}, {"b": 2}), written(False, {"a": 1}, {"b": 2})]
    assert not are_unequal(equal)
    assert are_unequal([*equal, written(False, {"a": 1}, {"b": 3})])
    assert not are_unequal([*equal, "", written(False, {"a": None}, {"b": 2})])  # not all of it was sampled


def test_shares_of_different_snapshots_are_not_put_together_and_the_older_one_still_counts() -> None:
    given_up: list[tuple[int, Kind]] = []

    class Recorder(Backend):
        def report(self, report: Any) -> None:
            given_up.append((report.step, report.kind))

    Recorder.__abstractmethods__ = frozenset()
    restoring = Restoring(None, Recorder())  # type: ignore[arg-type, abstract]
    shares, whole = written(False, {"a": 1}), written(True, {"a": 1})
    with pytest.raises(RestoreError, match=r"step 400.*step 405.*different snapshots"):
        restoring._refuse_others([(Version(405, 1), shares), (Version(400, 1), shares)])
    assert given_up == [(405, Kind.SNAPSHOT)]
    restoring._refuse_others([(Version(405, 1), shares), (Version(405, 1), shares)])
    restoring._refuse_others([(Version(405, 1), whole), (Version(400, 1), "")])


def test_whole_copies_of_replicas_are_told_from_a_state_without_replicas() -> None:
    assert were_saved_whole(written(True, {"a": 1}))
    assert not were_saved_whole(written(False, {"a": 1}))
    assert not were_saved_whole(written(True))
    assert not were_saved_whole("")


def run(lives: Lives, folder: Path, kind: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """What each rank ended with."""
    argv = [SCRIPT, folder, kind, steps]
    return [line for (line,) in lives.run([], argv, ranks=ranks)]


def exported(folder: Path) -> str:
    places = ["--folder", str(folder / "checkpoints"), "--to", str(folder / "to")]
    done = CliRunner().invoke(app, ["export", *places, "--format", "safetensors"])
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


IN_BUCKETS = (
    "plain:4", "plain:3", "plain:5", "static_graph:4", "gradient_as_bucket_view:4",
    "find_unused_parameters:4",
    "frozen on the way:4", "frozen before restore:4", "two parts:4", "dtypes:4", "sparse:4",
    "ZeRO:4", "hook before:4", "built-in hook:4", "hook after restore:4", "accumulated:4",
)  # fmt: skip
TOLD = ("counting hook:4", "other buckets:4")
pytestmark = pytest.mark.timeout(600)  # whichever test comes first trains for all of them


@pytest.fixture(scope="module")
def said(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    argv = [SCRIPT, "buckets", tmp_path_factory.mktemp("buckets"), *IN_BUCKETS, *TOLD]
    return [line for (line,) in lives.run([], argv, ranks=5)]


@pytest.mark.parametrize("run", IN_BUCKETS)
def test_every_step_after_a_restart_is_bitwise_the_same(said: list[dict[str, Any]], run: str) -> None:
    found = [rank[run] for rank in said if run in rank]
    assert [each["differing"] for each in found] == [{"1": [], "2": [], "4": []}] * len(found)
    assert not any("BucketLayout" in text for each in found for text in each["warnings"])


def test_a_hook_with_a_state_that_no_version_holds_is_told(said: list[dict[str, Any]]) -> None:
    for rank in said[:4]:
        texts = [text for text in rank["counting hook:4"]["warnings"] if text.startswith("CommHook")]
        assert texts, "said nothing"
        assert "changes, and is in no version" in texts[0]


def test_a_layout_that_cannot_be_had_again_is_told_by_every_rank(said: list[dict[str, Any]]) -> None:
    for rank in said[:4]:
        texts = [text for text in rank["other buckets:4"]["warnings"] if text.startswith("BucketLayout")]
        assert len(texts) == 3
        assert "had other gradient buckets" in texts[0]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def train(folder: Path, steps: int, zero: str = "at the beginning") -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Checkpointer(model, optimizer, folder=folder, every=1) as checkpointer:
        for _ in range(checkpointer.restore(), steps):
            if zero.startswith("at the beginning"):
                optimizer.zero_grad(set_to_none="in place" not in zero)
            for _ in range(2):
                model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            if zero == "at the end":
                optimizer.zero_grad()
            checkpointer.step()


def told(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(kind)]


def test_another_number_of_threads_and_another_precision_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    train(tmp_path, 2)
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("high")
    train(tmp_path, 5)
    (text,) = told(caplog, "Arithmetic")
    assert f"torch.get_num_threads is {threads + 1}, was {threads}" in text
    assert "torch.get_float32_matmul_precision is high, was highest" in text


def test_a_run_that_is_resumed_as_it_was_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 2)
    train(tmp_path, 5)
    assert not told(caplog, "")


@pytest.mark.parametrize("zero", ["at the beginning", "at the beginning, in place", "at the end", "never"])
def test_gradients_that_are_kept_from_step_to_step_are_told_and_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zero: str
) -> None:
    train(tmp_path, 5, zero)
    assert len(told(caplog, "Gradients")) == (zero == "never")


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_that_are_kept_later_are_told_and_none_for_those_that_an_inner_loop_asks_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zeroed: bool
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, folder=tmp_path) as checkpointer:
        for step in range(checkpointer.restore(), 10):
            torch.autograd.grad(model(torch.randn(4, 3)).square().mean(), [*model.parameters()])
            if zeroed or step < 5:
                optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
    assert len(told(caplog, "Gradients")) == (not zeroed)
