"""A replacement builds its model alone, or says at which line its script needs the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tiercheck.protocol.names import ENV_ATTEMPT, ENV_JOINS, ENV_RUN_DIR

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
