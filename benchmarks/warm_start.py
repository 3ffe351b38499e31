"""Measures how soon after the release user code runs, warm and cold.

In turn, in one run, through the real launcher process.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import ROOT, Figure, Outcome, Scale, seconds_text
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import Order
from tiercheck_local.markers import free_ports

_SCRIPT = """
import time; began = time.time()
import os, torch
from torch import nn
model = nn.Linear(8, 8); optimizer = torch.optim.AdamW(model.parameters())
model(torch.zeros(1, 8)).sum().backward(); optimizer.step()
os.write(1, f"{began} {time.time()}\\n".encode())
"""
_IMPORT_SECONDS = 60.0


def run(scale: Scale) -> Outcome:
    """Medians over the rounds."""
    rounds = 2 if scale.quick else 5
    found: dict[str, list[tuple[float, float]]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory(prefix="tcb-") as folder:
        script = Path(folder) / "train.py"
        script.write_text(_SCRIPT)
        for number in range(rounds):
            for kind, times in found.items():
                run_dir = Path(folder) / f"{kind}{number}"
                run_dir.mkdir()
                times.append(_once(run_dir, [sys.executable, str(script)], warm=kind == "warm"))
    middle = {
        kind: [statistics.median(each) for each in zip(*times, strict=True)] for kind, times in found.items()
    }
    return Outcome(
        [_row("from release to the first optimizer step", middle["warm"], middle["cold"])],
        {"seconds to user code and to the first step": middle},
    )


def _row(name: str, ours: list[float], other: list[float]) -> Figure:
    told = f"user code after {seconds_text(ours[0])}, step after {seconds_text(ours[1])}"
    against = f"a cold start: {seconds_text(other[0])}, {seconds_text(other[1])}"
    return Figure(name, told, against, ours[1] / other[1])


def _once(run_dir: Path, command: list[str], *, warm: bool) -> tuple[float, float]:
    """Seconds from the release to the first line of the script, and to the end of its first step."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "sidecar.sock"))
        listener.listen()
        environment = {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            "PYTHONPATH": str(ROOT),
            "TIERCHECK_RUN_DIR": str(run_dir),
            "TIERCHECK_WARM": str(int(warm)),
        }
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tiercheck.launcher", "--", *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert launcher.stdout is not None
        try:
            connection, _ = listener.accept()
            with connection:
                if warm:
                    _until_idle(launcher.pid)
                (port,) = free_ports(1)
                at = time.time()
                connection.sendall(to_json(Order(1, Phase.RELEASE, 0, 1, 1, "127.0.0.1", port)) + b"\n")
                begun, stepped = map(float, launcher.stdout.readline().split())
        finally:
            launcher.kill()
            launcher.wait()
            launcher.stdout.close()
    return begun - at, stepped - at


def _until_idle(launcher: int) -> None:
    """Until the launcher's child has imported everything and sleeps on its socket."""
    end = time.monotonic() + _IMPORT_SECONDS
    while time.monotonic() < end:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        if any("unix_stream" in Path(f"/proc/{child}/wchan").read_text() for child in children):
            return
        time.sleep(0.05)
    raise TimeoutError("no interpreter became ready")
