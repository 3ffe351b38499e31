"""Sets the stage of all tests here once, in the network of a cluster that already runs.

`make real-cluster-test` started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from play import Report
    from stage import Stage
    from testbed.cluster import Testbed
    from training import Begin, LossReader, Training, UnhurtRun

_PATIENCE = 3600
"""Seconds for a test: the run without faults trains every step of the one with faults again."""
_FOLDER = os.environ.get("TIERCHECK_TESTBED", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from testbed.needs import missing

    here = Path(__file__).parent
    reason = missing() or ("" if _FOLDER else "`make real-cluster-test` starts a cluster for these tests")
    for item in items:
        if here in item.path.parents:
            item.add_marker("real_cluster")
            item.add_marker(pytest.mark.timeout(_PATIENCE))
            if reason and item.get_closest_marker("anywhere") is None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A run takes long: why a test failed is told when it did."""
    if report.failed and "real_cluster" in report.keywords:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    import helm_python
    import stage as scenery
    from testbed.cluster import Testbed

    testbed = Testbed(Path(_FOLDER))
    scenery.push_images(testbed)
    scenery.pull_images(testbed)
    scenery.label_nodes(testbed)
    server = scenery.start_s3(testbed.folder / "s3")
    os.environ["TIERCHECK_S3"] = server.endpoint
    try:
        with helm_python.Config(kubeconfig_path=testbed.kubeconfig, namespace=scenery.SYSTEM) as config:
            found = scenery.Stage(testbed, server, config)
            found.bucket().create_bucket(Bucket=scenery.BUCKET)
            found.install()
            testbed.kubectl(
                "label", "namespace", scenery.SYSTEM, "pod-security.kubernetes.io/enforce=restricted"
            )
            found.make_namespace(scenery.TRAINING)
            yield found
    finally:
        server.stop()


@pytest.fixture(scope="session")
def losses(stage: Stage) -> Iterator[LossReader]:
    from training import LossReader

    reader = LossReader(stage.testbed.nodes)
    reader.start()
    yield reader
    reader.stop()


@pytest.fixture(scope="session")
def unhurt(stage: Stage, losses: LossReader) -> UnhurtRun:
    from training import UnhurtRun

    return UnhurtRun(stage.testbed, losses)


@pytest.fixture
def healed(stage: Stage) -> Iterator[Testbed]:
    """Whatever a test broke is well again before the next one."""
    import faults
    from stage import SYSTEM, label_nodes

    yield stage.testbed
    stage.s3.go_on()
    if faults.mend_nodes(stage.testbed):
        label_nodes(stage.testbed)
        # Elsewhere nodes do not fail every minute. The operator prefers others for a while, and has forgotten
        # that anew.
        stage.testbed.kubectl("-n", SYSTEM, "rollout", "restart", "deployment/tiercheck-operator")
        stage.wait_for_operators()


@pytest.fixture
def begin(stage: Stage, losses: LossReader) -> Iterator[Begin]:
    """Starts a job of its own for a test; what is left of it afterwards is deleted."""
    from stage import wait_until_gone
    from training import Training

    begun: list[Training] = []

    def start(namespace: str, manifest: dict[str, Any]) -> Training:
        training = Training(stage.testbed, losses, namespace, manifest["metadata"]["name"])
        training.apply(manifest)
        begun.append(training)
        return training

    yield start
    for training in begun:
        stage.testbed.kubectl("-n", training.namespace, "delete", "tcj", training.name, "--ignore-not-found")
        training.stop_watching()
        wait_until_gone(stage.testbed, training.namespace, "pods")


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    from play import Report

    found = Report(Path(os.environ.get("TIERCHECK_REPORT", "real-cluster-report.md")))
    yield found
    found.write(Path(__file__).parents[2])
