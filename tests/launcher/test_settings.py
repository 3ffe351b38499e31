"""The command's environment: settings that are read, the rendezvous, and processes that end with it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import Launched, order
from tiercheck.launcher import command
from tiercheck.launcher.app import Launcher, main
from tiercheck.launcher.environment import seconds_of
from tiercheck.launcher.warm import ENV_WARM_AFTER_SECONDS
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.names import ENV_RUN_DIR
from tiercheck_local.markers import free_ports


@pytest.mark.parametrize("text", ["ten", "10s", "nan", "-1", "٣x", "1e", "\udcff", "[" * 5000])
def test_a_time_that_is_none_is_taken_for_the_usual_one_and_said(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, text: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert seconds_of({"SECONDS": text}, "SECONDS", 7.0) == 7.0
    assert "SECONDS" in caplog.text
    Launcher(["true"], tmp_path, {ENV_WARM_AFTER_SECONDS: text}, 1.0)


def test_a_time_is_taken() -> None:
    assert [seconds_of({"S": text} if text else {}, "S", 7.0) for text in ("0", "2.5", "inf", None)] == [
        0.0,
        2.5,
        float("inf"),
        7.0,
    ]


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [(["--help"], (0, "usage:")), ([], (2, "usage:")), (["--", "true"], (2, "folder"))],
)
def test_where_no_sidecar_can_be_it_says_so_and_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    outcome: tuple[int, str],
) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path / "no pod"))
    assert main(arguments) == outcome[0]
    assert outcome[1] in "".join(capsys.readouterr())


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
assert os.environ["TIERCHECK_ATTEMPT"] == "1"
told = {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": total.item()}
sys.stdout.write(json.dumps(told) + "\\n")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-m", "torch.distributed.run"], id="torchrun"),
        pytest.param([sys.executable], id="python", marks=pytest.mark.extended),
    ],
)
def test_workers_on_two_addresses_meet(tmp_path: Path, command: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    host = "127.31.7.1"
    (port,) = free_ports(1)
    workers = []
    try:
        for worker in (0, 1):
            run_dir = tmp_path / str(worker)
            run_dir.mkdir()
            workers.append(
                Launched(
                    run_dir,
                    [*command, str(script)],
                    TIERCHECK_POD_IP=f"127.31.7.{worker + 1}",
                    OMP_NUM_THREADS="1",
                )
            )
        for worker, launched in enumerate(workers):
            launched.sidecar.say(
                order(1, Phase.RELEASE, worker=worker, procs_per_worker=1, master_host=host, master_port=port)
            )
        said = [json.loads(launched.line()) for launched in workers]
        for launched in workers:
            assert launched.sidecar.hears("exited", 1).exit_code == 0
    finally:
        for launched in workers:
            launched.end()
    assert said == [{"rank": rank, "world": 2, "sum": 3} for rank in (0, 1)]


_LEADER_GONE = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2): ends this thread alone
"""


def test_process_whose_first_thread_is_gone_while_another_lives_is_seen() -> None:
    """As when a thread is stuck in a driver: its leader is a zombie, and its memory, also the GPU's, is still
    in use."""
    with subprocess.Popen(
        [sys.executable, "-c", _LEADER_GONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while _state(process.pid) != "Z":
            time.sleep(0.01)
        assert command.parents()[process.pid] == os.getpid()
        process.stdin.close()
        while len(os.listdir(f"/proc/{process.pid}/task")) > 1:
            time.sleep(0.01)
        assert process.pid not in command.parents(), "a whole zombie only waits to be reaped"


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
