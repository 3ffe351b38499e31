"""Promise: a process that outlives an attempt holds nothing of it afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.scripted_sidecar import ScriptedSidecar, until
from tiercheck.trainer.checkpointer import Checkpointer
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.steps import reenter


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


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(value)
    return done


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("again", [False, True], ids=["steps", "reenter"])
@pytest.mark.parametrize(
    ("forgotten", "why"),
    [
        ("", ""),
        ("scheduler", '`state` has none: give the Checkpointer state={"scheduler"'),
        ("hook", "changes, and is in no version. Give `state`"),
    ],
)
def test_process_with_state_that_a_replacement_would_begin_anew_says_that_it_will_not_stay(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, forgotten: str, why: str, again: bool
) -> None:
    """Or replicas would make other updates from the same gradients."""
    others = threading.enumerate()
    monkeypatch.setattr(groups(), "refusal", lambda: "")
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state: dict[str, Any] = {"hook": Counter(), "scheduler": scheduler}
    model.register_comm_hook(
        state["hook"], lambda calls, bucket: calls.update(made=1) or _done(bucket.buffer())
    )
    state.pop(forgotten, None)

    def refusals() -> list[str]:
        return [each.refusal for each in delta_sidecar.hellos if each.role == "listener"]

    def train() -> None:
        for step in checkpointer.steps(3):
            with step:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                scheduler.step()
                checkpointer.step()
        until(lambda: why in "".join(refusals()[-1:]) and bool(refusals()), f"{why}; heard {refusals()}")

    with Checkpointer(model, optimizer, state=state, every=1) as checkpointer:
        (reenter if again else lambda function: function())(train)
    mine = [
        each for each in threading.enumerate() if each.name == "tiercheck-listener" and each not in others
    ]
    until(lambda: not any(each.is_alive() for each in mine), "its end")
    assert {*refusals()} <= ({""} if not why else {"", refusals()[-1]})
