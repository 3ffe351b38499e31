"""One rank whose replicas drift apart on purpose: `python drifting_script.py FOLDER STEPS DRIFTS_AFTER [HOW]`.

HOW: "local" (no averaging of gradients any more, as in local SGD), "element" (one rank changes some elements of one parameter),
"hidden" (as local, and nobody compares while it trains). Prints what a test compares.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tiercheck import Checkpointer
from tiercheck.trainer.backend import RestoreError
from tiercheck.trainer.capture import take_inventory
from tiercheck.trainer.equality import Equality
from tiercheck.trainer.state_hash import fingerprints


def main(folder: Path, steps: int, drifts_after: int, how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiercheck").addHandler(handler)
    if how == "hidden":
        Equality.judge = lambda *_: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: dict[str, object] = {"refused": ""}
    checkpointer = Checkpointer(model, optimizer, folder=folder, every=1, keep=20)
    try:
        first = said["first"] = checkpointer.restore()
    except RestoreError as error:
        first, steps, said["refused"] = 0, 0, str(error)
    inner = model.module
    state = lambda: fingerprints([entry.tensor for entry in take_inventory(inner, [optimizer]).entries])  # noqa: E731
    said["restored"] = state()
    for step in range(first + 1, steps + 1):
        drifting = step > drifts_after
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        (inner if drifting and how != "element" else model)(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if drifting and how == "element" and rank == 1:
            with torch.no_grad():
                inner[0].weight.view(-1)[::50] += 1e-3
        checkpointer.step()
        checkpointer.wait()
        dist.barrier()
    said["end"] = state()
    checkpointer.close()
    said |= {"captured": checkpointer.captured, "skipped": checkpointer.skipped, "warnings": warnings}
    said["whole"] = checkpointer._shares.whole
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "local")
