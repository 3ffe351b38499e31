"""Promise: however people train and whatever fails, every bit of the state comes back.

Parallelism x optimizer x what is odd about the model x failure x mesh after it: what goes wrong goes wrong
where two things meet, and the full product is seventeen thousand cases. Here every value is in some case;
`make test-extended` has every pair of two values, every mesh before with every mesh after it, every
parallelism and optimizer with every failure, at every moment.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.lives import Lives
from tests.trainer.restore.covering import covering, pairs
from tests.trainer.torch_limits import (
    FSDP2_ON_CPUS,
    FSDP2_WITH_TENSOR_PARALLEL,
    shards_by_fsdp2,
)

SCRIPT = Path(__file__).with_name("matrix_runs.py")
STEPS, EVERY = 8, 2
LAST = 6
"""Newest version where nobody is killed: the run ended in step 7."""
BEGIN = (
    "ddp:4",
    "zero:4",
    "fsdp:4",
    "hybrid:4",
    "tensor:2",
    "fsdp-tensor:4",
    "pipeline:2",
    "pipeline-fsdp-tensor:8",
)
"""Parallelism and number of ranks; of DDP more than two, which sum in an order that its buckets decide. No
layer can be divided evenly by three or four, few by two."""
MESHES = (
    *BEGIN, "ddp:1", "ddp:2", "zero:2", "fsdp:2", "fsdp:3", "zero:3", "fsdp:5", "ddp:6", "hybrid:6",
    "fsdp-tensor:6", "fsdp:8",
)  # fmt: skip
"""Those that a run can go on with."""
OPTIMIZERS = (
    "foreach AdamW",
    "fused AdamW",
    "SGD",
    "Adafactor",
    *(["Muon"] if hasattr(torch.optim, "Muon") else []),
)
"""The last two are not elementwise; Adafactor's state has other shapes than its parameters."""
QUIRKS = ("tied", "frozen", "groups", "bf16", "averaged")
MOMENTS = ("before the update", "after the update", "while it is copied")
"""When one rank gets SIGKILL; then the others are ended, as the controller does."""
FAILURES = ("killed", "newest lost", "newest damaged", "all gone")
"""Where no rank is killed, all processes have ended, and the folder alone is left: without one rank's part of
the newest version, with one other bit in it, or intact."""
AFTER = ("the same", "fewer ranks", "another mesh", "more ranks")


class Case(NamedTuple):
    begin: str
    optimizer: str
    quirk: str
    failure: str
    """One of FAILURES, or `killed` and a moment."""
    after: str
    """One of AFTER, or of MESHES."""


def ranks(mesh: str) -> int:
    return int(mesh.rpartition(":")[2])


def kind(mesh: str) -> str:
    return mesh.rpartition(":")[0]


def runs_here(mesh: str) -> bool:
    if "fsdp-tensor" in mesh:
        return FSDP2_WITH_TENSOR_PARALLEL
    if kind(mesh) == "pipeline":
        return FSDP2_ON_CPUS  # in torch 2.6 its stages wait for each other for ever
    return FSDP2_ON_CPUS or not shards_by_fsdp2(kind(mesh))


def trains(mesh: str, optimizer: str, quirk: str) -> bool:
    """Whether there is such a run at all, without us."""
    if not runs_here(mesh):
        return False
    if (kind(mesh), quirk) == ("tensor", "frozen") and not FSDP2_ON_CPUS:
        return False  # `parallelize_module` of torch 2.6 thaws parameters
    if optimizer == "Adafactor" and kind(mesh) not in ("ddp", "zero", "pipeline"):
        # torch 2.13's makes no step with DTensors: "aten.pow_.Scalar: in-place operations that require
        # placement changes are not supported". Muon takes its place there.
        return False
    if optimizer == "Muon" and mesh in ("fsdp:8", "fsdp-tensor:6"):
        # nor does its Muon with shards as unequal as these: "aten.add_.Tensor: in-place operations ..."
        return False
    return quirk != "tied" or not kind(mesh).startswith("pipeline")  # the tied layers are in two stages


def meshes_after(case: Case) -> list[str]:
    """Those that the case's `after` can mean."""
    if case.after in MESHES:
        chosen = [case.after]
    elif case.after == "the same":
        chosen = [case.begin]
    else:
        before = ranks(case.begin)
        fits = {"fewer ranks": before.__gt__, "another mesh": before.__eq__, "more ranks": before.__lt__}[
            case.after
        ]
        chosen = [mesh for mesh in MESHES if mesh != case.begin and fits(ranks(mesh))]
    return [mesh for mesh in chosen if trains(mesh, case.optimizer, case.quirk)]


def possible(values: Sequence[str]) -> bool:
    case = Case(*values)
    return trains(case.begin, case.optimizer, case.quirk) and bool(meshes_after(case))


AXES = (BEGIN[:-1], OPTIMIZERS, QUIRKS, FAILURES, AFTER)
CASES = [
    *(Case(*values) for values in covering(AXES, possible, [(axis,) for axis in range(5)])),
    # Eight ranks take as long as all of four others: the other cases are extended ones.
    *filter(
        possible,
        (
            Case(BEGIN[-1], "foreach AdamW", "averaged", "killed", "the same"),
            Case(BEGIN[-1], "SGD", "bf16", "newest lost", "fewer ranks"),
        ),
    ),
]
MORE_AXES = (BEGIN, OPTIMIZERS, QUIRKS, (*(f"killed {moment}" for moment in MOMENTS), *FAILURES[1:]), MESHES)
NAMED = ("fsdp:4", "fsdp:2", "fsdp-tensor:4", "fsdp:4", "fsdp:2", "fsdp:4")
"""The changes of mesh that people ask for first, one after the other, the run going on in between."""


@dataclass
class Found:
    then: str
    """Mesh after the failure."""
    whole: list[Any]
    """What the ranks of the run that nothing happened to said."""
    resumed: list[Any]
    killed: list[Any] | None


class Plan:
    """All runs of some cases: undisturbed ones, one for all cases that have it; those that are killed; those
    that come back."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self._whole: dict[tuple[str, str, str], int] = {}
        self._used: Counter[str] = Counter()
        self._chance = random.Random(3)

    def add(self, run: dict[str, Any]) -> int:
        self.runs.append(run)
        return len(self.runs) - 1

    def case(self, case: Case) -> tuple[str, int, int, int | None]:
        """Mesh after the failure; the numbers of the runs: undisturbed, resumed, killed."""
        what = {"optimizer": case.optimizer, "quirk": case.quirk, "steps": STEPS}
        run = {**what, "kind": kind(case.begin), "world": ranks(case.begin)}
        key = case.begin, case.optimizer, case.quirk
        if key not in self._whole:
            self._whole[key] = self.add({**run, "folder": f"whole-{len(self.runs)}", "watched": []})
        whole, killed, folder = self._whole[key], None, f"case-{len(self.runs)}"
        then = min(meshes_after(case), key=self._used.__getitem__)
        self._used[then] += 1
        resumed = {**what, "kind": kind(then), "world": ranks(then), "folder": folder, "watched": [STEPS]}
        if then != case.begin:
            resumed |= {"reseeded": True, "watched": []}
        victim = self._chance.randrange(ranks(case.begin))
        if case.failure.startswith("killed"):
            moment = case.failure.removeprefix("killed").strip() or self._chance.choice(MOMENTS)
            last = self._chance.choice((6, 8) if moment == "while it is copied" else (5, 6, 7, 8))
            killed = self.add({**run, "folder": folder, "killed": [victim, last, moment]})
            resumed["after"] = killed
            compared = [step for step in (4, 6, 8) if step <= last]
        else:
            resumed |= {"after": whole, "begins": [self.runs[whole]["folder"], LAST]}
            compared = [LAST if case.failure == "all gone" else LAST - EVERY]
            if case.failure != "all gone":
                resumed["hurt"] = [victim, LAST, case.failure.removeprefix("newest ")]
        self.runs[whole]["watched"] += [*compared, *([STEPS] if then == case.begin else [])]
        return then, whole, self.add(resumed), killed

    def carry_out(self, lives: Lives, folder: Path) -> list[list[Any]]:
        """What each rank of each run said."""
        file = folder / "runs.json"
        file.write_text(json.dumps(self.runs))
        ((line,),) = lives.run([], [SCRIPT, folder, file])
        return line["said"]


def carried_out(
    cases: Sequence[Case], plan: Plan, lives: Lives, folder: Path
) -> tuple[dict[Case, Found], list[list[Any]]]:
    planned = {case: plan.case(case) for case in cases}
    said = plan.carry_out(lives, folder)
    found = {
        case: Found(then, said[whole], said[resumed], None if killed is None else said[killed])
        for case, (then, whole, resumed, killed) in planned.items()
    }
    return found, said


@pytest.fixture(scope="module")
def found(
    lives: Lives, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[Case, Found], list[list[Any]]]:
    """Every case, and the stages of the run that changes its mesh as NAMED."""
    plan = Plan()
    for number, mesh in enumerate(NAMED if all(map(runs_here, NAMED)) else ()):
        steps = 4 + EVERY * number
        run = {
            "kind": kind(mesh),
            "world": ranks(mesh),
            "optimizer": "foreach AdamW",
            "quirk": "tied",
            "folder": "named",
        }
        run |= {"steps": steps, "watched": [steps]}
        plan.add({**run, "after": number - 1, "reseeded": True} if number else run)
    return carried_out(CASES, plan, lives, tmp_path_factory.mktemp("matrix"))


@pytest.mark.timeout(900)  # whichever test comes first runs all of them
@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_every_bit_comes_back(case: Case, found: tuple[dict[Case, Found], list[list[Any]]]) -> None:
    comes_back(case, found[0][case])


@pytest.mark.skipif(not all(map(runs_here, NAMED)), reason="torch's own limits")
@pytest.mark.timeout(900)
def test_fsdp_on_4_ranks_goes_on_with_2_then_with_tensor_parallelism_and_back(
    found: tuple[dict[Case, Found], list[list[Any]]],
) -> None:
    """Universal Checkpointing's case (arXiv 2406.18820): saved on one mesh, loaded on another, again and
    again."""
    stages = found[1][: len(NAMED)]
    for number in range(1, len(NAMED)):
        step, change = 2 + EVERY * number, f"{NAMED[number - 1]} to {NAMED[number]}"
        assert all(stages[number]), change
        assert {(rank["first"], rank["captured"], rank["skipped"]) for rank in stages[number]} == {
            (step, 1, 0)
        }, change
        same(gathered(stages[number], step), gathered(stages[number - 1], step))


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_every_bit_comes_back_from_every_mesh_to_every_other(lives: Lives, tmp_path: Path) -> None:
    """And each parallelism and optimizer with each failure, at each moment."""
    together = [*pairs(5), (0, 1, 3)]
    cases = [Case(*values) for values in covering(MORE_AXES, possible, together)]
    found, _ = carried_out(cases, Plan(), lives, tmp_path)
    wrong = {}
    for case, one in found.items():
        try:
            comes_back(case, one)
        except AssertionError as error:
            wrong[" | ".join(case)] = str(error)
    assert wrong == {}


def comes_back(case: Case, one: Found) -> None:
    assert all(one.whole), "the undisturbed run ended early"
    assert {(rank["captured"], rank["skipped"]) for rank in one.whole} == {(STEPS // EVERY, 0)}
    assert all(one.resumed), f"the run that came back, on {one.then}, ended early"
    (first,) = {rank["first"] for rank in one.resumed}
    if case.failure.startswith("killed"):
        assert one.killed is not None
        assert not all(one.killed), "nobody was killed"
        assert first in (4, 6, 8)
    else:
        assert first == (LAST if case.failure == "all gone" else LAST - EVERY)
    same(gathered(one.resumed, first), gathered(one.whole, first))
    assert {rank["samples"] for rank in one.resumed} == {6 * first}
    assert {(rank["captured"], rank["skipped"]) for rank in one.resumed} == {((STEPS - first) // EVERY, 0)}
    if one.then == case.begin:
        same(gathered(one.resumed, STEPS), gathered(one.whole, STEPS))
        for again, before in zip(one.resumed, one.whole, strict=True):
            assert again["losses"] == {
                step: loss for step, loss in before["losses"].items() if int(step) > first
            }


def gathered(said: list[Any], step: int) -> dict[str, str]:
    """Fingerprints of the whole state after a step, as all ranks say together; where several know a tensor,
    they know the same."""
    known: dict[str, str] = {}
    for rank in said:
        for name, fingerprint in rank["states"][str(step)].items():
            assert known.setdefault(name, fingerprint) == fingerprint, name
    return known


def same(restored: dict[str, str], ended: dict[str, str]) -> None:
    assert restored.keys() == ended.keys()
    assert [name for name in ended if restored[name] != ended[name]] == []


def test_every_value_is_in_some_case() -> None:
    for axis, values in enumerate((BEGIN, *AXES[1:])):
        assert {case[axis] for case in CASES} == {each for each in values if axis or runs_here(each)}
