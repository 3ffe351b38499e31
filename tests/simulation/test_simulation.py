"""Promises hold under faults from seeds, which replay exactly, and the checker finds bugs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.examples import examples
from tests.simulation.checker import Entry, check
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.plan import FIRST_BRISK, FIRST_SHORT, FIRST_SMALL, FIRST_STAYING
from tests.simulation.runs import RAISES, digest_of, find, history_of, kept_seeds, run, tell
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Kind, Version

ROOT = Path(__file__).parents[2]
OFTEN = ("falling watermark", "one too few", "doubled orders", "late leavers")
"""Bugs that show at once. `make simulate-mutations` looks for all."""


@pytest.mark.parametrize("seed", range(FIRST_SHORT, FIRST_SHORT + examples(14)))
def test_promises_hold_in_any_schedule(seed: int) -> None:
    outcome = run(seed)
    assert not outcome.broken, tell(seed)


LATER = [pytest.param(first, marks=pytest.mark.extended) for first in (FIRST_BRISK + 200, FIRST_BRISK + 300)]


@pytest.mark.parametrize("first", [FIRST_BRISK, FIRST_BRISK + 100, *LATER])
def test_promises_hold_in_four_hundred_of_the_default_mix(first: int) -> None:
    for seed in range(first, first + 100):
        assert not run(seed).broken, tell(seed)


@pytest.mark.parametrize(
    ("first", "count"),
    [(FIRST_STAYING, 10), pytest.param(FIRST_STAYING + 10, 30, marks=pytest.mark.extended)],
)
def test_promises_hold_where_processes_outlive_their_attempt(first: int, count: int) -> None:
    """Whether orders to ranks are lost, late or doubled, or what ranks say to that."""
    seen = set()
    for seed in range(first, first + count):
        history = history_of(seed)
        assert not check(history), tell(seed)
        seen |= {what for _, what, _ in history}
    assert {"superseded", "interrupted", "left", "joined"} <= seen


@pytest.mark.extended
@pytest.mark.parametrize(
    "first",
    [
        *range(FIRST_SHORT + 1000, FIRST_SHORT + 2000, 50),
        *range(FIRST_BRISK + 400, FIRST_BRISK + 1000, 50),
        *range(FIRST_STAYING + 40, FIRST_STAYING + 540, 50),
    ],
)
def test_promises_hold_in_a_thousand_schedules_more(first: int) -> None:
    for seed in range(first, first + 50):
        assert not run(seed).broken, tell(seed)


@pytest.mark.parametrize(("seed", "why"), kept_seeds().items())
def test_what_once_failed_does_not_fail_again(seed: int, why: str) -> None:
    assert not run(seed).broken, f"{why}\n{tell(seed)}"


@pytest.mark.parametrize("seed", [3, 20100, FIRST_SMALL + 4, FIRST_BRISK + 4, FIRST_STAYING + 4])
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
    """An exception would be of the patch, and find nothing: also one of a call that this schedule lacks."""
    for where, name, patch in mutation.patches():
        if callable(real := getattr(where, name)):
            taken = inspect.signature(real).parameters.values()
            named = {each.name: None for each in taken if each.kind is each.KEYWORD_ONLY}
            placed = [None for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
            inspect.signature(patch).bind(*placed, **named)
    with mutation.made():
        broken = run(max(FIRST_BRISK, mutation.first) + 1).broken
    assert RAISES not in {each.promise for each in broken}, broken


@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if each.name in OFTEN], ids=lambda each: each.name
)
def test_deliberate_bug_is_found(mutation: object) -> None:
    found = find(mutation, most=20)  # type: ignore[arg-type]
    assert found.seed is not None
    assert not run(found.seed).broken, "without the bug nothing is wrong there"


CRASH_OF_A_JOB_WITH_ALL_TIERS = 10_000_561
"""Seed of a small schedule with a copy and a bucket, in which one command crashes."""


@pytest.mark.parametrize("mark", ["local", "peer", "snapshot", "remote"])
def test_mark_that_is_ahead_of_what_there_is_is_found(mark: str) -> None:
    """Seven steps, in the first verdict that has it: whichever mark it is."""

    def ahead(at: float, what: str, fields: dict[str, object]) -> Entry:
        known = fields.get(mark) if what == "verdict" else None
        if isinstance(known, Version) and not done:
            done.append(known)
            fields = {**fields, mark: replace(known, step=known.step + 7)}
        return at, what, fields

    done: list[Version] = []
    assert "complete is complete" in broken_by(ahead)
    assert done


@pytest.mark.parametrize("tier", ["local", "peer"])
def test_snapshot_that_counts_and_is_not_there_is_found(tier: str) -> None:
    def ahead(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "counted" and not done:
            held = cast(tuple[tuple[Tier, int, Kind, Version], ...], fields["held"])
            done.extend(each for each in held if each[0].value == tier)
            more = [(*each[:3], replace(each[3], step=each[3].step + 7)) for each in done]
            fields = {**fields, "held": (*held, *more)}
        return at, what, fields

    done: list[tuple[Tier, int, Kind, Version]] = []
    assert "what counts is there" in broken_by(ahead)
    assert done


def test_snapshot_that_is_freed_while_it_counts_is_found() -> None:
    """By its own memory's loop, before any version that rests on it was announced."""

    def early(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "counted":
            held = cast(tuple[tuple[Tier, int, Kind, Version], ...], fields["held"])
            counts[str(fields["pod"])] = held[-1:] if held[-1:] and held[-1][0].value == "local" else ()
        if what == "verdict" and not done and any(counts.values()):
            pod, held = next((pod, held) for pod, held in counts.items() if held)
            done.append(pod)
            return at, "freed", {"pod": pod, "what": held, "by": "reclaim"}
        return at, what, fields

    counts: dict[str, tuple[tuple[Tier, int, Kind, Version], ...]] = {}
    done: list[str] = []
    assert "what counts is there" in broken_by(early)


@pytest.mark.parametrize(("seconds", "broken"), [(0.2, []), (3.0, ["committed is kept"])])
def test_copy_may_be_given_up_until_it_is_known_that_its_new_holder_lost_the_other(
    seconds: float, broken: list[str]
) -> None:
    """A fault took that one, although the pod is there still."""
    version = Version(1, 1)
    own, copy = ((tier, 0, Kind.SNAPSHOT, version) for tier in (Tier.LOCAL, Tier.PEER))
    marks = {"local": version, "peer": version, "snapshot": version, "remote": None}
    history: list[Entry] = [
        (0.0, "begins", {"workers": 1, "copies": 1, "keep": 0, "prove": 0}),
        (1.0, "attempt", {"number": 1, "version": None, "heard": ()}),
        *((2.0, "sealed", {"pod": pod, "what": copy}) for pod in ("old", "new")),
        (2.0, "sealed", {"pod": "owner", "what": own}),
        (3.0, "verdict", {"by": "owner", "attempt": 1, "placement": "new", **marks}),
        (4.0, "freed", {"pod": "new", "what": (copy,), "by": "fault"}),
        (4.0 + seconds, "freed", {"pod": "old", "what": (copy,), "by": "reclaim"}),
    ]
    assert [each.promise for each in check(history)] == broken


def test_attempt_number_that_is_given_twice_is_found() -> None:
    """With a version of that number itself, which leads back to itself."""

    def again(at: float, what: str, fields: dict[str, object]) -> Entry:
        if what == "attempt" and fields["number"] == 2:
            assert isinstance(fields["version"], Version)
            assert fields["version"].attempt == 1
            fields = {**fields, "number": 1}
        return at, what, fields

    assert "one history" in broken_by(again)


def broken_by(change: Callable[[float, str, dict[str, object]], Entry]) -> set[str]:
    """The promises that the changed history breaks; as it was, it breaks none."""
    history = history_of(CRASH_OF_A_JOB_WITH_ALL_TIERS)
    assert not check(history)
    return {each.promise for each in check([change(*entry) for entry in history])}
