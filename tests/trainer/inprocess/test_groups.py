"""A replacement builds its model alone, or says at which line its script needs the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.trainer.inprocess.renewing_script import TIMES
from tiercheck.protocol.names import ENV_ATTEMPT, ENV_JOINS, ENV_RUN_DIR
from tiercheck.trainer.inprocess.groups import ReconnectableGroups, _Made
from tiercheck_local.markers import free_ports

SCRIPT = Path(__file__).with_name("alone_script.py")


def test_model_is_built_alone_but_no_value_of_another_rank_is_made_up(tmp_path: Path) -> None:
    alone = {
        ENV_JOINS: "1", ENV_RUN_DIR: str(tmp_path), ENV_ATTEMPT: "2", "RANK": "1", "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    command, environment = [sys.executable, str(SCRIPT)], {**os.environ, **alone}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    said = ended.stdout.splitlines()
    assert said[:1] == ["built "], ended.stderr
    called = [re.sub(r":\d+$", "", line.rpartition(" in ")[2]) for line in said[1:]]
    names = ("broadcast", "broadcast_object_list", "all_gather_object")
    assert called == [f"{name} at alone_script.py" for name in names]


def test_process_that_cannot_stay_says_what_the_script_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ReconnectableGroups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert re.search("was made before `import tiercheck`.*: make it by new_group in", found.refusal())
        found._made.append(_Made({}, "gloo", dist.group.WORLD))
        found.exchanged = "broadcast at script.py:1"
        assert found.refusal().endswith("before restore(), in broadcast at script.py:1: do it afterwards")
        found.exchanged = ""
        with monkeypatch.context() as started:
            started.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            assert found.refusal().endswith(": it does with --nproc-per-node and -m alone")
        assert not found.refusal()
    finally:
        dist.destroy_process_group()
    assert found.refusal() == "the process group was destroyed: destroy it after the last step only"


def test_old_connections_go_with_their_threads_however_often_there_are_new_ones(
    tmp_path: Path,
) -> None:
    """And a function that is called again for each of them has the groups that it had."""
    script, ports = Path(__file__).with_name("renewing_script.py"), map(str, free_ports(TIMES))
    command = [sys.executable, str(script), *ports]
    ranks = []
    for rank in range(3):
        mine = {
            ENV_JOINS: "1", ENV_RUN_DIR: str(tmp_path), "RANK": str(rank), "WORLD_SIZE": "3",
            "RES_OPTIONS": "timeout:1",  # torch asks for the name of each peer, and names are not tested here
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env={**os.environ, **mine}, stderr=subprocess.PIPE, text=True))
    said = [each.communicate(timeout=120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0, 0], said


def test_collective_that_never_ends_holds_up_no_new_connections(tmp_path: Path) -> None:
    """gloo waits for it where the old connections are closed."""
    script, ports = Path(__file__).with_name("stuck_script.py"), list(map(str, free_ports(2)))

    def start(what: str, rank: int, **more: str) -> subprocess.Popen[str]:
        environment = {**os.environ, ENV_RUN_DIR: str(tmp_path), "RANK": str(rank), "WORLD_SIZE": "2", **more}
        command = [sys.executable, str(script), what, str(rank), *ports]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    waiting, absent = start("waits", 0), start("absent", 1)
    assert absent.stdout is not None
    assert absent.stdout.readline() == "absent\n"
    joining = start("joins", 1, **{ENV_JOINS: "1"})
    try:
        said = [each.stdout.readline() for each in (waiting, joining) if each.stdout is not None]
        assert said == ["renewed 2 False\n"] * 2
        assert absent.poll() is None
    finally:
        for each in (waiting, absent, joining):
            each.kill()
            each.communicate()
