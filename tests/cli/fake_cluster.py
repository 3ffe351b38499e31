"""Answers with recorded objects, for tests of showing them and not of fetching them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.cli import recorded
from tiercheck_cli.cluster import Cluster, Forbidden
from tiercheck_operator.model.saved_placement import SavedPlacement, read_placement_data


class FakeCluster(Cluster):
    """Of `recorded`. `may_read_nodes`: whether the user has that right."""

    def __init__(self, may_read_nodes: bool = True, domains_saved: bool = False) -> None:
        self.namespace = recorded.NAMESPACE
        self._may_read_nodes, self._domains_saved = may_read_nodes, domains_saved

    def job(self, name: str) -> dict[str, Any]:
        return recorded.job()

    def pods(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return recorded.pods()

    def placement(self, job: Mapping[str, Any]) -> SavedPlacement | None:
        return read_placement_data(recorded.placement(self._domains_saved)["data"])

    def nodes(self) -> list[dict[str, Any]]:
        if not self._may_read_nodes:
            raise Forbidden("nodes is forbidden")
        return recorded.nodes()

    def events(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return recorded.events()
