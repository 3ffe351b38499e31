"""Promise: whatever feeds a training, its resume is equal, refused or told, and never silently other.

A stop leaves one step to be trained again, which is what tells of data that nobody keeps the position of.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integrations import data_matrix
from tests.integrations.test_frameworks import needed
from tests.lives import Lives, Said
from tests.trainer.restore.covering import Case, covering

AXES = (
    ("plain", "huggingface", "lightning", "accelerate"),
    ("map", "iterable", "stateful"),
    ("0", "2", "persistent"),
    ("set_epoch", "no set_epoch"),
    ("in epoch 1", "at its end", "in epoch 3"),
    ("1", "3"),
)
"""Framework, data, workers, epochs, stop, accumulation."""
CASES = covering(AXES, lambda case: True, [(0, 1, 2), (0, 1, 4), (2, 4), (0, 3), (3, 4), (0, 5), (4, 5)])
"""Every kind of data with every worker and at every stop, in each framework; each pair of the others."""
FEW = covering(AXES, lambda case: True, [(0, 1)])[::2]
MODULES = {
    "plain": [],
    "accelerate": ["accelerate"],
    "huggingface": ["transformers"],
    "lightning": ["lightning"],
}
SCRIPT = Path(data_matrix.__file__)
pytestmark = pytest.mark.timeout(3600)


def live(lives: Lives, case: Case, folder: Path, kill_at: int | None = None) -> Said:
    framework, data, workers, epochs, _, accumulation = case
    stop = [] if kill_at is None else [kill_at]
    argv = [SCRIPT, framework, data, workers, epochs, accumulation, folder, *stop]
    (said,) = lives.run(MODULES[framework], argv, kill_at=kill_at)
    return said


def outcome(lives: Lives, case: Case, folder: Path) -> str:
    """`equal`, `told`, or `silent` for a resume that differs without a word."""
    per_epoch = data_matrix.SAMPLES // data_matrix.BATCH // int(case[-1])
    stop = {"in epoch 1": 3, "at its end": per_epoch + 1, "in epoch 3": 2 * per_epoch + 3}[case[-2]]
    whole = {line["step"]: line["loss"] for line in live(lives, case, folder / "whole") if "step" in line}
    # A trainer calls the callback that says a step before the step is over.
    live(lives, case, folder / "cut", kill_at=stop + (case[0] in ("huggingface", "lightning")))
    resumed = live(lives, case, folder / "cut")
    steps = {line["step"]: line["loss"] for line in resumed if "step" in line}
    assert min(steps) == stop, "the version before the stop was restored, and one step is trained again"
    if steps == {step: loss for step, loss in whole.items() if step >= stop}:
        return "equal"
    return (
        "told"
        if any("differs from the life before" in line.get("told", "") for line in resumed)
        else "silent"
    )


@pytest.mark.parametrize("case", FEW, ids=", ".join)
def test_resume_is_equal_or_told(case: Case, lives: Lives, tmp_path: Path) -> None:
    needed({"plain": "plain-loop"}.get(case[0], case[0]))
    assert outcome(lives, case, tmp_path) != "silent"


@pytest.mark.extended
def test_every_combination_is_equal_or_told(lives: Lives, tmp_path: Path) -> None:
    found = {case: outcome(lives, case, tmp_path / str(number)) for number, case in enumerate(CASES)}
    for (framework, how), count in sorted(Counter((case[0], how) for case, how in found.items()).items()):
        print(f"{framework}: {count} {how}")  # the table of docs/use/exactness.md
    assert [case for case, how in found.items() if how == "silent"] == []
