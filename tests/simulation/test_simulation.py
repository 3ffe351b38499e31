"""Promises hold under faults from seeds, which replay exactly, and the checker finds bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import examples
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.plan import FIRST_BRISK, FIRST_SHORT, FIRST_SMALL
from tests.simulation.runs import RAISES, digest_of, find, history_of, kept_seeds, run, tell

ROOT = Path(__file__).parents[2]
OFTEN = ("falling watermark", "one too few")
"""Bugs that show at once. `make simulate-mutations` looks for all."""


@pytest.mark.parametrize("seed", range(FIRST_SHORT, FIRST_SHORT + examples(14)))
def test_promises_hold_in_any_schedule(seed: int) -> None:
    outcome = run(seed)
    assert not outcome.broken, tell(seed)


@pytest.mark.parametrize("first", range(FIRST_BRISK, FIRST_BRISK + 400, 100))
def test_promises_hold_in_four_hundred_of_the_default_mix(first: int) -> None:
    for seed in range(first, first + 100):
        assert not run(seed).broken, tell(seed)


@pytest.mark.extended
@pytest.mark.parametrize(
    "first",
    [*range(FIRST_SHORT + 1000, FIRST_SHORT + 2000, 50), *range(FIRST_BRISK + 400, FIRST_BRISK + 1000, 50)],
)
def test_promises_hold_in_a_thousand_schedules_more(first: int) -> None:
    for seed in range(first, first + 50):
        assert not run(seed).broken, tell(seed)


@pytest.mark.parametrize(("seed", "why"), kept_seeds().items())
def test_what_once_failed_does_not_fail_again(seed: int, why: str) -> None:
    assert not run(seed).broken, f"{why}\n{tell(seed)}"


@pytest.mark.parametrize("seed", [3, 20100, FIRST_SMALL + 4, FIRST_BRISK + 4])
def test_same_seed_gives_the_same_history_in_every_process(seed: int) -> None:
    """The first has no bucket, the second has one, the others are small. In a process that does nothing else,
    values are made quicker."""
    code = (
        "import sys; sys.path.insert(0, 'tests/operator'); "
        "from tests.simulation.runs import digest_of, history_of, use_process; use_process(); "
        f"print(digest_of(history_of({seed})))"
    )
    here = digest_of(history_of(seed))
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == here == digest_of(history_of(seed))
    assert here != digest_of(history_of(seed + 1))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_deliberate_bug_still_fits_what_it_patches(mutation: Mutation) -> None:
    """An exception would be of the patch, and find nothing."""
    with mutation.made():
        broken = run(FIRST_BRISK + 1).broken
    assert RAISES not in {each.promise for each in broken}, broken


@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if each.name in OFTEN], ids=lambda each: each.name
)
def test_deliberate_bug_is_found(mutation: object) -> None:
    found = find(mutation, most=20)  # type: ignore[arg-type]
    assert found.seed is not None
    assert not run(found.seed).broken, "without the bug nothing is wrong there"
