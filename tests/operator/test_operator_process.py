"""The real operator process against an API server: what it makes, what it leaves, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kopf
import pytest

from tests.access import load
from tests.cluster.jobs import Replicas
from tests.operator.kubernetes.proxy import deaf_to_watches
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.markers import free_ports
from tiercheck_operator.app import Operator, end_by_signal
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.kubernetes.election import Terms
from tiercheck_operator.kubernetes.object_reader import Access

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs"
DEADLINE = 90.0


def job(name: str, *, namespace: str = "default", **spec: Any) -> dict[str, Any]:
    template = {
        "spec": {"containers": [{"name": "trainer", "image": "i", "command": [sys.executable, "-c", "pass"]}]}
    }
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"workers": 2, "template": template, **spec},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Without nodes: pods stay Pending, so only the operator's own doing is seen."""
    with LocalCluster(tmp_path_factory.mktemp("cluster"), []) as started:
        started.apply_crds(ROOT / "crds")
        started.start_operator()
        yield started


def owned(cluster: LocalCluster, name: str) -> list[str]:
    """Everything that carries the job's label."""
    found = []
    for kind in ("pods", "services", "secrets", "configmaps"):
        path = f"/api/v1/namespaces/default/{kind}?labelSelector=tiercheck.io/job={name}"
        found += [
            f"{kind}/{entry['metadata']['name']}" for entry in cluster.api.request("GET", path)["items"]
        ]
    return sorted(found)


def condition(cluster: LocalCluster, name: str, kind: str) -> dict[str, Any]:
    status = cluster.api.request("GET", f"{JOBS}/{name}").get("status") or {}
    return next((entry for entry in status.get("conditions") or [] if entry["type"] == kind), {})


def gone(cluster: LocalCluster, name: str) -> bool:
    try:
        cluster.api.request("GET", f"{JOBS}/{name}")
    except ApiFailure as failure:
        return failure.status == 404
    return False


def test_job_gets_its_belongings_and_says_why_it_waits(cluster: LocalCluster) -> None:
    cluster.apply(job("first"))
    cluster.wait_for(
        lambda: condition(cluster, "first", "Placed").get("reason") == "Unschedulable", DEADLINE, "reason"
    )
    placed = condition(cluster, "first", "Placed")
    assert placed["status"] == "False"
    assert "Add nodes" in placed["message"]
    assert owned(cluster, "first") == [
        "pods/first-0-0",
        "pods/first-1-0",
        "secrets/first-credentials",
        "services/first",
    ]
    metadata = cluster.api.request("GET", f"{JOBS}/first")["metadata"]
    assert "finalizers" not in metadata
    assert not [key for key in metadata.get("annotations") or {} if "kopf" in key or "tiercheck" in key]


def test_pod_that_the_server_refuses_is_explained_until_the_template_is_mended(cluster: LocalCluster) -> None:
    wrong = job("refused")
    wrong["spec"]["template"]["metadata"] = {"labels": {"team": "no spaces allowed"}}
    cluster.apply(wrong)
    cluster.wait_for(
        lambda: condition(cluster, "refused", "Placed").get("reason") == "Refused", DEADLINE, "reason"
    )
    assert "no spaces allowed" in condition(cluster, "refused", "Placed")["message"]
    wrong["spec"]["template"]["metadata"] = {"labels": {"team": "a"}}
    cluster.apply(wrong)
    cluster.wait_for(lambda: "pods/refused-1-0" in owned(cluster, "refused"), DEADLINE, "pods")


def test_operator_killed_and_restarted_changes_nothing(cluster: LocalCluster) -> None:
    cluster.apply(job("steady"))
    cluster.wait_for(lambda: len(owned(cluster, "steady")) == 4, DEADLINE, "belongings")
    before = cluster.api.request("GET", "/api/v1/namespaces/default/secrets/steady-credentials")
    assert cluster.operator is not None
    cluster.operator.kill()
    cluster.operator.wait()
    cluster.start_operator()
    cluster.apply(job("later"))
    cluster.wait_for(lambda: len(owned(cluster, "later")) == 4, DEADLINE, "the new operator to work")
    assert owned(cluster, "steady") == [
        "pods/steady-0-0", "pods/steady-1-0", "secrets/steady-credentials", "services/steady",
    ]  # fmt: skip
    after = cluster.api.request("GET", "/api/v1/namespaces/default/secrets/steady-credentials")
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    assert before["data"] == after["data"]


def test_suspended_job_has_no_pods_until_it_is_resumed(cluster: LocalCluster) -> None:
    cluster.apply(job("queued", suspend=True))
    cluster.wait_for(
        lambda: condition(cluster, "queued", "Suspended").get("status") == "True", DEADLINE, "suspension"
    )
    assert not [entry for entry in owned(cluster, "queued") if entry.startswith("pods/")]
    cluster.apply(job("queued", suspend=False))
    cluster.wait_for(lambda: len(owned(cluster, "queued")) == 4, DEADLINE, "pods")
    assert condition(cluster, "queued", "Suspended")["status"] == "False"


def test_job_of_another_controller_is_left_alone(cluster: LocalCluster) -> None:
    cluster.apply(job("foreign", managedBy="kueue.x-k8s.io/multikueue"))
    cluster.apply(job("native"))
    cluster.wait_for(lambda: len(owned(cluster, "native")) == 4, DEADLINE, "the operator to have seen both")
    assert owned(cluster, "foreign") == []
    assert "status" not in cluster.api.request("GET", f"{JOBS}/foreign")


def test_deleted_job_leaves_nothing_even_while_the_operator_is_down(cluster: LocalCluster) -> None:
    cluster.apply(job("brief"))
    cluster.wait_for(lambda: len(owned(cluster, "brief")) == 4, DEADLINE, "belongings")
    assert cluster.operator is not None
    cluster.operator.kill()
    cluster.operator.wait()
    cluster.api.request("DELETE", f"{JOBS}/brief")
    cluster.wait_for(
        lambda: gone(cluster, "brief") and not owned(cluster, "brief"), DEADLINE, "everything to be gone"
    )
    cluster.start_operator()


def test_operator_runs_as_a_user_without_an_entry_in_etc_passwd(tmp_path: Path) -> None:
    """As in its image, where nobody knows user 65532."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pwd\ndef nobody(uid): raise KeyError(f'getpwuid(): uid not found: {uid}')\npwd.getpwuid "
        "= nobody\n"
    )
    unnamed = {name: "" for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME")}
    with LocalCluster(tmp_path / "cluster", []) as fresh:
        fresh.apply_crds(ROOT / "crds")
        fresh.start_operator({**unnamed, "PYTHONPATH": str(tmp_path)})
        fresh.apply(job("first"))
        fresh.wait_for(lambda: len(owned(fresh, "first")) == 4, DEADLINE, "the job to be served")


def test_probes_and_metrics_answer_and_sigterm_ends_the_process(cluster: LocalCluster) -> None:
    def page(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{cluster.metrics_address}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    cluster.apply(job("seen"))
    cluster.wait_for(lambda: page("/readyz"), DEADLINE, "readiness")
    assert page("/healthz")
    cluster.wait_for(lambda: 'tiercheck_job="seen"' in page("/metrics"), DEADLINE, "the job's series")
    cluster.api.request("DELETE", f"{JOBS}/seen")
    cluster.wait_for(
        lambda: 'tiercheck_job="seen"' not in page("/metrics"), DEADLINE, "the series to go with the job"
    )
    assert cluster.operator is not None
    cluster.operator.send_signal(signal.SIGTERM)
    assert cluster.operator.wait(timeout=DEADLINE) == 0
    cluster.start_operator()


async def test_sigterm_is_the_operators_own_and_not_its_frameworks(tmp_path: Path) -> None:
    """kopf would close the watches, wait five seconds and cancel the loops of the jobs before the lease is
    handed over."""
    with LocalCluster(tmp_path, []) as fresh:
        fresh.apply_crds(ROOT / "crds")
        server = load(fresh.kubeconfig).server
        access = Access(lambda: kopf.ConnectionInfo(server=server))
        stop = asyncio.Event()
        end_by_signal(stop)
        operator = Operator(Config(metrics_host="127.0.0.1", metrics_port=free_ports(1)[0]), access)
        running = asyncio.create_task(operator.run(stop))
        async with asyncio.timeout(DEADLINE):
            await operator._watching.wait()
            signal.raise_signal(signal.SIGTERM)
            await running
        assert stop.is_set()


def test_watches_are_tried_again_sooner_than_a_leader_stops_without_its_lease() -> None:
    """Else one that has its lease again after an outage decides for long by what was before it."""
    access = Access(lambda: kopf.ConnectionInfo(server="http://127.0.0.1:1"))
    gaps = Operator(Config(), access)._settings().networking.error_backoffs
    assert isinstance(gaps, tuple)
    assert max(gaps) < Terms().renew_within
    usual = kopf.OperatorSettings().networking.error_backoffs
    assert isinstance(usual, tuple)
    assert sum(gaps) >= sum(usual), "an API server that answers 503 may take as long as before"


def test_leader_that_is_told_to_end_hands_over_at_once(tmp_path: Path) -> None:
    """Long before its lease would have run out, which takes ten minutes here."""
    env = {"TIERCHECK_LEASE": "default/tiercheck", "TIERCHECK_LEASE_SECONDS": "600"}
    with LocalCluster(tmp_path, []) as fresh:
        fresh.apply_crds(ROOT / "crds")
        replicas = Replicas(fresh, env)
        first = replicas.start()
        assert replicas.leader() is first
        fresh.apply(job("first"))
        fresh.wait_for(lambda: len(owned(fresh, "first")) == 4, DEADLINE, "belongings")
        lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/tiercheck"
        # A replica of shorter terms looks more often, and still respects the longer ones.
        second = Replicas(fresh, {**env, "TIERCHECK_LEASE_SECONDS": "8"}).start()
        assert not second.leads
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(timeout=DEADLINE) == 0
        fresh.wait_for(lambda: second.leads, DEADLINE, "the other one to lead")
        held = fresh.api.request("GET", lease)["spec"]
        assert held["leaseTransitions"] == 1
        fresh.apply(job("second"))
        fresh.wait_for(lambda: len(owned(fresh, "second")) == 4, DEADLINE, "the new leader to work")
        assert 'tiercheck_job="first"' in second.page("/metrics")


def test_deaf_watch_is_noticed_and_deletions_that_it_missed_are_made_up_for(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path, []) as quiet,
        deaf_to_watches(quiet.kubeconfig, tmp_path / "deaf") as kubeconfig,
    ):
        quiet.apply_crds(ROOT / "crds")
        quiet.apply(job("early"))
        env = {
            "KUBECONFIG": str(kubeconfig),
            "TIERCHECK_WATCH_CHECK_SECONDS": "1",
            "TIERCHECK_WATCH_GRACE_SECONDS": "3",
        }
        replica = Replicas(quiet, env).start()
        quiet.wait_for(
            lambda: 'tiercheck_job="early"' in replica.page("/metrics"),
            DEADLINE,
            "the job to be seen in the list",
        )
        quiet.api.request("DELETE", f"{JOBS}/early")
        quiet.wait_for(
            lambda: 'tiercheck_job="early"' not in replica.page("/metrics"),
            DEADLINE,
            "the job to be forgotten",
        )
        quiet.apply(job("late"))
        quiet.wait_for(
            lambda: not replica.page("/healthz"), DEADLINE, "the operator to notice that it is deaf"
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{replica.address}/healthz", timeout=10)
        assert "the watch of TierCheckJob is deaf" in caught.value.read().decode()


@pytest.mark.parametrize("namespaces", ["", "default"])
def test_operator_may_be_installed_before_the_definition_of_its_jobs(tmp_path: Path, namespaces: str) -> None:
    with LocalCluster(tmp_path, []) as early:
        operator = early.start_operator({"TIERCHECK_NAMESPACES": namespaces})
        log = early.logs / "operator.log"
        early.wait_for(
            lambda: names.KIND.lower() in log.read_text().lower(), DEADLINE, "the operator to miss its kind"
        )
        assert operator.poll() is None
        early.apply_crds(ROOT / "crds")
        early.apply(job("first"))
        early.wait_for(lambda: len(owned(early, "first")) == 4, DEADLINE, "the job to be served")
        operator.send_signal(signal.SIGTERM)
        assert operator.wait(timeout=DEADLINE) == 0
