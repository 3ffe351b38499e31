"""A worker's pod of our images: library, sidecar and example trainer bring a run to its end."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path

from tests.cluster.jobs import in_bucket
from tests.images.conftest import StartPod
from tests.images.worker import Worker
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Report
from tiercheck_local.demo.stage import CREDENTIALS, ObjectStore, credentials

STEPS = 6


def test_worker_trains_to_its_end_and_its_state_reaches_the_bucket(
    start_pod: StartPod, tmp_path: Path
) -> None:
    with ObjectStore(tmp_path / "s3.log", "checkpoints") as bucket:
        opened = {
            key: base64.b64encode(value.encode()).decode()
            for key, value in credentials()["stringData"].items()
        }
        tiers = {"remote": {"s3": in_bucket(bucket), "everySteps": STEPS}}
        arguments = ["--steps", str(STEPS), "--every", "2"]
        worker = Worker(start_pod, arguments, secrets={CREDENTIALS: opened}, tiers=tiers)
        sidecar, trainer = worker.train()
        trainer.wait_for(lambda: '"digest"' in trainer.log, "the last step")
        lines = [json.loads(line) for line in trainer.log.splitlines() if line.startswith('{"')]
        assert [line["step"] for line in lines if "step" in line] == list(range(1, STEPS + 1))
        sidecar.wait_for(lambda: uploaded(worker.report()) == STEPS, "last step in the bucket")
        worker.tell(Phase.FINISH)
        assert trainer.wait() == 0, trainer.log
        sidecar.kill(signal.SIGTERM)
        assert sidecar.wait() == 0, sidecar.log


def uploaded(report: Report) -> int:
    """The step of the newest version that is complete in the remote tier."""
    return report.watermarks.remote.step if report.watermarks.remote else 0
