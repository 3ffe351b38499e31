"""SIGTERM ends the first process of every container, at any moment of its first seconds.

As PID 1 it ends by no signal that it does not catch. Moments are counted from the first line of the program,
which sets the handler: before, Python itself is starting.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.access import Access
from tests.chart.releases import NAMESPACE, of_kind
from tests.images.conftest import StartPod
from tests.images.container import Container
from tests.images.pods import Pod
from tests.images.test_operator_image import operators_pod
from tests.images.tls_front import in_cluster
from tests.images.worker import Worker
from tiercheck.protocol import names

MOMENTS = (0.0, 0.05, 0.15, 0.4, 0.8, 1.5, 3.0)
SECONDS = 2.0
"""It may take to end."""
ORDERLY = (0, 128 + signal.SIGTERM)
"""Exit codes."""
TRIES = 3
"""For a moment at which it took longer, because the machine was busy with something else."""


def operator(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    """No API server answers it."""
    with in_cluster(Access("http://127.0.0.1:9", {}, None), folder / "account", NAMESPACE) as variables:
        return start_pod(operators_pod(), variables=variables, account=folder / "account"), "operator"


def library(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    return Worker(start_pod, []).pod, names.LIBRARY_CONTAINER


def sidecar(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    return Worker(start_pod, []).pod, names.SIDECAR_CONTAINER


def launcher(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    pod = Worker(start_pod, []).pod
    assert pod.start(names.LIBRARY_CONTAINER).wait() == 0
    return pod, names.TRAINER_CONTAINER


def trainer_alone(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    """By the image's own entry point, with the library and nothing else of TierCheck."""
    pod, name = launcher(start_pod, folder)
    (container,) = pod.spec["containers"]
    del container["command"]
    container["args"] = ["--folder", "/tmp/checkpoints"]
    container["env"] = [{"name": "PYTHONPATH", "value": names.LIBRARY_DIR}]
    return pod, name


def node_memory(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    worker = Worker(start_pod, [], tiers={"local": {"medium": "NodeMemory"}})
    return worker.pod, worker.pod.spec["initContainers"][1]["name"]


def janitor(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    (daemons,) = of_kind("DaemonSet", {"nodeMemory": {"janitor": {"enabled": True}}})
    return start_pod({"metadata": {}, "spec": daemons["spec"]["template"]["spec"]}), "janitor"


def helm_test(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    (test,) = (entry for entry in of_kind("Pod") if entry["metadata"]["name"].endswith("-test"))
    return start_pod(test), "test"


ALL = [operator, library, sidecar, launcher, trainer_alone, node_memory, janitor, helm_test]


@pytest.mark.parametrize("which", ALL, ids=lambda which: which.__name__)
def test_sigterm_in_the_first_seconds_ends_it_within_two(
    which: Any, start_pod: StartPod, tmp_path: Path
) -> None:
    pod, name = which(start_pod, tmp_path)
    for moment in MOMENTS:
        ends_soon(lambda after: seconds_to_end(pod.start(name), after), moment)


def test_sigterm_ends_a_worker_that_trains_within_two_seconds(start_pod: StartPod) -> None:
    """The launcher passes it on to the command, and waits for it."""

    def once(moment: float) -> float:
        worker = Worker(start_pod, [])
        sidecar, trainer = worker.train()
        try:
            return seconds_to_end(trainer, moment, codes=range(256))  # torchrun's
        finally:
            sidecar.remove()

    for moment in MOMENTS[-3:]:
        ends_soon(once, moment)


def ends_soon(once: Callable[[float], float], moment: float) -> None:
    """`once` tells it to end at that moment, and how long it took."""
    took = [once(moment)]
    while took[-1] > SECONDS and len(took) < TRIES:
        took.append(once(moment))
    assert took[-1] <= SECONDS, f"told after {moment} s, it took {took} s to end"


def seconds_to_end(container: Container, moment: float, codes: Collection[int] = ORDERLY) -> float:
    """From SIGTERM, `moment` seconds after it began to listen. 0 if it had done its work before."""
    container.wait_for(
        lambda: container.hears(signal.SIGTERM) or container.ended, "sign that it hears SIGTERM"
    )
    if container.ends_within(moment):
        assert container.wait() == 0, container.log
        return 0.0
    began = time.monotonic()
    container.kill(signal.SIGTERM)
    assert container.wait() in codes, container.log
    return time.monotonic() - began
