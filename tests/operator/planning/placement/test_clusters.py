"""The example clusters give the placements that the documentation shows."""

from __future__ import annotations

import pytest

from tests.operator.planning.clusters import EXAMPLES, example
from tiercheck_operator.planning.placement.placement import Placement, PlacementPolicy, Unplaceable, place
from tiercheck_operator.planning.topology import PRESETS, Topology, levels_from_spec, spread_level


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
