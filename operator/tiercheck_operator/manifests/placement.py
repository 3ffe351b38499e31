"""The ConfigMap that holds who keeps whose copies or parity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercheck_operator.manifests import owned
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.planning.saved_placement import SavedPlacement, placement_data, read_placement_data


def build_placement(job: JobView, placement: SavedPlacement) -> dict[str, Any]:
    """`data` as `planning.saved_placement` writes it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owned.metadata(job, owned.placement_name(job)),
        "data": placement_data(placement),
    }


def parse_placement(raw: Mapping[str, Any]) -> SavedPlacement:
    """Raises ValueError if it was not made by `build_placement`."""
    return read_placement_data(raw.get("data") or {})
