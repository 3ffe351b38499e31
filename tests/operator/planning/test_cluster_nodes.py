"""Nodes are read from examples and kubectl alike, and workers seated as pods would be."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from tests.operator.planning.clusters import EXAMPLES
from tiercheck_operator.planning.cluster_nodes import build_topology, read_nodes, seat_workers
from tiercheck_operator.planning.topology import levels_from_spec

GENERIC = levels_from_spec("generic", None)


def kubectl_node(name: str, labels: dict[str, str], **spec: object) -> dict[str, object]:
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {}}


def test_an_example_and_what_kubectl_prints_of_it_are_the_same_cluster() -> None:
    document = yaml.safe_load((EXAMPLES / "two-racks.yaml").read_text())
    printed = {
        "kind": "List",
        "items": [kubectl_node(node["name"], node["labels"]) for node in document["nodes"]],
    }
    assert read_nodes(document) == read_nodes(printed)


def test_one_entry_stands_for_many_nodes() -> None:
    nodes = read_nodes({"nodes": [{"name": "gpu-{i}", "count": 3, "labels": {"rack": "r1", "host": "h{i}"}}]})
    assert [(node.name, node.labels["host"]) for node in nodes] == [
        ("gpu-0", "h0"),
        ("gpu-1", "h1"),
        ("gpu-2", "h2"),
    ]


def test_cordoned_and_unwell_nodes_take_no_worker() -> None:
    unwell = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    nodes = read_nodes(
        {
            "items": [
                kubectl_node("a", {}),
                kubectl_node("b", {}, unschedulable=True),
                kubectl_node("c", {}, taints=[unwell]),
                {
                    "metadata": {"name": "d"},
                    "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
                },
            ]
        }
    )
    assert [node.unusable for node in nodes] == ["", "cordoned", f"tainted {unwell['key']}", "not ready"]
    topology = build_topology(nodes, GENERIC)
    assert {site.node for site in seat_workers(nodes, topology, 3, "host")} == {"a"}
    with pytest.raises(ValueError, match=r"2 workers do not fit on 1 nodes \(3 are cordoned or unwell\)"):
        seat_workers(nodes, topology, 2, "host", per_node=1)


def test_workers_are_spread_evenly_over_domains_and_then_over_nodes() -> None:
    document = yaml.safe_load((EXAMPLES / "uneven-racks.yaml").read_text())
    nodes = read_nodes(document)
    topology = build_topology(nodes, GENERIC)
    sites = seat_workers(nodes, topology, 6, "rack", per_node=1)
    assert Counter(topology.domain(site.node, "rack") for site in sites) == {
        "zone-a/rack-0": 3,
        "zone-a/rack-1": 3,
    }
    assert len({site.node for site in sites}) == 6
    assert [site.worker for site in sites] == list(range(6))
    everyone = seat_workers(nodes, topology, 8, "rack", per_node=1)
    assert len({site.node for site in everyone}) == 8


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({}, "kubectl get nodes -o json"),
        ({"nodes": "many"}, "kubectl get nodes -o json"),
        ({"nodes": [{"labels": {}}]}, "has no name"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "'a' is listed twice"),
    ],
)
def test_what_is_no_cluster_is_refused_with_a_sentence(document: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_nodes(document)
