"""A worker's pod of our images: the library comes by a volume, the sidecar keeps the state, the example trains and ends."""

from __future__ import annotations

import json
import signal

from tests.images.conftest import StartPod
from tests.images.worker import Worker
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Report

STEPS = 6


def test_worker_trains_from_the_first_step_to_its_end(start_pod: StartPod) -> None:
    worker = Worker(start_pod, ["--steps", str(STEPS), "--every", "2"])
    sidecar, trainer = worker.train()
    trainer.wait_for(lambda: '"digest"' in trainer.log, "the last step")
    lines = [json.loads(line) for line in trainer.log.splitlines() if line.startswith('{"')]
    assert [line["step"] for line in lines if "step" in line] == list(range(1, STEPS + 1))
    sidecar.wait_for(lambda: kept(worker.report()) == STEPS, "copy of the last step")
    worker.tell(Phase.FINISH)
    assert trainer.wait() == 0, trainer.log
    sidecar.kill(signal.SIGTERM)
    assert sidecar.wait() == 0, sidecar.log


def kept(report: Report) -> int:
    """The step of the newest version in the worker's memory."""
    return report.watermarks.local.step if report.watermarks.local else 0
