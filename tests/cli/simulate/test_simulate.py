"""`simulate` answers without a cluster, the same for the same seed, and up to ten thousand nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.shown import run
from tests.examples import examples
from tiercheck.protocol.directive import Tier
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.layout import made_up_nodes, plan_layout, planned_spec, read_job
from tiercheck_cli.simulate.assumptions import published_failures, settings, shared_domain_rate
from tiercheck_cli.simulate.scenario import CAUSES, KINDS, RecoveryTimes, measure, measured_recoveries
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.spec import JobSpec

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("simulate", "-f", str(EXAMPLES / "realistic.yaml"), "--made-up", "8x8", "--workers", "64")
QUICK = ("--runs", "10", "--days", "5")


def base() -> JobSpec:
    return planned_spec(read_job(str(EXAMPLES / "realistic.yaml"))["spec"])


NO_FAILURES = {"nodeFailures": 0, "processFailures": 0, "domainFailures": {}}
CRASHES_ALONE = NO_FAILURES | {"processFailures": 500}


def answers(*words: str, assume: dict[str, object] | None = None) -> dict:  # type: ignore[type-arg]
    """`assume`: the content of the file of assumptions."""
    read = () if assume is None else ("--assume", "-")
    ran = run(*SMALL, *words, *read, "-o", "json", stdin=yaml.safe_dump(assume)).well()
    return dict(json.loads(ran.out))


def test_ten_thousand_nodes_are_simulated_and_the_same_seed_gives_the_same_answer() -> None:
    large = ("simulate", "-f", str(EXAMPLES / "realistic.yaml"), "--made-up", "5x50x40", "--workers", "10000")
    first, second = (run(*large, "--runs", "2", "--days", "3", "-o", "json") for _ in range(2))
    assert first.status == 0
    assert first.out == second.out
    told = json.loads(first.out)
    assert (told["workers"], told["nodes"]) == (10_000, 10_000)
    assert 0 < told["settings"][0]["ettr"] < 1


def test_a_file_chooses_the_record_and_says_sizes_and_times() -> None:
    assume = {"failures": "llama-3", "stepSeconds": 2, "stateSize": "64Gi", "peerBandwidth": 2**30}
    words = " ".join(answers(*QUICK, assume=assume)["assumed"])
    for expected in ("arXiv:2407.21783", "a step takes 2 s", "s from a peer"):
        assert expected in words


def test_another_seed_gives_other_lives() -> None:
    one, other = (answers(*QUICK, "--seed", seed)["settings"][0]["runs"] for seed in ("1", "2"))
    assert one != other


def test_how_the_work_is_portioned_does_not_change_the_lives() -> None:
    few, many = (answers("--days", "5", "--runs", runs)["settings"][0]["runs"] for runs in ("3", "12"))
    assert many[:3] == few


def test_settings_meet_the_same_failures_so_that_only_the_setting_makes_the_difference() -> None:
    as_it_is, alone = answers(*QUICK, "--compare", "copies=0")["settings"]
    assert as_it_is["failuresPerLife"] == alone["failuresPerLife"]
    assert as_it_is["ettr"] > alone["ettr"]


def test_without_failures_a_job_trains_all_the_time() -> None:
    told = answers(*QUICK, assume={"nodeFailures": 0, "processFailures": 0})
    assert told["failuresPerDay"] == 0
    assert [row["ettr"] for row in told["settings"]] == [1.0]
    assert told["storeOnly"]["ettr"] == 1.0


def test_failures_a_day_are_the_sum_of_what_is_told() -> None:
    rates = {"nodeFailures": 10, "processFailures": 30, "domainFailures": {"rack": 100}}
    told = answers(*QUICK, assume=rates)
    assert told["failuresPerDay"] == pytest.approx((64 * 10 + 64 * 30 + 8 * 100) / 1000)


@pytest.mark.parametrize("name", sorted(published_failures()))
def test_domains_have_the_share_of_all_failures_that_the_record_says(name: str) -> None:
    layout = plan_layout(read_job(str(EXAMPLES / "realistic.yaml")), made_up_nodes("2x2"))
    counted = published_failures()[name]
    rate = shared_domain_rate(counted, layout)
    of_domains, of_nodes = 2 * rate, 4 * (counted.node + counted.process)
    assert of_domains / (of_domains + of_nodes) == pytest.approx(counted.domain_share)


def test_the_record_of_llama_3_adds_up_to_its_419_interruptions() -> None:
    counted = published_failures()["llama-3"]
    others = counted.node + counted.process
    assert others / (1 - counted.domain_share) * 54 * 2048 / 1000 == pytest.approx(419, rel=0.01)


@pytest.mark.parametrize(
    ("name", "count", "nodes", "days"), [("byterobust", 175, 1200, 90), ("ft-hsdp-100k", 80, 12_288, 1)]
)
def test_records_add_up_to_the_failures_that_were_counted(
    name: str, count: int, nodes: int, days: int
) -> None:
    counted = published_failures()[name]
    others = counted.node + counted.process
    found = others / (1 - counted.domain_share) * days * nodes / 1000
    assert found == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_says_what_was_assumed(width: int, tmp_path: Path) -> None:
    lost = told_recovery("NodeSilent", 8.0, 12.0, 30.0, "peer")
    ran = run(
        *SMALL, *QUICK, "--compare", "copies=0,1,2 parity=4+1 spares=2 deltas=off",
        "--measured", str(measured_file(tmp_path, lost)), columns=width,
    ).well()  # fmt: skip
    assert max(map(len, ran.out.splitlines())) <= width
    words = " ".join(ran.out.split())
    for expected in ("as it is: copies=1", "parity=4+1", "ETTR", "arXiv:2410.21680", "Daly's formula"):
        assert expected in words


def told_recovery(cause: str, detect: float, restore: float, total: float, tier: str) -> dict[str, object]:
    return {
        "attempt": 2, "cause": cause, "tiers": {tier: 4}, "detectSeconds": detect, "restoreSeconds": restore,
        "totalSeconds": total,
    }  # fmt: skip


def measured_file(folder: Path, *told: dict[str, object]) -> Path:
    """As `kubectl get tcj -o json` writes it."""
    jobs = [
        {
            "kind": "TierCheckJob",
            "metadata": {"name": f"job-{number}"},
            "status": {"progress": {"stepSeconds": 1.0}, "recoveries": [each]},
        }
        for number, each in enumerate(told)
    ]
    path = folder / "measured.json"
    path.write_text(json.dumps({"kind": "List", "items": jobs}))
    return path


def test_the_times_of_recoveries_that_happened_are_used_and_said(tmp_path: Path) -> None:
    crash = told_recovery("TrainerCrash", 0.5, 2.5, 10.0, "local")
    lost = told_recovery("NodeSilent", 8.0, 12.0, 30.0, "peer")
    path = measured_file(tmp_path, crash, lost)
    told = answers(*QUICK, "--measured", str(path), assume=CRASHES_ALONE)
    words = " ".join(told["measured"])
    assert "2 recoveries of job-0, job-1" in words
    assert "1 x process: noticed after 0.5 s" in words
    row = told["settings"][0]
    # 10 s up to the end of the first step, of which that step is 1 s of training.
    assert row["downSecondsPerLife"] / row["failuresPerLife"]["process"] == pytest.approx(9.0, rel=0.01)


def test_what_the_file_says_of_a_part_goes_before_what_was_measured(tmp_path: Path) -> None:
    path = measured_file(tmp_path, told_recovery("TrainerCrash", 0.5, 2.5, 10.0, "local"))
    told = answers(*QUICK, "--measured", str(path), assume=CRASHES_ALONE | {"restartSeconds": 20})
    row = told["settings"][0]
    assert row["downSecondsPerLife"] / row["failuresPerLife"]["process"] == pytest.approx(23.0, rel=0.01)
    assert "assumed: restart 20 s" in told["measured"]


def test_without_a_recovery_everything_is_assumed_and_nothing_is_called_measured(tmp_path: Path) -> None:
    told = answers(*QUICK, "--measured", str(measured_file(tmp_path, {"cause": 7})))
    assert told["measured"] == []
    assert told["settings"] == answers(*QUICK)["settings"]


def test_moves_of_pods_are_failures_of_one_pod_each() -> None:
    told = answers("--runs", "10", "--days", "10", assume=NO_FAILURES | {"movesPerDay": 24})
    assert told["failuresPerDay"] == pytest.approx(24)
    assert told["settings"][0]["failuresPerLife"]["pod"] == pytest.approx(240, rel=0.1)


def test_one_thing_is_changed_at_a_time() -> None:
    rows = settings(base(), ["copies=0,1 parity=4+1", "remote=none", "deltas=off"])
    assert list(rows) == ["as it is: copies=1", "copies=0", "parity=4+1", "remote=none", "deltas=off"]
    assert (rows["parity=4+1"].parity, rows["parity=4+1"].copies) == ((4, 1), 0)
    assert (rows["remote=none"].copies, rows["remote=none"].remote_every) == (1, None)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("copies", '"copies" compares nothing'),
        ("copies=", '"copies=" compares nothing'),
        ("copies=many", "must be a whole number"),
        ("copies=4", "needs more than 4 workers"),
        ("parity=4", '"4" is no parity'),
        ("snapshot=0", "must be a whole number, 1 or more"),
        ("deltas=maybe", "cannot be compared"),
        ("colour=red", "cannot be compared"),
        ("level=moon", "cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_can(asked: str, complaint: str) -> None:
    with pytest.raises(CannotDo, match=complaint) as refusal:
        settings(base(), [asked])
    assert refusal.value.status == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--measured", "/nonexistent.json"), "/nonexistent.json"),
        (("--measured", str(EXAMPLES / "clusters" / "uneven-racks.yaml")), "kubectl get tcj -o json"),
        (("--assume", "/nonexistent.yaml"), "/nonexistent.yaml"),
        (("--compare", "parity=4+1", "--workers", "4"), "spec.tiers.peer"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(words: tuple[str, ...], complaint: str) -> None:
    is_refused(words, "", complaint)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("failures: mars", "known are rsc-1, rsc-2, llama-3, byterobust"),
        ("domainFailures: {moon: 1}", '"moon" is no level of the job, as zone, rack are'),
        ("domainFailures: {rack: often}", "domainFailures.rack: expected float, found str"),
        ("domainFailures: {rack: -1}", "domainFailures must be 0 or more"),
        ("nodeFailures: .inf", "nodeFailures must be 0 or more, and finite"),
        ("stepSeconds: 0", "stepSeconds must be 0.001 or more"),
        ("stateSize: big", "stateSize: not a quantity: 'big'; say it as 24Gi"),
        ("peerBandwidth: 0", "peerBandwidth must be above zero"),
        ("nodefailures: 3", '"nodefailures" cannot be assumed; what can be is failures, nodeFailures'),
        ("- rsc-1", "is not one list of assumptions"),
        ("", "is not one list of assumptions"),
    ],
)
def test_assumptions_that_make_no_sense_are_refused_in_one_line(content: str, complaint: str) -> None:
    is_refused(("--assume", "-"), content, complaint)


def is_refused(words: tuple[str, ...], typed: str, complaint: str) -> None:
    ran = run(*SMALL, "--runs", "1", "--days", "1", *words, stdin=typed)
    assert ran.status in (1, 2)
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert complaint in ran.err
    assert len(ran.err.splitlines()) == 1


# What statuses tell of recoveries becomes the times of a simulation, and nonsense becomes nothing.

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


@hypothesis.settings(max_examples=examples(200), deadline=None)
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
