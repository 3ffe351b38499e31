"""Promise: a sharded run that is killed without warning continues bit for bit, and ends with the same parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiercheck_local.addresses import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ["--steps", "12", "--layers", "1", "--width", "32", "--batch", "2", "--context", "16", "--every", "4"]
RANKS = 2


def begin(folder: Path) -> list[subprocess.Popen[str]]:
    port = str(free_ports(1)[0])
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), *SMALL, "--folder", str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS
    return [json.loads(line) for line in said[0].splitlines()]


def kill_after(processes: list[subprocess.Popen[str]], step: int) -> None:
    output = processes[0].stdout
    assert output is not None
    for line in output:
        if json.loads(line).get("step") == step:
            break
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


def test_killed_sharded_run_ends_with_the_same_losses_and_parameters(tmp_path: Path) -> None:
    whole = finish(begin(tmp_path / "whole"))
    kill_after(begin(tmp_path / "cut"), step=10)
    resumed = finish(begin(tmp_path / "cut"))
    first = resumed[0]["step"]
    assert first in (5, 9)  # 9, unless a rank was killed before its copy of step 8 was complete
    losses = {line["step"]: line["loss_hex"] for line in whole if "step" in line}
    assert list(losses) == list(range(1, 13))
    assert {line["step"]: line["loss_hex"] for line in resumed if "step" in line} == {
        step: loss for step, loss in losses.items() if step >= first
    }
    assert resumed[-1]["digest"] == whole[-1]["digest"]
