"""Asks an API server that knows the definitions, so that it is its own words that are judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.local.apiserver import api_client
from tests.local.apiserver.api_client import eventually

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "tiercheckjobs.yaml").read_text())
Refused = api_client.Refused
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckjobs"


class Api:
    """Everything raises Refused."""

    def __init__(self, kubeconfig: Path) -> None:
        self.http = api_client.Api(kubeconfig)
        self.install(CRD, _JOBS)

    def create(self, raw: Mapping[str, Any], **query: str) -> dict[str, Any]:
        made: dict[str, Any] = self.http.create(_JOBS, raw, **query)
        return made

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{_JOBS}/{name}")
        return found

    def patch(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = self.http.merge(f"{_JOBS}/{name}", patch)
        return made

    def patch_status(self, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        return self.patch(f"{name}/status", {"status": status})

    def table(self) -> dict[str, Any]:
        """The list as kubectl asks for it."""
        found: dict[str, Any] = self.http.get(_JOBS, accept="application/json;as=Table;v=v1;g=meta.k8s.io")
        return found

    def install(self, definition: Mapping[str, Any], path: str) -> None:
        """Returns when the server serves what is defined: a real one does a moment later."""
        self.http.create(_CRDS, definition, fieldValidation="Strict")
        eventually(lambda: self.http.call("GET", path)[0] == 200, f"{path} is served")
