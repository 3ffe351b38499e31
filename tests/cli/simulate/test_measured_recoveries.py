"""What statuses tell of recoveries becomes the times of a simulation, and nonsense becomes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tiercheck.protocol.directive import Tier
from tiercheck_cli.simulate.scenario import CAUSES, KINDS, RecoveryTimes, measure, measured_recoveries
from tiercheck_operator.model.conditions import Cause

USUAL = RecoveryTimes()
LEVELS = ("zone", "rack", "host")


def recovery(attempt: int, cause: str, *spans: float, **tiers: int) -> dict[str, Any]:
    detect, restore, total = spans
    return {
        "attempt": attempt, "cause": cause, "tiers": tiers or {"local": 4},
        "detectSeconds": detect, "restoreSeconds": restore, "totalSeconds": total,
    }  # fmt: skip


def job(*told: dict[str, Any], step: float = 0.5, **status: Any) -> dict[str, Any]:
    return {"status": {"recoveries": list(told), "progress": {"stepSeconds": step}} | status}


CRASH = recovery(2, "TrainerCrash", 0.2, 2.0, 8.0)
EVICTED = recovery(3, "PodEvicted", 0.8, 9.0, 18.0, local=3, peer=1)
SILENT = recovery(4, "NodeSilent", 8.0, 12.0, 26.0, local=3, peer=1)
ALL_LOST = recovery(5, "AllPodsLost", 1.0, 25.0, 40.0, remote=4)


def times(*told: dict[str, Any], **status: Any) -> RecoveryTimes:
    return measure(measured_recoveries([job(*told, **status)]), USUAL).for_levels(LEVELS)


def test_the_parts_of_each_kind_add_up_to_what_its_recoveries_took() -> None:
    found = times(CRASH, EVICTED, SILENT, ALL_LOST)
    for kind, tier, total in (
        ("process", Tier.LOCAL, 8.0),
        ("pod", Tier.PEER, 18.0),
        ("host", Tier.PEER, 26.0),
        ("all", Tier.REMOTE, 40.0),
    ):
        parts = found.of(kind)
        wait = 0.0 if kind == "process" else parts.replace
        restore = getattr(parts.restore, tier.value)
        # The end of the first new step is told; the step itself is training.
        assert parts.detect + wait + restore + parts.restart == pytest.approx(total - 0.5)


def test_each_kind_of_failure_is_noticed_as_fast_as_it_was() -> None:
    found = times(CRASH, EVICTED, SILENT)
    assert [found.of(kind).detect for kind in ("process", "pod", "host")] == [0.2, 0.8, 8.0]


def test_what_was_not_seen_is_taken_from_the_likest_and_said_so() -> None:
    found = measure(measured_recoveries([job(CRASH, SILENT)]), USUAL)
    by_level = found.for_levels(LEVELS)
    assert by_level.of("rack").detect == by_level.of("host").detect == 8.0
    assert by_level.of("pod").replace == by_level.of("host").replace
    told = " ".join(found.derived)
    for part in ("domain: as for node", "pod: as for node", "restore from the remote tier: 120 s, assumed"):
        assert part in told


def test_a_job_with_spares_tells_of_spares() -> None:
    quick = recovery(3, "PodDeleted", 0.3, 3.0, 10.0, local=3, peer=1)
    found = times(CRASH, quick, spares={"wanted": 1, "ready": 1})
    assert found.of("pod").spare <= 3.0
    assert found.of("pod").replace == USUAL.replace


def test_several_recoveries_of_a_kind_give_their_mean() -> None:
    slow = recovery(6, "OOMKilled", 0.4, 4.0, 12.0)
    found = times(CRASH, slow)
    assert found.of("process").restore.local == 3.0
    assert found.of("process").detect == pytest.approx(0.3)


def test_every_cause_is_one_that_a_status_tells() -> None:
    assert {cause for causes in CAUSES.values() for cause in causes} < {cause.value for cause in Cause}


def test_recoveries_that_a_limit_of_the_job_decides_are_left_out() -> None:
    for cause in (Cause.HUNG, Cause.DIVERGED, Cause.RESTORE_FAILED, Cause.GROWN, Cause.FIRST_START):
        assert measured_recoveries([job(recovery(2, cause.value, 1.0, 2.0, 30.0))]) == ()


def test_the_last_recovery_counts_where_the_status_keeps_no_others_and_once_where_it_does() -> None:
    assert len(measured_recoveries([{"status": {"lastRecovery": CRASH}}])) == 1
    assert len(measured_recoveries([{"status": {"lastRecovery": CRASH, "recoveries": [CRASH]}}])) == 1


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "attempt": nonsense,
        "cause": st.sampled_from([cause.value for cause in Cause]) | nonsense,
        "tiers": st.dictionaries(st.sampled_from(["local", "peer", "remote"]), nonsense) | nonsense,
        "detectSeconds": st.floats() | nonsense,
        "restoreSeconds": st.floats() | nonsense,
        "totalSeconds": st.floats() | nonsense,
    },
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "status": st.fixed_dictionaries(
                    {"recoveries": st.lists(entries | nonsense, max_size=4) | nonsense},
                    optional={"lastRecovery": entries | nonsense, "progress": nonsense, "spares": nonsense},
                )
                | nonsense
            },
            optional={"spec": nonsense},
        )
        | nonsense,
        max_size=3,
    )
)
def test_whatever_a_status_holds_the_times_are_spans(jobs: list[object]) -> None:
    found = measure(measured_recoveries(jobs), USUAL)
    assert set(found.times.kinds) == set(KINDS)
    for parts in found.times.kinds.values():
        restore = parts.restore
        spans = (parts.detect, parts.replace, parts.spare, parts.restart, *vars(restore).values())
        assert all(0 <= span < 1e9 for span in spans)
        assert restore.local <= restore.remote or not found.counts
