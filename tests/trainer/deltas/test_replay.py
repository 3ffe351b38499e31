"""Promise: a snapshot and its deltas give the last state, bit for bit, for every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.restore.test_bitwise_restore import OPTIMIZERS
from tests.trainer.small_runs import MakeOptimizer, Run, same_bits
from tiercheck.protocol.version import Kind

MORE: dict[str, MakeOptimizer] = {
    "sgd-momentum-plain": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1
    ),
    "sgd-fused": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
    "sgd-weight-decay-maximize": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-3, weight_decay=0.1, maximize=True, foreach=True
    ),
    "adam-fused": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, fused=True),
    "adamw-loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "adamw-amsgrad-foreach": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=True),
    "adagrad-fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "adafactor-foreach": lambda model: torch.optim.Adafactor(model.parameters(), foreach=True),
}
if hasattr(torch.optim, "Muon"):
    MORE["muon"] = lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
ALL = OPTIMIZERS | MORE


@pytest.mark.parametrize("optimizer", ALL)
def test_replayed_run_continues_with_the_same_bits(
    delta_sidecar: ScriptedSidecar, tmp_path: Path, optimizer: str
) -> None:
    whole = Run(ALL[optimizer], tmp_path, every=None)
    whole.checkpointer.restore()
    assert whole.checkpointer.every == 4
    whole.train(11)
    whole.checkpointer.wait(DEADLINE)
    assert whole.checkpointer.deltas == 7  # of steps 5 to 11; those before lead nowhere
    state = whole.state()
    expected = whole.train(4)
    whole.checkpointer.close()
    assert whole.checkpointer.deltas_skipped == 0

    delta_sidecar.offer(base=4, step=11)
    again = Run(ALL[optimizer], tmp_path, seed=99, every=None)
    assert again.checkpointer.restore() == 11
    same_bits(again.state(), state)
    assert again.train(4) == expected
    same_bits(again.state(), whole.state())
    again.checkpointer.close()
    assert not delta_sidecar.asked("mismatch", Kind.DELTA)
