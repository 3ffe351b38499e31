"""A replacement builds its model alone, or says at which line its script needs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercheck.protocol.names import ENV_ATTEMPT, ENV_JOINS, ENV_RUN_DIR

SCRIPT = Path(__file__).with_name("alone_script.py")


def build(case: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    alone = {
        ENV_JOINS: "1", ENV_RUN_DIR: str(tmp_path), ENV_ATTEMPT: "2", "RANK": "1", "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CASE": case,
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT)]
    environment = {**os.environ, **alone}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("case", ["ddp", "fsdp", "tensor", "barrier"])
def test_what_only_torch_exchanges_is_built_alone(case: str, tmp_path: Path) -> None:
    ended = build(case, tmp_path)
    assert ended.stdout == "built \n", ended.stderr


@pytest.mark.parametrize("case", ["broadcast", "objects", "gather"])
def test_value_of_another_rank_is_never_made_up(case: str, tmp_path: Path) -> None:
    ended = build(case, tmp_path)
    assert ended.returncode == 1
    assert "NotAlone: the script exchanges values with other ranks before restore(), in" in ended.stderr
    assert "at alone_script.py:" in ended.stderr
