"""A node runs pods as a kubelet would, as far as a job can tell."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from tests.local.cluster.bench import Bench, PodBuilder, condition, reference
from tiercheck_operator.kubernetes.api_server import CONFIG_MAPS, NODES, PODS, SECRETS, SERVICES

pytestmark = pytest.mark.cluster


def test_init_sidecar_environment_secret_and_volumes_work_together(each_bench: Bench) -> None:
    bench = each_bench
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": "default"},
        "stringData": {"token": "s3cret"},
    }  # fmt: skip
    bench.cluster.apply(secret)
    server = (
        "import http.server as h, os; h.HTTPServer((os.environ['IP'], 8470), "
        "h.SimpleHTTPRequestHandler).serve_forever()"
    )
    address = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    builder = (
        PodBuilder()
        .first("echo prepared > /memory/note")
        .beside(
            "",
            command=["python3", "-S", "-c", server],
            env=[address],
            startupProbe={"httpGet": {"path": "/", "port": 8470}},
        )
        .runs(
            "cat $NOTE /keys/token; echo; echo token=$TOKEN ip=$IP $(python3 -c 'import sys; "
            "print(sys.prefix)')",
            env=[
                {"name": "NOTE", "value": "/memory/note"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
                address,
            ],
        )
        .memory()
        .volume("keys", "/keys", secret={"secretName": "keys"})
    )
    name = bench.run(builder)
    pod = bench.phase(name, "Succeeded", "Failed")
    assert pod["status"]["phase"] == "Succeeded", bench.cluster.explain()
    ip = pod["status"]["podIP"]
    assert ip.startswith("127.")
    assert bench.log(name).splitlines()[:2] == ["prepared", "s3cret"]
    assert f"token=s3cret ip={ip}" in bench.log(name)
    assert bench.log(name).split()[-1] == sys.prefix  # "python3" is the interpreter that runs the agent
    init, sidecar = pod["status"]["initContainerStatuses"]
    assert init["state"]["terminated"]["exitCode"] == 0
    assert "terminated" in sidecar["state"]
    assert condition(pod, "Initialized") == "True"


def test_main_container_waits_for_the_sidecars_startup_probe(bench: Bench) -> None:
    started = {"exec": {"command": ["test", "-e", "/memory/go"]}, "periodSeconds": 1, "failureThreshold": 60}
    builder = PodBuilder().beside("sleep 60", startupProbe=started).runs("sleep 60").memory()
    name = bench.run(builder)
    bench.wait("the sidecar to run", lambda: "running" in bench.container(name, "sidecar")["state"])
    pod = bench.pod(name)
    assert pod["status"]["phase"] == "Pending"
    assert condition(pod, "Initialized") == "False"
    (bench.memory(pod) / "memory" / "go").touch()
    bench.ready(name)


def test_crashing_container_is_restarted_and_never_means_never(bench: Bench) -> None:
    always = bench.run(PodBuilder().runs("exit 3").policy("OnFailure"))
    never = bench.run(PodBuilder().runs("exit 3", terminationMessagePolicy="FallbackToLogsOnError"))
    bench.phase(never, "Failed")
    assert bench.container(never)["restartCount"] == 0
    bench.wait("two restarts", lambda: bench.container(always)["restartCount"] >= 2)
    assert bench.container(always)["lastState"]["terminated"]["exitCode"] == 3


def test_restarted_container_finds_its_memory_again(bench: Bench) -> None:
    script = "test -e /memory/x && exec sleep 60; touch /memory/x; exit 1"
    name = bench.run(PodBuilder().runs(script).policy("Always").memory())
    bench.wait("a restart", lambda: bench.container(name)["restartCount"] == 1)
    bench.wait("the second life", lambda: "running" in bench.container(name)["state"])


def test_sidecar_ends_after_the_main_container_on_deletion(bench: Bench, tmp_path: Path) -> None:
    def until_term(word: str, seconds: float) -> str:
        return (
            f"trap 'sleep {seconds}; echo {word} >> /out/order; exit 0' TERM; echo up; while :; do "
            "sleep 0.05; done"
        )

    builder = (
        PodBuilder()
        .beside(until_term("sidecar", 0))
        .runs(until_term("main", 0.5))
        .volume("out", "/out", hostPath={"path": str(tmp_path)})
        .memory()
    )
    name = bench.run(builder)
    bench.logged(name, "up")
    bench.logged(name, "up", "sidecar")
    pod = bench.ready(name)
    bench.faults.delete_pods(f"test={name}", grace=None)
    bench.gone(name)
    assert (tmp_path / "order").read_text().split() == ["main", "sidecar"]
    assert not bench.memory(pod).exists()


def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(bench: Bench) -> None:
    builder = PodBuilder().runs("trap '' TERM; echo up; while :; do sleep 0.1; done")
    builder.spec["terminationGracePeriodSeconds"] = 1
    name = bench.run(builder)
    bench.logged(name, "up")
    bench.faults.delete_pods(f"test={name}", grace=None)
    bench.gone(name)


def test_everything_a_container_left_behind_dies_with_it(bench: Bench) -> None:
    name = bench.run(PodBuilder().runs("setsid sleep 300 & sleep 0.3; exit 0"))
    bench.phase(name, "Succeeded")
    assert bench.faults.container_processes(name, "main") == []


def test_pod_is_ready_when_its_probe_says_so(bench: Bench) -> None:
    probe = {"exec": {"command": ["cat", "/memory/ready"]}, "periodSeconds": 1, "failureThreshold": 1}
    name = bench.run(PodBuilder().runs("echo up; sleep 60", readinessProbe=probe).memory())
    bench.logged(name, "up")
    pod = bench.phase(name, "Running")
    assert condition(pod, "Ready") == "False"
    file = bench.memory(pod) / "memory" / "ready"
    file.touch()
    bench.ready(name)
    file.unlink()
    bench.wait("unready", lambda: condition(bench.pod(name), "Ready") == "False")


def test_container_that_fails_its_liveness_probe_is_restarted(bench: Bench) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    name = bench.run(PodBuilder().runs("exec sleep 60", livenessProbe=probe).policy("Always"))
    bench.wait("a restart", lambda: bench.container(name)["restartCount"] >= 1)


def test_missing_image_and_missing_command_are_said(bench: Bench) -> None:
    image = bench.run(PodBuilder().runs("sleep 1", image="registry/no-such-image:1"))
    bench.wait("ErrImagePull", lambda: waiting(bench, image).get("reason") == "ErrImagePull")
    program = bench.run(PodBuilder().runs("", command=["no-such-program"]))
    bench.phase(program, "Failed")
    ended = bench.container(program)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "no-such-program" in ended["message"]


def test_pod_waits_for_a_missing_secret_and_starts_when_it_comes(bench: Bench) -> None:
    builder = (
        PodBuilder().runs("cat /late/k; sleep 60").volume("late", "/late", secret={"secretName": "late"})
    )
    name = bench.run(builder)
    bench.wait("the reason", lambda: "late" in waiting(bench, name).get("message", ""))
    late = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "stringData": {"k": "here"}}
    bench.cluster.apply(late)
    bench.logged(name, "here")


def test_pods_on_one_node_have_addresses_of_their_own(bench: Bench) -> None:
    names = [bench.run(PodBuilder().runs("sleep 60").on("node-1")) for _ in range(2)]
    pods = [bench.ready(name) for name in names]
    assert len({pod["status"]["podIP"] for pod in pods}) == 2
    assert {pod["status"]["hostIP"] for pod in pods} == {pods[0]["status"]["podIP"].rsplit(".", 1)[0] + ".1"}


def test_status_keeps_conditions_of_others(bench: Bench) -> None:
    name = bench.run(PodBuilder().runs("trap 'sleep 0.5; exit 0' TERM; echo up; while :; do sleep 0.1; done"))
    bench.logged(name, "up")
    conditions = bench.ready(name)["status"]["conditions"]
    since = "2026-01-01T00:00:00Z"
    foreign = {"type": "Foreign", "status": "True", "reason": "Test", "lastTransitionTime": since}
    status = {"conditions": [*conditions, foreign]}
    bench.api.patch(PODS, "default", name, {"status": status}, subresource="status")
    bench.faults.kill_container(name, "main")
    assert condition(bench.phase(name, "Failed"), "Foreign") == "True"


def waiting(bench: Bench, name: str) -> dict[str, str]:
    return bench.container(name)["state"].get("waiting", {})  # type: ignore[no-any-return]


# What a controller manager would do, done on a control plane that has none.


def test_dependents_of_a_deleted_owner_are_collected(each_bench: Bench) -> None:
    bench = each_bench
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner", "namespace": "default"}}
    owner = {**bench.cluster.apply(config), "apiVersion": "v1", "kind": "ConfigMap"}
    pod = bench.run(PodBuilder().runs("sleep 60").owned_by(owner))
    owned = {"name": "owned", "namespace": "default", "ownerReferences": [reference(owner)]}
    bench.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": owned})
    spec = {"clusterIP": "None", "selector": {"a": "b"}}
    bench.cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": owned, "spec": spec})
    bench.ready(pod)
    bench.api.delete(CONFIG_MAPS, "default", "owner")
    bench.gone(pod)
    for kind in (SECRETS, SERVICES):
        bench.wait(
            f"owned {kind.plural} to go", lambda kind=kind: bench.api.find(kind, "default", "owned") is None
        )


def test_object_whose_owner_never_existed_is_collected(each_bench: Bench) -> None:
    ghost = {"apiVersion": "v1", "kind": "ConfigMap", "name": "ghost", "uid": str(uuid.UUID(int=0))}
    metadata = {"name": "haunted", "namespace": "default", "ownerReferences": [ghost]}
    each_bench.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
    each_bench.wait("it to go", lambda: each_bench.api.find(SECRETS, "default", "haunted") is None)


def test_pod_that_fits_nowhere_says_why_and_starts_when_it_fits(each_bench: Bench) -> None:
    bench = each_bench
    builder = PodBuilder().runs("exit 0")
    builder.spec["nodeSelector"] = {"pool": "fast"}
    name = bench.run(builder)
    message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."

    def explained() -> bool:
        conditions = bench.pod(name).get("status", {}).get("conditions") or []
        return any(
            (c["type"], c.get("reason"), c.get("message")) == ("PodScheduled", "Unschedulable", message)
            for c in conditions
        )

    bench.wait("the reason", explained)
    bench.api.patch(NODES, None, "node-1", {"metadata": {"labels": {"pool": "fast"}}})
    assert bench.phase(name, "Succeeded")["spec"]["nodeName"] == "node-1"
    bench.api.patch(NODES, None, "node-1", {"metadata": {"labels": {"pool": None}}})


def test_cordoned_node_gets_no_pods(bench: Bench) -> None:
    bench.faults.cordon_node("node-0")
    names = [bench.run(PodBuilder().runs("sleep 60")) for _ in range(3)]
    assert {bench.ready(name)["spec"]["nodeName"] for name in names} == {"node-1", "node-2"}
    bench.faults.cordon_node("node-0", cordoned=False)


def test_workers_of_a_job_spread_over_nodes(bench: Bench) -> None:
    builders = [PodBuilder().runs("sleep 60") for _ in range(3)]
    for builder in builders:
        builder.manifest["metadata"]["labels"]["tiercheck.io/job"] = "spread"
        bench.run(builder)
    assert len({bench.ready(builder.name)["spec"]["nodeName"] for builder in builders}) == 3


def test_pods_of_a_deleted_node_are_removed(bench: Bench) -> None:
    name = bench.run(PodBuilder().runs("sleep 60").on("node-2"))
    bench.ready(name)
    bench.faults.kill_node("node-2")
    bench.api.delete(NODES, None, "node-2")
    bench.gone(name)
    bench.faults.revive_node("node-2")
    bench.wait("the node to be back", lambda: bench.api.find(NODES, None, "node-2") is not None)
    bench.wait("no taints", lambda: not bench.api.get(NODES, None, "node-2")["spec"].get("taints"))
