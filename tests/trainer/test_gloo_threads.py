"""Promise: no process ends while a thread of gloo could still ask for the interpreter."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiercheck.trainer import process

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")

AT_EXIT = """
import atexit
from tiercheck.trainer import process
process.wait_until_idle = lambda: print("waited")
import torch
from tiercheck import Checkpointer
model = torch.nn.Linear(2, 2)
Checkpointer(model, torch.optim.SGD(model.parameters()), folder={folder!r})
atexit.register(print, "later hook")
"""

GROUP = """
import torch
import torch.distributed as dist
from tiercheck.trainer.process import _gloo_threads
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # starts the threads that compute
before = set(_gloo_threads())
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))  # whose thread has named itself before
print(len(set(_gloo_threads()) - before))
dist.destroy_process_group()
"""


def test_threads_of_gloo_are_found_whether_torch_names_them_or_not(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROUP.format(folder=tmp_path)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert int(run.stdout.splitlines()[-1]) > 0  # torch prints as well


def test_waits_for_a_busy_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PATIENCE", 60.0)
    begun, finished, leave = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 300_000)  # computes without the interpreter lock
        finished.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        process.wait_until_idle()
        assert finished.is_set()
    finally:
        leave.set()
        thread.join()


def test_a_checkpointer_makes_its_process_wait_after_all_later_hooks(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(folder=str(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n")[:2] == ["later hook", "waited"]
