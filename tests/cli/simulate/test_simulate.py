"""`simulate` answers without a cluster, the same for the same seed, and up to ten thousand nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands_run import run
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.files import made_up_nodes, read_job
from tiercheck_cli.layout import plan_layout, wanted_of
from tiercheck_cli.simulate.assumptions import RECORDS, shared_domain_rate
from tiercheck_cli.simulate.settings import settings
from tiercheck_operator.planning.wanted import Wanted

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("simulate", "-f", str(EXAMPLES / "realistic.yaml"), "--made-up", "8x8", "--workers", "64")
QUICK = ("--runs", "10", "--days", "5")


def base() -> Wanted:
    return wanted_of(read_job(str(EXAMPLES / "realistic.yaml"))["spec"])


def answers(*words: str) -> dict:  # type: ignore[type-arg]
    ran = run(*SMALL, *words, "-o", "json")
    assert ran.status == 0, ran.err
    return dict(json.loads(ran.out))


def test_ten_thousand_nodes_are_simulated_and_the_same_seed_gives_the_same_answer() -> None:
    large = ("simulate", "-f", str(EXAMPLES / "realistic.yaml"), "--made-up", "5x50x40", "--workers", "10000")
    first, second = (run(*large, "--runs", "2", "--days", "3", "-o", "json") for _ in range(2))
    assert first.status == 0
    assert first.out == second.out
    told = json.loads(first.out)
    assert (told["workers"], told["nodes"]) == (10_000, 10_000)
    assert 0 < told["settings"][0]["ettr"] < 1


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
    told = answers(*QUICK, "--node-failures", "0", "--process-failures", "0")
    assert told["failuresPerDay"] == 0
    assert [row["ettr"] for row in told["settings"]] == [1.0]
    assert told["storeOnly"]["ettr"] == 1.0


def test_failures_a_day_are_the_sum_of_what_is_told() -> None:
    told = answers(
        *QUICK, "--node-failures", "10", "--process-failures", "30", "--domain-failures", "rack=100"
    )
    assert told["failuresPerDay"] == pytest.approx((64 * 10 + 64 * 30 + 8 * 100) / 1000)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_domains_have_the_share_of_all_failures_that_the_record_says(name: str) -> None:
    layout = plan_layout(read_job(str(EXAMPLES / "realistic.yaml")), made_up_nodes("2x2"))
    counted = RECORDS[name]
    rate = shared_domain_rate(
        counted,
        node=counted.node,
        process=counted.process,
        sites=layout.sites,
        topology=layout.topology,
        level="rack",
    )
    of_domains, of_nodes = 2 * rate, 4 * (counted.node + counted.process)
    assert of_domains / (of_domains + of_nodes) == pytest.approx(counted.domain_share)


def test_the_record_of_llama_3_adds_up_to_its_419_interruptions() -> None:
    counted = RECORDS["llama-3"]
    others = counted.node + counted.process
    assert others / (1 - counted.domain_share) * 54 * 2048 / 1000 == pytest.approx(419, rel=0.01)


@pytest.mark.parametrize(
    ("name", "count", "nodes", "days"), [("byterobust", 175, 1200, 90), ("ft-hsdp-100k", 80, 12_288, 1)]
)
def test_records_add_up_to_the_failures_that_were_counted(
    name: str, count: int, nodes: int, days: int
) -> None:
    counted = RECORDS[name]
    others = counted.node + counted.process
    found = others / (1 - counted.domain_share) * days * nodes / 1000
    assert found == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_says_what_was_assumed(width: int, tmp_path: Path) -> None:
    lost = told_recovery("NodeSilent", 8.0, 12.0, 30.0, "peer")
    ran = run(
        *SMALL, *QUICK, "--compare", "copies=0,1,2 parity=4+1 spares=2 deltas=off", "--sensitivity",
        "--measured", str(measured_file(tmp_path, lost)), columns=width,
    )  # fmt: skip
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= width
    words = " ".join(ran.out.split())
    for expected in ("as it is: copies=1", "parity=4+1", "ETTR", "arXiv:2410.21680", "Daly's formula"):
        assert expected in words


def test_a_picture_is_drawn_and_is_the_same_again(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        ran = run(*SMALL, "--runs", "2", "--days", "2", "--sensitivity", "--picture", str(path))
        assert ran.status == 0, ran.err
        assert f"drawn: {path}" in ran.err
    assert paths[0].read_text().startswith("<?xml")
    assert paths[0].read_bytes() == paths[1].read_bytes()


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
    rates = ("--node-failures", "0", "--process-failures", "500", "--domain-failures", "rack=0")
    told = answers(*QUICK, *rates, "--measured", str(path))
    words = " ".join(told["measured"])
    assert "2 recoveries of job-0, job-1" in words
    assert "1 x process: noticed after 0.5 s" in words
    row = told["settings"][0]
    # 10 s up to the end of the first step, of which that step is 1 s of training.
    assert row["downSecondsPerLife"] / row["failuresPerLife"]["process"] == pytest.approx(9.0, rel=0.01)


def test_what_the_command_line_says_of_a_part_goes_before_what_was_measured(tmp_path: Path) -> None:
    path = measured_file(tmp_path, told_recovery("TrainerCrash", 0.5, 2.5, 10.0, "local"))
    rates = ("--node-failures", "0", "--process-failures", "500", "--domain-failures", "rack=0")
    told = answers(*QUICK, *rates, "--measured", str(path), "--restart-seconds", "20")
    row = told["settings"][0]
    assert row["downSecondsPerLife"] / row["failuresPerLife"]["process"] == pytest.approx(23.0, rel=0.01)
    assert "as told: restart 20 s" in told["measured"]


def test_without_a_recovery_everything_is_assumed_and_nothing_is_called_measured(tmp_path: Path) -> None:
    told = answers(*QUICK, "--measured", str(measured_file(tmp_path, {"cause": 7})))
    assert told["measured"] == []
    assert told["settings"] == answers(*QUICK)["settings"]


def test_the_second_that_buys_most_comes_first() -> None:
    told = answers(*QUICK, "--sensitivity")["sensitivity"]
    gains = [each["gain"] for each in told]
    assert gains == sorted(gains, reverse=True)
    by_part = {(each["part"], each["by"]): each["gain"] for each in told}
    # A restart follows every failure, a restore from a peer only some, and a store's is hardly ever needed.
    assert by_part["restart", "1 s less"] > by_part["restore, peer", "1 s less"]
    assert by_part["restore, peer", "1 s less"] > by_part["restore, remote", "1 s less"] >= 0


def test_moves_of_pods_are_failures_of_one_pod_each() -> None:
    rates = ("--node-failures", "0", "--process-failures", "0", "--domain-failures", "rack=0")
    told = answers("--runs", "10", "--days", "10", *rates, "--moves", "24")
    assert told["failuresPerDay"] == pytest.approx(24)
    assert told["settings"][0]["failuresPerLife"]["pod"] == pytest.approx(240, rel=0.1)


def test_one_thing_is_changed_at_a_time() -> None:
    rows = settings(base(), ["copies=0,1 parity=4+1", "remote=none", "deltas=off"])
    assert [row.name for row in rows] == [
        "as it is: copies=1",
        "copies=0",
        "parity=4+1",
        "remote=none",
        "deltas=off",
    ]
    assert rows[2].wanted.parity == (4, 1)
    assert rows[2].wanted.copies == 0
    assert rows[3].wanted.copies == 1
    assert rows[3].wanted.remote_every is None


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
        (("--failures", "mars"), "known are rsc-1, rsc-2, llama-3, byterobust"),
        (("--domain-failures", "moon=1"), "must be LEVEL=RATE, with a level of the job: zone, rack"),
        (("--domain-failures", "rack=often"), "with a number"),
        (("--domain-failures", "rack=-1"), "must not be negative"),
        (("--state-size", "big"), "--state-size: not a quantity: 'big'; say it as 24Gi"),
        (("--measured", "/nonexistent.json"), "/nonexistent.json"),
        (("--measured", str(EXAMPLES / "clusters" / "uneven-racks.yaml")), "kubectl get tcj -o json"),
        (("--picture", "sim.gif"), "must end with .svg, .png or .pdf"),
        (("--picture", "/nonexistent/sim.svg"), "cannot be written"),
        (("--compare", "parity=4+1", "--workers", "4"), "spec.tiers.peer"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(words: tuple[str, ...], complaint: str) -> None:
    ran = run(*SMALL, "--runs", "1", "--days", "1", *words)
    assert ran.status in (1, 2)
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert complaint in ran.err
    assert len(ran.err.splitlines()) == 1
