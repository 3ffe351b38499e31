"""Nodes are listed in a file, and pods go to those that a scheduler would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiercheck_local.controllers.scheduler import Chosen, NoNodeFits, choose, requests
from tiercheck_local.nodespec import RACK, BadCluster, NodeSpec


def test_file_gives_nodes_with_labels(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n- {name: a, labels: {rack: 1}}\n- {name: b, pods: 2, resources: {nvidia.com/gpu: 8}}\n"
    )
    assert NodeSpec.load(file) == [
        NodeSpec("a", {"rack": "1"}),
        NodeSpec("b", {}, 2, {"nvidia.com/gpu": "8"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "list under `nodes`"),
        ("nodes: [{labels: {}}]", r"nodes\[0\] has no name"),
        ("nodes: [{name: a}, {name: a}]", "unique"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(BadCluster, match=message):
        NodeSpec.load(file)


def test_nodes_are_dealt_over_racks() -> None:
    assert [node.labels[RACK] for node in NodeSpec.racks(4, 2)] == ["rack-0", "rack-0", "rack-1", "rack-1"]


def test_examples_can_be_loaded() -> None:
    files = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))
    assert all(NodeSpec.load(file) for file in files)


def node(
    name: str, *, labels: dict[str, str] | None = None, ready: bool = True, **spec: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {key: value for key, value in spec.items() if key != "room"},
        "status": {
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "3", **spec.get("room", {})},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def pod(name: str = "p", on: str | None = None, job: str | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"tiercheck.io/job": job} if job else {},
        },
        "spec": {"containers": [{"name": "c"}], **({"nodeName": on} if on else {}), **spec},
    }


def asking(**amounts: str) -> list[dict[str, Any]]:
    return [{"name": "c", "resources": {"requests": amounts}}]


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    }


def where(expression: dict[str, Any]) -> dict[str, Any]:
    return affinity({"matchExpressions": [expression]})


A, B = node("a", labels={"rack": "1"}), node("b", labels={"rack": "2", "gen": "5"})


def test_workers_of_one_job_spread_before_anything_else() -> None:
    others = [pod("x", on="a"), pod("y", on="a"), pod("w0", on="b", job="j")]
    assert choose(pod(job="j"), [A, B], others) == Chosen("a")


def test_ports_of_a_node_are_given_to_one_pod_at_a_time() -> None:
    def on_host(name: str, port: int, on: str | None = None) -> dict[str, Any]:
        sidecar = {"name": "s", "restartPolicy": "Always", "ports": [{"containerPort": port}]}
        return pod(name, on=on, hostNetwork=True, initContainers=[sidecar])

    assert choose(on_host("p", 7000), [A], [on_host("q", 7001, on="a")]) == Chosen("a")
    refused = choose(on_host("p", 7000), [A], [on_host("q", 7000, on="a")])
    assert isinstance(refused, NoNodeFits)
    assert "free ports" in refused.message


def test_emptier_node_is_taken_then_the_first_name() -> None:
    assert choose(pod(), [A, B], [pod("x", on="a")]) == Chosen("b")
    assert choose(pod(), [B, A], []) == Chosen("a")


def test_finished_pods_take_no_room() -> None:
    done = {**pod("x", on="a"), "status": {"phase": "Failed"}}
    assert choose(pod(), [A, B], [done]) == Chosen("a")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"nodeSelector": {"rack": "2"}}, "b"),
        ({"affinity": where({"key": "rack", "operator": "In", "values": ["2", "3"]})}, "b"),
        ({"affinity": where({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a"]})}, "b"),
        ({"affinity": where({"key": "gen", "operator": "Exists"})}, "b"),
        ({"affinity": where({"key": "gen", "operator": "DoesNotExist"})}, "a"),
        ({"affinity": where({"key": "gen", "operator": "Gt", "values": ["4"]})}, "b"),
        (
            {
                "affinity": affinity(
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}
                )
            },
            "b",
        ),
    ],
)
def test_selectors_and_affinity_decide(rule: dict[str, Any], expected: str) -> None:
    assert choose(pod(**rule), [A, B], []) == Chosen(expected)


def test_affinity_terms_are_alternatives_and_an_empty_one_selects_nothing() -> None:
    second = {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["2"]}]}
    assert choose(pod(affinity=affinity({}, second)), [A, B], []) == Chosen("b")


def test_taints_keep_pods_away_unless_tolerated() -> None:
    tainted = node("a", taints=[{"key": "gpu", "value": "x", "effect": "NoSchedule"}])
    assert choose(pod(), [tainted, B], []) == Chosen("b")
    tolerant = pod(tolerations=[{"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoSchedule"}])
    assert choose(tolerant, [tainted], []) == Chosen("a")
    assert choose(pod(tolerations=[{"operator": "Exists"}]), [tainted], []) == Chosen("a")
    assert isinstance(choose(pod(tolerations=[{"key": "gpu", "value": "y"}]), [tainted], []), NoNodeFits)


def test_preferring_taint_does_not_forbid() -> None:
    assert choose(pod(), [node("a", taints=[{"key": "k", "effect": "PreferNoSchedule"}])], []) == Chosen("a")


def test_message_counts_every_reason() -> None:
    nodes = [
        node("a", unschedulable=True),
        node("b", taints=[{"key": "gpu", "value": "x", "effect": "NoSchedule"}]),
        node("c"),
        node("d", room={"cpu": "1"}),
    ]
    wanted = pod(containers=asking(cpu="2"), nodeSelector={"kubernetes.io/hostname": "d"})
    assert choose(wanted, nodes, []) == NoNodeFits(
        "0/4 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node affinity/selector, "
        "1 node(s) had untolerated taint {gpu: x}, 1 node(s) were unschedulable."
    )


def test_full_node_takes_no_more_pods() -> None:
    full = [pod(str(index), on="a") for index in range(3)]
    assert choose(pod(), [A], full) == NoNodeFits("0/1 nodes are available: 1 Too many pods.")


def test_requests_of_present_pods_count() -> None:
    present = [pod("x", on="a", containers=asking(memory="6Gi"))]
    assert choose(pod(containers=asking(memory="3Gi")), [A], present) == NoNodeFits(
        "0/1 nodes are available: 1 Insufficient memory."
    )
    assert choose(pod(containers=asking(memory="2Gi")), [A], present) == Chosen("a")


def test_unknown_resource_is_insufficient() -> None:
    assert choose(pod(containers=asking(**{"nvidia.com/gpu": "1"})), [A], []) == NoNodeFits(
        "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    )


def test_without_nodes_the_message_says_so() -> None:
    assert choose(pod(), [], []) == NoNodeFits("no nodes available to schedule pods")


def test_sidecars_add_to_main_containers_and_init_containers_only_peak() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "initContainers": [container("1", restartPolicy="Always"), container("5")],
        "containers": [container("2"), container("500m")],
    }
    assert requests({"spec": spec}) == {"cpu": 6}
    spec["initContainers"][1] = container("1")
    assert str(requests({"spec": spec})["cpu"]) == "3.500"
