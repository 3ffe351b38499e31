"""A placement read back is worth what it was worth when it was made."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tiercheck_operator.model.saved_placement import (
    SavedDomains,
    SavedMember,
    SavedPlacement,
    placement_data,
    read_placement_data,
)
from tiercheck_operator.planning.parity.parity import ParityPolicy, describe_parity, place_parity
from tiercheck_operator.planning.placement.placement import (
    Placement,
    PlacementPolicy,
    WorkerSite,
    describe,
    place,
)
from tiercheck_operator.planning.topology import PRESETS, Topology, domains_to_save


@st.composite
def grounds(draw: st.DrawFn) -> tuple[list[WorkerSite], Topology]:
    racks = draw(st.lists(st.integers(0, 4), min_size=2, max_size=12))
    labels = {
        f"node-{index}": {
            "kubernetes.io/hostname": f"node-{index}",
            "topology.kubernetes.io/zone": f"zone-{rack % 2}",
            **({} if draw(st.integers(0, 9)) == 0 else {"topology.kubernetes.io/rack": f"rack-{rack}"}),
        }
        for index, rack in enumerate(racks)
    }
    seats = draw(st.lists(st.sampled_from(sorted(labels)), min_size=2, max_size=16))
    return [WorkerSite(worker, node) for worker, node in enumerate(seats)], Topology.build(
        labels, PRESETS["generic"]
    )


@given(ground=grounds(), copies=st.integers(0, 2), level=st.sampled_from(["zone", "rack", "host"]))
def test_copies(ground: tuple[list[WorkerSite], Topology], copies: int, level: str) -> None:
    sites, topology = ground
    made = place(sites, topology, PlacementPolicy(min(copies, len(sites) - 1), level, required=False))
    assert isinstance(made, Placement)
    full = all(len(kept) == max(map(len, made.holders)) for kept in made.holders)
    held = PlacementPolicy(max(map(len, made.holders)), level, required=False)
    read = describe(sites, topology, held, dict(enumerate(made.holders)))
    assert read.tolerates == made.tolerates
    assert read.tolerated_levels == made.tolerated_levels
    if full:  # how many copies were asked for is not written down
        assert dataclasses.replace(read, reason="") == dataclasses.replace(made, reason="")


@given(ground=grounds(), parity=st.integers(1, 2), level=st.sampled_from(["zone", "rack", "host"]))
def test_parity(ground: tuple[list[WorkerSite], Topology], parity: int, level: str) -> None:
    sites, topology = ground
    if len(sites) < 2 + parity:
        return
    made = place_parity(sites, topology, ParityPolicy(2, parity, level, required=False))
    assert isinstance(made, Placement)
    most = max(len(group.holders) for group in made.groups)
    read = describe_parity(sites, topology, ParityPolicy(2, most, level, required=False), made.groups)
    assert read.tolerates == made.tolerates
    if all(len(group.holders) == parity for group in made.groups):
        assert dataclasses.replace(read, reason="") == dataclasses.replace(made, reason="")


@given(ground=grounds())
def test_what_is_written_down_is_read_back(ground: tuple[list[WorkerSite], Topology]) -> None:
    sites, topology = ground
    made = place(sites, topology, PlacementPolicy(1, "rack", required=False))
    assert isinstance(made, Placement)
    members = (
        SavedMember(s.worker, f"pod-{s.worker}", f"uid-{s.worker}", 2, s.node, made.holders[s.worker])
        for s in sites
    )
    saved = SavedPlacement(
        7, tuple(members), domains=domains_to_save(topology, (site.node for site in sites))
    )
    read = read_placement_data(placement_data(saved))
    assert read == saved
    assert read.domains is not None
    again = Topology.build(read.domains.labels(), PRESETS["generic"])
    for site in sites:
        for level in again.level_names:
            assert again.domain(site.node, level) == topology.domain(site.node, level) or not again.domain(
                site.node, "rack"
            )


def test_where_nodes_stand_is_left_out_rather_than_the_map_being_too_large() -> None:
    members = tuple(
        SavedMember(w, f"a-long-name-of-a-job-{w}-0", "u" * 36, 0, f"node-{w}", (w,)) for w in range(9_000)
    )
    domains = SavedDomains(
        ("rack", "host"), tuple((f"node-{w}", ("rack-1", f"node-{w}")) for w in range(9_000))
    )
    data = placement_data(SavedPlacement(1, members, domains=domains))
    assert sum(map(len, data.values())) < 2**20
    assert "nodes" not in data
    small = placement_data(
        SavedPlacement(1, members[:1000], domains=SavedDomains(domains.keys, domains.values[:1000]))
    )
    assert "nodes" in small
