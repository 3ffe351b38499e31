"""Promise: a process that outlives an attempt holds nothing of it afterwards."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
from torch import nn

from tiercheck.trainer.checkpointer import Checkpointer


def test_what_an_attempt_held_goes_with_it_before_any_garbage_is_collected(tmp_path: Path) -> None:
    """Rank 0 keeps a store, with a thread and sockets: a hundred recoveries would leave a hundred."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(model, optimizer, folder=tmp_path, every=2)
    for _ in range(checkpointer.restore(), 5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step()
    held = {
        name: weakref.ref(value)
        for name, value in vars(checkpointer).items()
        if type(value).__module__.startswith("tiercheck.") and name not in ("_loop", "_claim", "_stop")
    }
    assert {"_saver", "_deltas", "_backend", "_trained"} <= set(held)
    gc.collect()
    gc.disable()
    try:
        checkpointer._pause()
        checkpointer._open()
        assert [name for name, reference in held.items() if reference() is not None] == []
    finally:
        gc.enable()
        checkpointer.close()
