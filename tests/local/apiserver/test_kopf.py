"""A kopf operator, as a process of its own: it sees objects, writes their status, and lets them go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.apiserver.api_client import Api
from tests.local.apiserver.builders import widget
from tests.local.apiserver.defining import HERE, eventually
from tiercheck_local.controlplane.planes import ControlPlane


@pytest.fixture
def operator(plane: ControlPlane, widgets_defined: None, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """The running operator; yields its log."""
    log = tmp_path / "operator.log"
    command = [
        sys.executable,
        "-m",
        "kopf",
        "run",
        "--standalone",
        "--namespace",
        namespace,
        str(HERE / "small_operator.py"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "KUBECONFIG": str(plane.kubeconfig)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_operator_sees_changes_and_reports_status(api: Api, widgets: str, core: str, operator: Path) -> None:
    api.create(widgets, widget("w"))

    def observed(generation: int) -> bool:
        return api.get(f"{widgets}/w").get("status", {}).get("observedGeneration") == generation

    eventually(lambda: observed(1), f"creation is handled; see {operator}")
    api.merge(f"{widgets}/w", {"spec": {"paused": True}})
    eventually(lambda: observed(2), "the change is handled")
    eventually(
        lambda: "Observed" in {event["reason"] for event in api.get(f"{core}/events")["items"]},
        "an event is posted",
    )
    assert api.get(f"{widgets}/w")["metadata"]["finalizers"] == ["conformance.test/kopf"]
    api.delete(f"{widgets}/w")
    eventually(lambda: api.call("GET", f"{widgets}/w")[0] == 404, "the finalizer is taken off")
    assert "Traceback" not in operator.read_text()
