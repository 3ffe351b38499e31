"""The status screen says how a job is, and the troubleshooting guide explains each reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli import recorded
from tests.cli.shown import matches, rendered
from tiercheck_cli.status.command import jobs_table, screen
from tiercheck_cli.status.view import StatusView, guide, status_view, worker_views
from tiercheck_operator.model import conditions
from tiercheck_operator.planning.topology import PRESETS, Topology
from tiercheck_sidecar.remote.errors import Reason


def view(wide: bool = True) -> StatusView:
    topology = Topology.build(
        {node["metadata"]["name"]: node["metadata"]["labels"] for node in recorded.nodes()},
        PRESETS["generic"],
    )
    members = worker_views(recorded.pods(), recorded.HOLDERS, topology) if wide else ()
    return status_view(recorded.job(), recorded.NOW, members, topology.level_names[:-1])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_job_in_trouble_on_screens_of_several_widths(width: int) -> None:
    shown = rendered(screen(view(), width, wide=True), width)
    assert max(map(len, shown.splitlines())) <= width
    matches(f"status-{width}", shown)


def test_a_job_in_trouble_without_its_workers() -> None:
    matches("status-narrow-80", rendered(screen(view(wide=False), 80), 80))


def test_a_job_fits_on_one_screen_of_24_lines_while_nothing_is_wrong() -> None:
    job = recorded.job()
    job["status"]["conditions"] = [c for c in job["status"]["conditions"] if c["type"] != "Protected"]
    shown = rendered(screen(status_view(job, recorded.NOW), 80), 80)
    assert "needs attention" not in shown
    assert len(shown.splitlines()) < 24


def test_a_job_that_goes_on_smaller_says_so_in_its_first_line_and_why_below() -> None:
    job = recorded.job()
    job["status"]["size"] = {"workers": job["spec"]["workers"] - 1}
    told = "15 of 16 workers: no node takes gpt-spare-0"
    job["status"]["conditions"] = [recorded.condition("FullSize", "False", "Shrunk", told, 60)]
    shown = rendered(screen(status_view(job, recorded.NOW), 100), 100)
    assert f"· {job['spec']['workers'] - 1} of {job['spec']['workers']} workers" in shown.splitlines()[0]
    assert told in shown
    assert "add some" in shown


def test_a_job_that_the_operator_has_not_seen_is_shown_too() -> None:
    job = recorded.job()
    del job["status"]
    shown = rendered(screen(status_view(job, recorded.NOW), 80), 80)
    assert "Pending" in shown
    assert "nothing is placed yet" in shown
    assert "nothing yet" in shown


def test_what_needs_a_person_comes_with_the_advice_of_the_troubleshooting_guide() -> None:
    (attention,) = view().attention
    entry = guide().get("RemoteForbidden")
    assert entry is not None
    assert attention.reason == "RemoteForbidden"
    assert attention.advice == entry.advice


def test_restore_under_way_shows_how_much_is_back_and_how_fast() -> None:
    job = recorded.job()
    job["status"]["progress"] |= {"restoredBytes": 3 * 2**30, "restoreBytes": 4 * 2**30}
    job["status"]["recovery"] = {"cause": "NodeLost", "decidedAt": recorded.at(6)}
    shown = rendered(screen(status_view(job, recorded.NOW), 80), 80)
    assert "restored  75 %   3.0 GiB of 4.0 GiB, 512 MiB/s" in shown
    assert "  restored  " not in rendered(screen(status_view(recorded.job(), recorded.NOW), 80), 80)


def test_pods_that_are_pulled_for_a_minute_alarm_nobody_and_after_two_they_do() -> None:
    job = recorded.job()
    for ago, expected in ((30, 0), (180, 1)):
        job["status"]["conditions"] = [
            recorded.condition("Placed", "False", "WaitingForPods", "pulling", ago)
        ]
        attention = status_view(job, recorded.NOW).attention
        assert len(attention) == expected
    assert attention[0].advice.startswith("kubectl describe pod")


def test_every_worker_is_told_with_its_newest_pod_and_its_domains() -> None:
    old = recorded.pods()[5]
    old["metadata"]["name"], old["metadata"]["labels"]["tiercheck.io/incarnation"] = "gpt-large-5-0", "0"
    topology = Topology.build(
        {node["metadata"]["name"]: node["metadata"]["labels"] for node in recorded.nodes()},
        PRESETS["generic"],
    )
    members = worker_views([old, *recorded.pods()], recorded.HOLDERS, topology)
    assert [member.worker for member in members] == list(range(8))
    assert (members[5].pod, members[5].replaced, members[5].domains) == (
        "gpt-large-5-2",
        2,
        ("zone-a", "rack-1"),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_all_jobs_in_a_table(width: int) -> None:
    matches(f"status-all-{width}", rendered(jobs_table([view(False)], everywhere=True), width))


def test_names_in_square_brackets_are_shown_and_not_interpreted() -> None:
    job = recorded.job()
    job["status"]["conditions"] = [
        recorded.condition("Placed", "False", "Unschedulable", "0/8 [red]nodes[/red]", 200)
    ]
    assert "0/8 [red]nodes[/red]" in rendered(screen(status_view(job, recorded.NOW), 80), 80)


def test_job_whose_copies_are_not_made_yet_promises_nothing_and_says_what_it_will() -> None:
    job = recorded.job()
    placement = job["status"]["placement"]
    del placement["tolerance"]
    placement |= {"tolerates": [], "toleratesOnceComplete": ["any one rack", "any one host"]}
    shown = rendered(screen(status_view(job, recorded.NOW), 80), 80)
    assert "survives  nothing yet; once its copies are made, the loss of any one rack" in shown


@pytest.mark.parametrize("exact", ["Proven", "NotComparable", "Differs"])
def test_result_of_the_last_resume_is_shown_with_its_reason(exact: str) -> None:
    job = recorded.job()
    job["status"]["lastRecovery"] = recorded.LAST | {"exact": exact, "exactMessage": "worker 2, loss [2.5]"}
    found = status_view(job, recorded.NOW)
    shown = rendered(screen(found, 80), 80)
    words = {"Proven": "proven", "NotComparable": "unproven", "Differs": "differs"}
    assert f"resume    {words[exact]}   worker 2, loss [2.5]" in shown
    assert found.as_json(recorded.NOW)["recoveries"][0]["exact"] == exact


def test_message_that_the_guide_says_to_read_needs_attention() -> None:
    """As that of a restore that fails again and again, or of restarts that are used up."""
    read = {reason: entry for reason, entry in guide().items() if entry.advice.startswith("Read")}
    assert {"Retrying", "MaxRestartsExceeded", "BudgetRefused"} <= read.keys()
    assert all(entry.calls_for_action(0.0) for entry in read.values())


def test_resume_that_differs_needs_attention_and_one_that_had_nothing_to_compare_does_not() -> None:
    job = recorded.job()
    for value, reason in (("False", "Differs"), ("Unknown", "NotComparable"), ("True", "Proven")):
        job["status"]["conditions"] = [recorded.condition("Exact", value, reason, "m", 20)]
        attention = status_view(job, recorded.NOW).attention
        assert [entry.reason for entry in attention] == (["Differs"] if reason == "Differs" else [])


def crashed(**spec: object) -> str:
    """The screen of a job that has failed."""
    job = recorded.job()
    job["spec"] |= spec
    job["spec"]["tiers"].pop("remote", None)
    told = "the training command of worker 1 ended with exit code 3: CUDA error: out of memory"
    job["status"] = {"phase": "Failed", "conditions": [
        recorded.condition("Failed", "True", "MaxRestartsExceeded", told, 60)
    ]}  # fmt: skip
    return rendered(screen(status_view(job, recorded.NOW), 200), 200)


def test_why_a_job_failed_stands_once_on_its_screen() -> None:
    assert crashed().count("CUDA error: out of memory") == 1


def test_tiers_that_a_job_lacks_are_not_waited_for_and_no_advice_counts_on_them() -> None:
    shown = crashed()
    assert shown.count("not configured") == 1
    assert "goes on from there" not in shown
    alone = crashed(workers=1, tiers={"local": {"sizeLimit": "1Gi"}})
    assert [line.split()[1] for line in alone.splitlines() if "not configured" in line] == ["peer", "remote"]


@pytest.mark.parametrize(
    ("message", "which"),
    [
        ("the sidecar of worker 3 in pod a-3-12 is gone", "-l tiercheck.io/job=gpt,tiercheck.io/worker=3"),
        ("the sidecar of worker 3 in pod gpt-3-12 does not answer", "gpt-3-12"),
        ("gpt-spare-0-1: nothing", "gpt-spare-0-1"),
        ("nobody answers", "-l tiercheck.io/job=gpt"),
    ],
)  # fmt: skip
def test_command_in_an_advice_names_namespace_and_pod(message: str, which: str) -> None:
    entry = guide().get("SidecarNotAnswering")
    assert entry is not None
    advice = entry.advise("team-a", "gpt", message, remote=True)
    assert f"kubectl logs -n team-a {which} -c tiercheck-sidecar" in advice


ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
CONDITIONS, _, _ = GUIDE.partition("\n## Events\n")
TYPES = {
    "Placed",
    "Protected",
    "DeltasActive",
    "SparesReady",
    "FullSize",
    "Throttled",
    "RemoteSafe",
    "Exact",
    "Evictable",
    "InProcess",
    "Restoring",
    "Running",
    "Suspended",
    "Completed",
    "Failed",
}

OF_CONDITIONS = {value for name, value in vars(conditions).items() if name.isupper()} - TYPES
OF_SIDECARS = {f"Remote{reason.value}" for reason in Reason} | set(
    re.findall(
        r'\.problem\(\s*"(\w+)"',
        "".join(path.read_text() for path in (ROOT / "sidecar" / "tiercheck_sidecar").rglob("*.py")),
    )
)
EXPLAINED = {
    item.group(1): (item.group(2).strip(), (item.group(3) or "Nothing.").strip())
    for item in re.finditer(
        r"^- `(\w+)`: (.+?)(?:\s\*\*Do:\*\*\s(.+?))?(?=\n- |\n\n|\Z)", CONDITIONS, re.MULTILINE | re.DOTALL
    )
}


@pytest.mark.parametrize("reason", sorted(OF_CONDITIONS | OF_SIDECARS))
def test_every_reason_is_explained_with_what_to_do(reason: str) -> None:
    assert reason in EXPLAINED, f"docs/operate/troubleshooting.md does not explain {reason}"
    meaning, advice = EXPLAINED[reason]
    assert meaning.endswith(".")
    assert advice.endswith(".")
    assert reason in guide()


def test_nothing_is_explained_that_cannot_happen() -> None:
    assert len(EXPLAINED) > 30
    assert set(EXPLAINED) <= OF_CONDITIONS | OF_SIDECARS
