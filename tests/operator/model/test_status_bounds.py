"""A status never outgrows its object, and what decisions rest on is never cut."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from tests.operator.world_in_memory import START, World
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.controller.attempt.readiness import add_summary
from tiercheck_operator.model import conditions
from tiercheck_operator.model.limits import LIMIT, bytes_of, fit_status, longest_cut
from tiercheck_operator.model.status import (
    CheckpointRecord,
    Condition,
    Facts,
    FailedStartRecord,
    HangRecord,
    JobRecord,
    MemoryRecord,
    PlacementRecord,
    PlaceRecord,
    ProofRecord,
    Recovery,
    SparesRecord,
    TierRecord,
    parse_record,
    render_record,
    rfc3339,
)

TYPES = [
    conditions.PLACED, conditions.PROTECTED, conditions.RESTORING, conditions.RUNNING, conditions.SUSPENDED,
    conditions.COMPLETED, conditions.FAILED, conditions.DELTAS_ACTIVE, conditions.SPARES_READY,
    conditions.EVICTABLE,
    conditions.THROTTLED, conditions.REMOTE_SAFE,
    "Another",
]  # fmt: skip
BIG = 2**31 - 1


def worst(letter: str = "\N{GREEK SMALL LETTER OMEGA}") -> JobRecord:
    """A job of 10,000 workers with every field at its limit at once."""
    summary = {
        "attempt": BIG, "cause": "C" * 64, "message": letter * 1000, "rule": "r" * 63,
        "reason": letter * 1000,
        "tiers": {"local": 640_000, "peer": 640_000, "remote": 640_000}, "deltas": BIG, "rebuilt": 640_000,
        "step": BIG,
        "lostSteps": BIG, "detectSeconds": 123456.789, "restoreSeconds": 123456.789,
        "totalSeconds": 123456.789,
        "time": rfc3339(START),
    }  # fmt: skip
    history: tuple[object, ...] = ()
    for _ in range(20):
        history = add_summary(history, summary)  # type: ignore[arg-type, assignment]
    tier = TierRecord(BIG, rfc3339(START), BIG)
    return JobRecord(
        observed_generation=BIG, attempt=BIG, phase="Restoring", members="m" * 64, sidecar_image="i" * 1024,
        history=History(tuple(Branch(BIG + n, BIG + n) for n in range(100))),
        crashes=BIG, counted=BIG, crash_step=BIG, disruptions=BIG, step=BIG, step_seconds=123456.789012,
        tiers=dict.fromkeys(("local", "peer", "remote"), tier),
        proofs=dict.fromkeys(("local", "peer", "remote"), ProofRecord(BIG, rfc3339(START))),
        placement=PlacementRecord("h" * 64, "l" * 32, tuple("t" * 40 for _ in range(16)), 10_000, "u" * 512),
        spares=SparesRecord(256, 256), checkpoint=CheckpointRecord(BIG, "EveryStep", letter * 1000),
        memory=MemoryRecord(*[2**60] * 4), hang=HangRecord(9999, "n" * 253, BIG),
        places=tuple(PlaceRecord("n" * 253, BIG, letter * 300, START, START) for _ in range(8)),
        failed_start=FailedStartRecord(9999, "n" * 253, BIG, (9999,) * 32),
        recovery=Recovery(
            "C" * 64, letter * 1000, START, START, BIG, letter * 1000, BIG, BIG, BIG, START, START, START,
            tuple(Version(BIG, BIG) for _ in range(16)),
            Facts(255, tuple("R" * 64 for _ in range(16)), tuple("n" * 63 for _ in range(16))), "r" * 63, BIG,
            BIG, START, undone=True,
        ),
        last_recovery=summary, recoveries=history,  # type: ignore[arg-type]
        started=rfc3339(START), completed=rfc3339(START),
        conditions=tuple(Condition(kind, True, "R" * 24, letter * 4000, rfc3339(START),
            BIG) for kind in TYPES),
    )  # fmt: skip


def test_worst_case_of_every_field_fits_and_keeps_what_decisions_rest_on() -> None:
    for letter in ("x", "\N{GREEK SMALL LETTER OMEGA}"):
        before = worst(letter)
        assert bytes_of(render_record(before)) > 3 * LIMIT
        after, raw = fit_status(before)
        assert bytes_of(raw) <= LIMIT
        assert parse_record(render_record(after)) == parse_record(
            json.loads(json.dumps(render_record(after)))
        )
        assert after.history == before.history
        assert before.recovery is not None
        assert after.recovery is not None
        sentences = {"message": "", "reason": ""}
        assert dataclasses.replace(after.recovery, **sentences) == dataclasses.replace(
            before.recovery, **sentences
        )
        assert [(c.type, c.status, c.reason) for c in after.conditions] == [
            (c.type, c.status, c.reason) for c in before.conditions
        ]
        assert all(len(c.message) >= 40 for c in after.conditions)
        assert after.last_recovery is not None


def test_one_long_message_is_left_whole_and_a_usual_status_is_not_touched() -> None:
    world = World()
    world.until("Running")
    assert fit_status(world.status)[0] == world.status
    long = Condition(conditions.PLACED, False, "R", "m" * 4000, rfc3339(START))
    record = dataclasses.replace(world.status, conditions=(long, *world.status.conditions[1:]))
    assert fit_status(record)[0] == record


def test_what_was_bounded_is_not_cut_again() -> None:
    once, _ = fit_status(worst())
    assert fit_status(once)[0] == once


@given(st.lists(st.integers(0, 5000), max_size=16), st.integers(0, 20_000))
def test_room_is_shared_so_that_only_the_long_ones_give_way(lengths: list[int], total: int) -> None:
    most = longest_cut(lengths, total)
    assert sum(min(length, most) for length in lengths) <= total or sum(lengths) <= total
    if sum(lengths) > total:
        assert sum(min(length, most + 1) for length in lengths) > total
    else:
        assert all(length <= most for length in lengths)


def test_every_condition_tells_which_generation_of_the_spec_it_is_about() -> None:
    world = World()
    world.until("Running")
    world.job = dataclasses.replace(world.job, generation=7)
    world.tick()
    assert {entry.observed_generation for entry in world.status.conditions} == {7}
