"""Failure domains are read from labels, never guessed; the example clusters give what the pages show."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.planning.clusters import EXAMPLES, RACK, ZONE, example
from tiercheck_operator.planning.cluster_nodes import build_topology, read_nodes, seat_workers
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, Unplaceable, place
from tiercheck_operator.planning.topology import (
    HOSTNAME_LABEL,
    PRESETS,
    Level,
    Topology,
    levels_from_spec,
    levels_of,
    spread_level,
)

GENERIC = levels_from_spec("generic", None)


def test_same_rack_label_in_two_zones_is_two_racks() -> None:
    topology = Topology.build({"a": {ZONE: "z1", RACK: "1"}, "b": {ZONE: "z2", RACK: "1"}}, GENERIC)
    assert topology.domain("a", "rack") == "z1/1"
    assert topology.domain("b", "rack") == "z2/1"


def test_missing_label_is_reported_and_its_domain_unknown() -> None:
    topology = Topology.build({"a": {ZONE: "z1", RACK: "1"}, "b": {ZONE: "z1"}}, GENERIC)
    assert topology.domain("b", "rack") is None
    assert topology.missing == ((GENERIC[1], ("b",)),)


def test_rack_below_an_unknown_zone_is_unknown_where_other_nodes_have_zones() -> None:
    topology = Topology.build({"a": {ZONE: "z1", RACK: "1"}, "b": {RACK: "1"}}, GENERIC)
    assert topology.domain("b", "rack") is None


def test_cluster_without_zone_labels_can_still_use_its_racks() -> None:
    topology = Topology.build({"a": {RACK: "1"}, "b": {RACK: "2"}}, GENERIC)
    assert [topology.domain(node, "rack") for node in "ab"] == ["1", "2"]
    assert topology.missing == ((GENERIC[0], ("a", "b")),)


def test_missing_hostname_makes_the_node_a_host_of_its_own() -> None:
    topology = Topology.build({"a": {}, "b": {HOSTNAME_LABEL: "machine"}}, GENERIC)
    assert topology.domain("a", "host") == "a"
    assert topology.domain("b", "host") == "machine"
    assert all(level.name != "host" for level, _ in topology.missing)


def test_unheard_of_node_is_its_own_host_and_otherwise_unknown() -> None:
    topology = Topology.build({"a": {RACK: "1"}}, GENERIC)
    assert topology.domain("gone", "host") == "gone"
    assert topology.domain("gone", "rack") is None


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_ends_with_the_host(preset: str) -> None:
    assert levels_from_spec(preset, None)[-1].label == HOSTNAME_LABEL


def test_aws_layers_run_from_wide_to_narrow_and_topograph_tiers_too() -> None:
    assert [level.label[-1] for level in PRESETS["aws"][1:4]] == ["1", "2", "3"]
    assert [level.label[-1] for level in PRESETS["topograph"][:3]] == ["2", "1", "0"]


def test_users_own_levels_replace_the_preset_and_get_a_host_level() -> None:
    levels = levels_from_spec("gke", [{"name": "pdu", "label": "example.com/pdu"}])
    assert levels == (Level("pdu", "example.com/pdu"), Level("host", HOSTNAME_LABEL))


@pytest.mark.parametrize(
    ("preset", "levels", "says"),
    [
        ("azure", None, "unknown topology preset"),
        (
            None,
            [{"name": "host", "label": HOSTNAME_LABEL}, {"name": "rack", "label": RACK}],
            "must be the last",
        ),
        (None, [{"name": "rack", "label": RACK}, {"name": "rack", "label": ZONE}], "repeat the name 'rack'"),
        (None, [{"name": "rack", "label": RACK}, {"name": "row", "label": RACK}], "repeat the label"),
    ],
)
def test_wrong_levels_are_refused_with_a_sentence(
    preset: str | None, levels: list[dict[str, str]] | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        levels_from_spec(preset, levels)


def test_distance_counts_levels_up_to_the_first_shared_domain() -> None:
    topology = example("gke-blocks.yaml", "gke").topology
    names = [f"gke-gpu-{index:02d}" for index in (0, 0, 1, 3, 6)]
    assert [topology.distance(names[0], other) for other in names] == [0, 0, 1, 2, 3]


def test_copies_spread_over_the_narrowest_level_above_the_host_unless_one_is_named() -> None:
    levels = levels_from_spec("generic", None)
    assert spread_level(levels, None).name == "rack"
    assert spread_level(levels, "zone").name == "zone"
    assert spread_level(levels[-1:], None).name == "host"
    with pytest.raises(ValueError, match="no topology level is named 'pdu'; there are zone, rack, host"):
        spread_level(levels, "pdu")


# Kueue


def topology(*labels: str) -> dict[str, object]:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": "t"},
        "spec": {"levels": [{"nodeLabel": label} for label in labels]},
    }


def test_levels_are_named_by_the_last_part_of_their_label() -> None:
    found = levels_of(
        topology(
            "cloud.google.com/gce-topology-block", "fabric.topograph.run/tier-0", "kubernetes.io/hostname"
        )
    )
    assert [level["name"] for level in found] == ["gce-topology-block", "tier-0", "host"]
    assert [level.name for level in levels_from_spec(None, found)] == ["gce-topology-block", "tier-0", "host"]


def test_labels_with_the_same_last_part_have_names_of_their_own() -> None:
    found = levels_of(topology("a.example/rack", "b.example/rack", "c.example/host"))
    assert [level["name"] for level in found] == ["rack", "rack-2", "host-2"]


@given(
    st.lists(
        st.from_regex(
            r"[a-z0-9]{1,8}\.example/[A-Za-z0-9]([-A-Za-z0-9_.]{0,60}[A-Za-z0-9])?", fullmatch=True
        ),
        min_size=1,
        max_size=16,
        unique=True,
    )
)
def test_every_name_is_one_that_the_spec_would_accept(labels: list[str]) -> None:
    found = levels_of(topology(*labels))
    names = [level["name"] for level in found]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 32 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)
    assert [level["label"] for level in found] == labels
    levels_from_spec(None, found)


@pytest.mark.parametrize("raw", [{}, {"spec": {}}, {"spec": {"levels": []}}, {"spec": {"levels": ["x"]}}])
def test_a_topology_without_levels_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no levels"):
        levels_of(raw)


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


def test_two_racks_survive_the_loss_of_either() -> None:
    cluster = example("two-racks.yaml", "generic")
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=True))
    assert isinstance(placement, Placement)
    assert placement.holders == ((2,), (3,), (0,), (1,))
    assert placement.tolerates == ("any one rack", "any one host")
    assert placement.reason == "every worker has a copy in another rack"


def test_gke_subblocks_with_equal_names_are_not_confused() -> None:
    cluster = example("gke-blocks.yaml", "gke", workers_per_node=2)
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, "subblock", required=True))
    assert isinstance(placement, Placement)
    assert placement.tolerated_levels == ("subblock", "host")
    blocks = cluster.domains("block")
    # The short way: each block has two sub-blocks, so no copy has to leave its block.
    assert all(blocks[worker] == blocks[kept[0]] for worker, kept in enumerate(placement.holders))


def test_uneven_racks_degrade_and_say_which_rack_is_too_full() -> None:
    cluster = example("uneven-racks.yaml", "generic")
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(placement, Placement)
    assert placement.achieved_level == "host"
    assert placement.tolerates == ("any one rack except rack-0", "any one host")
    bound = "rack rack-0 holds 5 of 8 workers; no more than half can be matched across racks"
    assert bound in placement.reason
    refused = place(cluster.sites, cluster.topology, PlacementPolicy(1, "rack", required=True))
    assert isinstance(refused, Unplaceable)
    assert bound in refused.reason


PRESET_OF = {
    "aws-layers": ["aws"],
    "coreweave-leafgroups": ["coreweave"],
    "gke-blocks": ["gke"],
    "oci-blocks": ["oci"],
    "topograph-nvlink": ["topograph", "topograph-nvlink", "nvlink"],
    "two-racks": ["generic"],
    "uneven-racks": ["generic"],
}


def test_every_example_cluster_has_its_preset() -> None:
    assert sorted(PRESET_OF) == sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "preset"), [(name, preset) for name in PRESET_OF for preset in PRESET_OF[name]]
)
def test_every_example_node_carries_every_label_of_its_preset(name: str, preset: str) -> None:
    assert example(f"{name}.yaml", preset).topology.missing == ()


@pytest.mark.parametrize(
    ("name", "preset", "level"),
    [
        ("aws-layers", "aws", "leaf"),
        ("coreweave-leafgroups", "coreweave", "rack"),
        ("oci-blocks", "oci", "localblock"),
        ("topograph-nvlink", "topograph-nvlink", "nvlink"),
        ("topograph-nvlink", "nvlink", "nvlink"),
    ],
)
def test_every_cloud_survives_its_narrowest_domain(name: str, preset: str, level: str) -> None:
    cluster = example(f"{name}.yaml", preset)
    assert spread_level(levels_from_spec(preset, None), None).name == level
    placement = place(cluster.sites, cluster.topology, PlacementPolicy(1, level, required=True))
    assert isinstance(placement, Placement)
    assert level in placement.tolerated_levels


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_nodes_without_the_labels_of_a_preset_are_named(preset: str) -> None:
    levels = levels_from_spec(preset, None)
    bare = Topology.build({"labelled": {level.label: "x" for level in levels}, "bare": {}}, levels)
    assert {level.label: names for level, names in bare.missing} == {
        level.label: ("bare",) for level in levels[:-1]
    }
