"""What a controller manager would do, done on a control plane that has none."""

from __future__ import annotations

import pytest

from tests.local.cluster.bench import Bench, PodBuilder, reference
from tiercheck_cli.api_server import CONFIG_MAPS, NODES, SECRETS, SERVICES

pytestmark = pytest.mark.cluster


def test_dependents_of_a_deleted_owner_are_collected(each_bench: Bench) -> None:
    bench = each_bench
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner", "namespace": "default"}}
    owner = {**bench.cluster.apply(config), "apiVersion": "v1", "kind": "ConfigMap"}
    pod = bench.run(PodBuilder().runs("sleep 60").owned_by(owner))
    owned = {"name": "owned", "namespace": "default", "ownerReferences": [reference(owner)]}
    bench.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": owned})
    bench.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": owned,
            "spec": {"clusterIP": "None", "selector": {"a": "b"}},
        }
    )
    bench.ready(pod)
    bench.api.delete(CONFIG_MAPS, "default", "owner")
    bench.gone(pod)
    for kind in (SECRETS, SERVICES):
        bench.wait(
            f"owned {kind.plural} to go", lambda kind=kind: bench.api.find(kind, "default", "owned") is None
        )


def test_object_whose_owner_never_existed_is_collected(each_bench: Bench) -> None:
    ghost = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "ghost",
        "uid": "00000000-0000-0000-0000-000000000000",
    }
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
    builders = [PodBuilder().runs("sleep 60") for _ in range(3)]
    names = [bench.run(builder) for builder in builders]
    assert {bench.ready(name)["spec"]["nodeName"] for name in names} == {"node-1", "node-2"}
    bench.faults.cordon_node("node-0", cordoned=False)
    for name in names:
        bench.faults.delete_pods(f"test={name}")


def test_workers_of_a_job_spread_over_nodes(bench: Bench) -> None:
    builders = [PodBuilder().runs("sleep 60") for _ in range(3)]
    for builder in builders:
        builder.manifest["metadata"]["labels"]["tiercheck.io/job"] = "spread"
        bench.run(builder)
    assert len({bench.ready(builder.name)["spec"]["nodeName"] for builder in builders}) == 3
    bench.faults.delete_pods("tiercheck.io/job=spread")


def test_pods_of_a_deleted_node_are_removed(bench: Bench) -> None:
    name = bench.run(PodBuilder().runs("sleep 60").on("node-2"))
    bench.ready(name)
    bench.faults.kill_node("node-2")
    bench.api.delete(NODES, None, "node-2")
    bench.gone(name)
    bench.faults.revive_node("node-2")
    bench.wait("the node to be back", lambda: bench.api.find(NODES, None, "node-2") is not None)
    bench.wait("no taints", lambda: not bench.api.get(NODES, None, "node-2")["spec"].get("taints"))
