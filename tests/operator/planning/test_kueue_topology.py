"""A Kueue Topology gives the same levels as its labels written out, under names that the spec can use."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck_operator.planning.topology import levels_from_spec, levels_of


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
