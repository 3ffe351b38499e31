"""Promise: the ranks of all workers find each other, and the user's command stays as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import Launched, order
from tiercheck.protocol.directive import Phase
from tiercheck_local.addresses import free_ports

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
