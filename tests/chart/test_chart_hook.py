"""`helm test` says what is wrong with an operator; a real API server reserves what makes a worker."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.access import REAL_SERVER
from tests.chart.releases import ACCOUNT, NAMESPACE, ROOT, install, objects, of_kind, only
from tests.operator.kubernetes.proxy import JOBS, post, service_account_kubeconfig, short_job
from tests.sidecar.remote.s3 import faulty_proxy
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import ApiFailure
from tiercheck_operator.metrics import Metrics


def command() -> list[str]:
    (container,) = only("Pod")["spec"]["containers"]
    assert container["command"][0] == "python3"
    return [sys.executable, *container["command"][1:]]


def run(url: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """The pod's command, against another address and with another patience."""
    *script, address, patience = command()
    assert address.startswith("http://")
    assert float(patience) > 0
    return subprocess.run(
        [*script, url, str(seconds)], capture_output=True, text=True, check=False, timeout=60
    )


def serving(pages: dict[str, tuple[int, bytes]]) -> AbstractContextManager[str]:
    return faulty_proxy.serving(lambda _, path, headers: pages.get(path, (404, b"")))


def operators_pages(**changes: tuple[int, bytes]) -> dict[str, tuple[int, bytes]]:
    metrics = Metrics()
    metrics.watched("Node")
    pages = {
        "healthz": (200, b"ok\n"),
        "readyz": (200, b"ready\n"),
        "metrics": (200, metrics.text()),
        **changes,
    }
    return {f"/{name}": page for name, page in pages.items()}


def test_it_passes_and_names_the_version_when_the_operator_is_up() -> None:
    with serving(operators_pages()) as url:
        done = run(url)
    assert done.returncode == 0, done.stderr
    assert 'tiercheck_build_info{version="' in done.stdout


def test_it_fails_while_the_operator_is_starting() -> None:
    with serving(operators_pages(readyz=(503, b"starting\n"))) as url:
        done = run(url)
    assert done.returncode == 1
    assert "answers 503: the operator runs but is not ready" in done.stderr


def test_it_fails_when_nobody_answers() -> None:
    with serving({}) as url:
        pass
    done = run(url)
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "network policy" in done.stderr


def test_it_fails_on_an_operator_that_has_seen_no_node() -> None:
    with serving(operators_pages(metrics=(200, Metrics().text()))) as url:
        done = run(url)
    assert done.returncode == 1
    assert "no tiercheck_watch_last_event_timestamp_seconds" in done.stderr


def test_it_is_a_hook_that_asks_the_service_that_is_installed() -> None:
    (pod,) = of_kind("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    service = only("Service")
    name, namespace, port = (
        service["metadata"]["name"],
        service["metadata"]["namespace"],
        service["spec"]["ports"][0]["port"],
    )
    assert command()[-2] == f"http://{name}.{namespace}.svc:{port}"


def test_it_needs_nothing_that_the_operators_image_lacks() -> None:
    """Only the standard library, and the `python3` that the image has on its PATH."""
    script = (ROOT / "charts" / "tiercheck" / "files" / "check.py").read_text()
    imported = {
        line.split()[1].partition(".")[0] for line in script.splitlines() if line.startswith("import ")
    }
    assert imported <= set(sys.stdlib_module_names)
    assert command()[2].strip() == script.strip()


Object = dict[str, Any]
OURS = {names.LABEL_JOB_UID: "job-uid", names.LABEL_WORKER: "0"}
POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"


def test_policy_is_bound_and_can_be_left_out() -> None:
    assert only(BINDING)["spec"]["policyName"] == only(POLICY)["metadata"]["name"]
    assert only(BINDING)["spec"]["validationActions"] == ["Deny"]
    off = objects({"reserved": {"enabled": False}})
    assert not [entry for entry in off if entry["kind"] in (POLICY, BINDING)]


def test_plain_manifests_have_the_policy_as_well() -> None:
    text = "# Rendered from the chart by `make chart`: labels that the operator alone writes.\n"
    for kind in (POLICY, BINDING):
        entry = copy.deepcopy(only(kind))
        entry["metadata"] = {"name": "tiercheck-reserved", "labels": {"app.kubernetes.io/name": "tiercheck"}}
        if kind == BINDING:
            entry["spec"]["policyName"] = "tiercheck-reserved"
        written = yaml.safe_dump(entry, sort_keys=False, width=120)
        text += "---\n" + written.replace(f"{NAMESPACE}:{ACCOUNT}", "tiercheck-system:tiercheck-operator")
    path = Path(__file__).parents[2] / "deploy" / "reserved.yaml"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert path.read_text() == text, "if this change is wanted: make chart"
    account = yaml.safe_load((path.parent / "operator.yaml").read_text().split("---\n")[1])["metadata"]
    assert f"system:serviceaccount:{account['namespace']}:{account['name']}" in text


def test_several_releases_keep_to_their_own_namespaces() -> None:
    values = {"watchNamespaces": ["a", "b"]}
    (policy,) = of_kind(POLICY, values)
    assert policy["metadata"]["name"] != only(POLICY)["metadata"]["name"]
    (expression,) = policy["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["a", "b"]


def pod(name: str, owner: Object | None = None, labels: Object | None = None, **annotations: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "default", "labels": labels or {}, "annotations": annotations,
            "ownerReferences": [{**owner, "controller": True}] if owner else [],
        },
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }  # fmt: skip


OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "job-uid"}
FORGED = {"apiVersion": "tiercheck.io/v1alpha1", "kind": "TierCheckJob", "name": "x", "uid": "job-uid"}
ATTACHED = {names.ANNOTATION_ATTACHED: "{}"}
REFUSED = {
    "a worker": pod("p", labels=OURS),
    "a spare": pod("p", labels={names.LABEL_SPARE: "0"}),
    "one label": pod("p", labels={names.LABEL_INCARNATION: "1"}),
    "with the job as owner": pod("p", FORGED, OURS),
    "with the job as owner, attached": pod("p", FORGED, OURS, **ATTACHED),
    "attached to nobody": pod("p", None, OURS, **ATTACHED),
    "attached to another": pod("p", {**OWNER, "uid": "another"}, OURS, **ATTACHED),
    "attached, incarnated": pod("p", OWNER, {**OURS, names.LABEL_INCARNATION: "9"}, **ATTACHED),
    "attached, unlabelled": pod("p", OWNER, {}, **ATTACHED),
}


def answer(kubeconfig: Path, body: Object, path: str = "/api/v1/namespaces/default/pods?dryRun=All") -> str:
    """What the API server says against it; empty: nothing."""
    code, said, _ = post(kubeconfig, path, body)
    return "" if code == 201 else str(said["message"])


@REAL_SERVER[0]
@REAL_SERVER[1]
@pytest.mark.cluster
def test_nobody_else_makes_or_changes_what_marks_a_worker(
    cluster: LocalCluster, helm_config: Any, tmp_path: Path
) -> None:
    install(helm_config, cluster, {"attach": {"enabled": True}})
    me = cluster.kubeconfig
    # The API server takes a new policy up after a moment.
    cluster.wait_for(lambda: answer(me, REFUSED["a worker"]), 60, "the policy to be in force")
    for what, body in REFUSED.items():
        assert "operator alone" in answer(me, body), what

    own = service_account_kubeconfig(me, NAMESPACE, ACCOUNT, tmp_path / "own")
    assert answer(own, REFUSED["a worker"]) == ""
    of_jobset = {**OURS, names.LABEL_JOBSET_UID: "job-uid"}
    for what, body in {
        "of a Job": pod("p", OWNER, OURS, **ATTACHED),
        "of a JobSet": pod("p", {**OWNER, "uid": "of-the-job-between"}, of_jobset, **ATTACHED),
        "nothing to do with us": pod("p"),
        "to be attached": pod("p", labels={"app": "web", names.LABEL_INJECT: "careful"}),
    }.items():
        assert answer(me, body) == "", what

    cluster.apply(pod("plain", labels={"app": "web"}))
    cluster.apply(pod("plain", labels={"app": "other"}))
    for marked in (pod("plain", labels=OURS), pod("plain", **ATTACHED)):
        with pytest.raises(ApiFailure, match="operator alone"):
            cluster.apply(marked)

    by_hand = short_job("claims", "default", attach={"owner": OWNER, "container": "c"})
    del by_hand["spec"]["template"]
    assert "label the pods of your workload" in answer(me, by_hand, JOBS.format("default"))
