"""Several lives of one example in one process: what is slow, importing its framework, is done once, then each life is a fork.

    python lives.py <modules to import, with commas> <script> <folder> <step to kill at>...

Prints a JSON list for each life: the lines that it had said. The first is never killed; the others share a folder, and are
killed as soon as they have said the step; the last is not.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
from typing import Any


def live(script: str, folder: str, kill_at: int | None) -> list[dict[str, Any]]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            os.dup2(write, 1)
            sys.stdout = os.fdopen(1, "w")
            sys.argv = [script, "--folder", folder, "--every", "1"]
            runpy.run_path(script, run_name="__main__")
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    said: list[dict[str, Any]] = []
    with os.fdopen(read) as lines:
        for line in lines:
            if not line.startswith('{"step"'):
                continue
            said.append(json.loads(line))
            if said[-1]["step"] == kill_at:
                os.kill(child, signal.SIGKILL)
                break
    _, status = os.waitpid(child, 0)
    expected = -signal.SIGKILL if kill_at is not None else 0
    if os.waitstatus_to_exitcode(status) != expected:
        sys.exit(f"a life ended with {os.waitstatus_to_exitcode(status)} instead of {expected}")
    return said


def main(modules: str, script: str, folder: str, *kills: str) -> None:
    for name in modules.split(","):
        importlib.import_module(name)
    print(json.dumps(live(script, f"{folder}/whole", None)), flush=True)
    for kill in (*map(int, kills), None):
        print(json.dumps(live(script, f"{folder}/cut", kill)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
