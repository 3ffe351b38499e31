"""Runs a whole cluster on one machine: what can be applied to it, and what can go wrong in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import yaml

from tiercheck_cli.api_server import CRDS, Object, RequestFailed
from tiercheck_local.faults import Faults
from tiercheck_local.running import PATIENCE, RunningCluster


class LocalCluster(RunningCluster):
    """A running cluster, and the faults that may strike it."""

    @cached_property
    def faults(self) -> Faults:
        return Faults(self)

    def apply(self, manifest: Object) -> Object:
        """Create or merge. Raises RequestFailed."""
        return self.api.apply(manifest)

    def apply_file(self, path: Path) -> list[Object]:
        """Apply every document of a YAML file."""
        return [self.apply(document) for document in yaml.safe_load_all(path.read_text()) if document]

    def apply_crds(self, paths: Path | Iterable[Path]) -> None:
        """Apply the definitions in these files or folders and wait until the server serves them."""
        given = [paths] if isinstance(paths, Path) else list(paths)
        files = [
            file for path in given for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])
        ]
        for file in files:
            for definition in self.apply_file(file):
                self._await_served(definition)

    def _await_served(self, definition: Object) -> None:
        name = definition["metadata"]["name"]

        def established() -> bool:
            found = self.api.get(CRDS, None, name)
            conditions = (found.get("status") or {}).get("conditions") or []
            return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

        def served() -> bool:
            spec = definition["spec"]
            paths = [
                f"/apis/{spec['group']}/{v['name']}/{spec['names']['plural']}"
                for v in spec["versions"]
                if v["served"]
            ]
            return all(self._answers(path) for path in paths)

        self.wait_for(established, PATIENCE, f"{name} to be established")
        self.wait_for(served, PATIENCE, f"{name} to be served")

    def _answers(self, path: str) -> bool:
        try:
            self.api.request("GET", path)
        except RequestFailed as failure:
            if failure.code in {404, 429, 503}:
                return False
            raise
        return True


def temporary_directory() -> Path:
    """A folder for a cluster that nobody named one for."""
    return Path(tempfile.mkdtemp(prefix="tiercheck-cluster-"))
