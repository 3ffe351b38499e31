"""Measures the peak memory of a training process that comes back, beside one from scratch."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import torch

from benchmarks.harness import MIB, ROOT, Figure, Outcome, Scale, bytes_text
from benchmarks.job import Job
from benchmarks.workload import Training
from tiercheck import Checkpointer
from tiercheck.protocol.version import Version

MOST = 1.05
_STEPS, _EVERY = 4, 2
_SECONDS = 300.0


def run(scale: Scale) -> Outcome:
    """Two lives of one job: both make as many steps and snapshots, the second one restores first."""
    size = scale.restore
    with Job(limit=6 * size + 256 * MIB, every=_EVERY) as job:
        job.begin()
        scratch = _life(job, size)
        job.begin(Version(_STEPS, job.attempt))
        resumed = _life(job, size)
    if (scratch["from"], resumed["from"]) != (0, _STEPS):
        raise RuntimeError(f"began at steps {scratch['from']} and {resumed['from']}")
    row = Figure(
        "peak memory of a resume, against training from scratch",
        bytes_text(resumed["peak"]),
        bytes_text(scratch["peak"]),
        resumed["peak"] / scratch["peak"],
        MOST,
        note=f"resident, with {bytes_text(scratch['state'])} of state and its slots",
    )
    return Outcome([row], {"scratch": scratch, "resumed": resumed})


def _life(job: Job, size: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resume_memory", str(size)],
        env={**os.environ, **job.trainer_env(0), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=_SECONDS,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _train(size: int) -> dict[str, int]:
    torch.set_num_threads(1)
    training = Training(size, tokens=32, fresh=True)
    with Checkpointer(training.model, training.optimizer) as checkpointer:
        begun = checkpointer.restore()
        for _ in range(_STEPS):
            training.compute()
            training.update()
            checkpointer.step()
            checkpointer.wait(
                _SECONDS
            )  # or a busy sidecar has one of the lives skip a snapshot, and write fewer slots
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"from": begun, "peak": peak, "state": sum(tensor.nbytes for tensor in training.tensors())}


if __name__ == "__main__":
    print(json.dumps(_train(int(sys.argv[1]))), flush=True)
