"""Failure domains are read from labels, qualified by their parents, and never guessed."""

from __future__ import annotations

import pytest

from tests.operator.planning.clusters import RACK, ZONE, example
from tiercheck_operator.planning.topology import (
    HOSTNAME_LABEL,
    PRESETS,
    Level,
    Topology,
    levels_from_spec,
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
