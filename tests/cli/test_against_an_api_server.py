"""The commands work against an API server, as the shell runs them.

Against the real one they do so as a user with the chart's viewer role alone, too.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import recorded
from tests.cli.shown import Ran, run
from tests.operator.kubernetes.proxy import service_account_kubeconfig
from tiercheck_cli.commands import complete
from tiercheck_local.client import open_local
from tiercheck_local.controlplane import ControlPlane, write_kubeconfig

ROOT = Path(__file__).parents[2]
NAME, NAMESPACE = recorded.NAME, recorded.NAMESPACE
Tiercheck = Callable[..., Ran]


@pytest.fixture
def tiercheck(filled: Path) -> Tiercheck:
    def call(*words: str) -> Ran:
        return run(*words, env={"KUBECONFIG": str(filled)})

    return call


def test_one_job_is_shown(tiercheck: Tiercheck) -> None:
    ran = tiercheck("status", NAME, "-n", NAMESPACE, "--wide").well()
    assert f"{NAMESPACE}/{NAME}  Running" in ran.out
    assert "gpt-large-5-2" in ran.out
    assert "rack-3" in ran.out
    assert "RemoteForbidden" in ran.out


def test_all_jobs_of_a_namespace_and_of_all_namespaces_are_listed(tiercheck: Tiercheck) -> None:
    assert NAME in tiercheck("status", "-n", NAMESPACE).out
    everywhere = tiercheck("status", "-A")
    assert NAMESPACE in everywhere.out
    nowhere = tiercheck("status", "-n", "default")
    assert (nowhere.status, nowhere.out.strip()) == (0, "")
    assert 'no TierCheckJob in namespace "default"; try -A' in nowhere.err


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_get_what_the_screen_shows(tiercheck: Tiercheck, form: str) -> None:
    read = json.loads if form == "json" else yaml.safe_load
    told = read(tiercheck("status", NAME, "-n", NAMESPACE, "-o", form).out)
    assert (told["phase"], told["step"], len(told["members"])) == ("Running", 12480, 8)
    assert (told["wantedWorkers"], told["tiers"][1]["lagSteps"]) == (8, 1)
    planned = read(tiercheck("plan", NAME, "-n", NAMESPACE, "-o", form).out)
    assert planned["tolerates"] == ["any one rack", "any one host"]
    assert planned["workers"][5]["holders"] == [4]
    explained = read(tiercheck("explain", NAME, "-n", NAMESPACE, "--if", "zone=zone-a", "-o", form).out)
    assert explained["answers"][0]["remoteNeeded"] is True
    events = read(tiercheck("events", NAME, "-n", NAMESPACE, "-o", form).out)
    assert [entry["reason"] for entry in events["events"]][-1] == "Recovered"


def test_names_of_jobs_are_completed(tiercheck: Tiercheck, filled: Path) -> None:
    words = ["explain", "--kubeconfig", str(filled), f"--namespace={NAMESPACE}"]
    assert complete([*words, NAME[:3]]) == [NAME]
    assert complete([*words, "x"]) == []


def test_events_and_recoveries_come_in_order_of_time_and_nothing_twice(tiercheck: Tiercheck) -> None:
    ran = tiercheck("events", NAME, "-n", NAMESPACE)
    reasons = [line.split()[2] for line in ran.out.splitlines() if line.startswith("20")]
    assert reasons == ["RemoteForbidden", "NodeLost", "AttemptStarted", "TrainingReleased", "Recovered"]


def test_watching_shows_the_screen_again_until_it_is_interrupted(
    tiercheck: Tiercheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(2))

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("tiercheck_cli.status.command.time.sleep", sleep)
    ran = tiercheck("status", NAME, "-n", NAMESPACE, "--watch").well()
    assert ran.out.count(f"{NAMESPACE}/{NAME}  Running") == 3
    assert "Ctrl-C to leave" in ran.out


def test_a_running_job_can_be_simulated_as_it_is_placed(tiercheck: Tiercheck) -> None:
    ran = tiercheck("simulate", NAME, "-n", NAMESPACE, "--runs", "2", "--days", "1", "-o", "json").well()
    told = json.loads(ran.out)
    assert told["workers"] == 8
    assert any("a step takes 1.91 s" in sentence for sentence in told["assumed"])
    assert NAME in told["measured"][0]
    assert any("node: noticed after" in sentence for sentence in told["measured"])


def test_a_bug_report_holds_everything_but_secrets(tiercheck: Tiercheck, tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    ran = tiercheck("export", NAME, "-n", NAMESPACE, "--to", str(path)).well()
    assert ran.out.strip() == str(path)
    with tarfile.open(path) as archive:
        files = {}
        for member in archive.getmembers():
            assert member.mode == 0o600
            content = archive.extractfile(member)
            assert content is not None
            files[member.name.partition("/")[2]] = content.read().decode()
    assert {
        "README.txt",
        "job.yaml",
        "status.txt",
        "plan.txt",
        "explain.txt",
        "events.txt",
        "placement.yaml",
        "nodes.yaml",
    } <= set(files)
    assert sum(name.startswith("pods/") for name in files) == 8
    assert "a-secret-in-plain-sight" not in "".join(files.values())
    assert "WANDB_API_KEY" in files["job.yaml"]
    assert "survives" in files["status.txt"]
    assert "logs/gpt-large-0-0" in files["README.txt"]  # nothing runs here, and the gap is named
    again = tiercheck("export", NAME, "-n", NAMESPACE, "--to", str(path))
    assert (again.status, again.err) == (2, f"error: {path} is there already; give another name with --to\n")


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (
            ("status", "nobody", "-n", NAMESPACE),
            3,
            f'there is no TierCheckJob "nobody" in namespace "{NAMESPACE}"',
        ),
        (("plan", "nobody"), 3, 'there is no TierCheckJob "nobody" in namespace "default"'),
        (("status", NAME, "-A"), 2, "a job is in one namespace"),
        (("status", "--watch", "-o", "json"), 2, "--watch is for people"),
        (("status", "--context", "mars"), 2, "no cluster to talk to"),
        (("plan",), 2, "give the name of a job in the cluster, or a job's file"),
        (("plan", NAME, "-f", "job.yaml"), 2, "not both"),
        (("plan", f"{ROOT}/examples/first-job.yaml"), 2, "is a file, and no job of the cluster"),
        (("plan", "-f", "job.yaml"), 2, "say on which nodes"),
        (
            ("plan", "-f", "nowhere.yaml", "--made-up", "2x2"),
            2,
            "nowhere.yaml cannot be read: No such file or directory",
        ),
        (("plan", "-f", "-", "--nodes", "-"), 2, "only one of -f and --nodes can be standard input"),
        (("explain", "-f", "x.yaml"), 2, "say on which nodes"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_an_exit_status(
    tiercheck: Tiercheck, words: tuple[str, ...], status: int, complaint: str
) -> None:
    ran = tiercheck(*words)
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 1
    assert complaint in ran.err


def test_a_server_that_is_not_there_is_said_and_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, "http://127.0.0.1:1", "", b"")
    ran = run("status", "-A", env={"KUBECONFIG": str(path)})
    assert ran.status == 4
    assert ran.err.startswith("error: the API server http://127.0.0.1:1 does not answer")
    assert len(ran.err.splitlines()) == 1


def test_token_that_no_header_can_hold_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, "http://127.0.0.1:1", "plainword\nmore", b"")
    ran = run("status", "-A", env={"KUBECONFIG": str(path)})
    assert ran.status == 4
    assert "Look at the token in the kubeconfig" in ran.err
    assert "plainword" not in ran.err


def test_without_any_kubeconfig_it_is_said_what_to_set(tmp_path: Path) -> None:
    ran = run("status", env={"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)})
    assert ran.status == 2
    assert "Set KUBECONFIG, or give --kubeconfig and --context" in ran.err


def test_the_charts_viewer_role_is_enough_and_gives_nothing_away(
    plane: ControlPlane, filled: Path, tmp_path: Path
) -> None:
    if type(plane).__name__ != "RealControlPlane":
        pytest.skip("only a real API server keeps anybody from anything")
    from tests.chart.releases import of_kind

    role = next(each for each in of_kind("ClusterRole") if each["metadata"]["name"].endswith("-viewer"))
    viewer = _bound(filled, role, tmp_path)

    def call(*words: str) -> Ran:
        return run(*words, "-n", NAMESPACE, env={"KUBECONFIG": str(viewer)})

    for words in (
        ("status", NAME),
        ("status", NAME, "--wide"),
        ("plan", NAME),
        ("explain", NAME),
        ("events", NAME),
        ("status",),
    ):
        ran = call(*words)
        assert (ran.status, ran.err) == (0, ""), words
    assert "rack rack-1" in call("plan", NAME).out  # although nodes may not be read
    assert "worker 1 from 0" in call("explain", NAME, "--if", "rack=rack-1").out
    assert call("export", NAME, "--to", str(tmp_path / "report")).status == 0
    assert "nodes.yaml" in (tmp_path / "report" / "README.txt").read_text()
    elsewhere = run("status", "-A", env={"KUBECONFIG": str(viewer)})
    assert elsewhere.status == 4
    assert "Ask for the chart's role tiercheck-viewer" in elsewhere.err
    assert {"secrets", "nodes"}.isdisjoint({thing for rule in role["rules"] for thing in rule["resources"]})


def _bound(admin: Path, role: dict[str, Any], folder: Path) -> Path:
    """The kubeconfig of a service account that has this role in the namespace of the recorded job, and no
    other."""
    api = open_local(admin)
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    try:
        api.request("POST", f"{rbac}/clusterroles", role)
        api.request("POST", accounts, {"metadata": {"name": "looker"}})
        binding = {
            "metadata": {"name": "looker"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role["metadata"]["name"],
            },
            "subjects": [{"kind": "ServiceAccount", "name": "looker", "namespace": NAMESPACE}],
        }
        api.request("POST", f"{rbac}/namespaces/{NAMESPACE}/rolebindings", binding)
    finally:
        api.close()
    return service_account_kubeconfig(admin, NAMESPACE, "looker", folder / "viewer")
