"""Resources of a test's own, and the wait until a server shows what it was told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.local.apiserver.api_client import DEADLINE, Api

HERE = Path(__file__).parent


def define(api: Api, file: Path) -> None:
    """Create the CRD in `file` (once) and wait until its resource is served."""
    crd: dict[str, Any] = yaml.safe_load(file.read_text())
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name, spec = crd["metadata"]["name"], crd["spec"]
    if api.call("GET", f"{crds}/{name}")[0] == 404:
        api.create(crds, crd)
    version = spec["versions"][0]["name"]
    path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
    eventually(lambda: api.call("GET", path)[0] == 200, f"{name} is served")


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true answer of `condition`; fails after DEADLINE seconds."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    pytest.fail(f"still not so after {DEADLINE:.0f} s: {what}")
