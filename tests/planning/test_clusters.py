"""The example clusters give the placements that the documentation shows."""

from __future__ import annotations

import pytest

from tests.planning.clusters import EXAMPLES, example
from tiercheck_operator.planning.placement import Placement, PlacementPolicy, Unplaceable, place


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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_node_carries_every_label_of_its_preset(path) -> None:  # type: ignore[no-untyped-def]
    preset = "gke" if path.stem.startswith("gke") else "generic"
    assert example(path.name, preset).topology.missing == ()
