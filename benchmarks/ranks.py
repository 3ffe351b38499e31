"""A program in several processes that make up a process group, and what each of them found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale import ROOT

_SECONDS = 500.0


def run(module: str, world: int, *arguments: object) -> list[dict[str, Any]]:
    """`python -m MODULE MEET RANK WORLD ARGUMENTS...` for each rank; what `be_rank` printed there. Raises
    RuntimeError if one fails."""
    with tempfile.TemporaryDirectory(prefix="tcb-") as place:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, f"{place}/meet", str(rank), str(world), *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        end = time.monotonic() + _SECONDS
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > end:
                    raise RuntimeError(f"{module} with {world} ranks failed")
                time.sleep(0.05)
            return [json.loads((process.communicate()[0]).splitlines()[-1]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def be_rank(measure: Callable[[Path, list[str]], dict[str, Any]]) -> None:
    """The other side of `run`: join the group, print what `measure` of the first argument (a folder) and the
    others finds."""
    import torch
    import torch.distributed as dist

    meet, rank, world, folder, *others = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=int(world))
    print(json.dumps(measure(Path(folder), others)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
