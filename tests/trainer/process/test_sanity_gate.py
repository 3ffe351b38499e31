"""Nothing poisoned becomes a restore point, unless the script asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiercheck import Checkpointer


@pytest.mark.parametrize(("gate", "captured"), [(True, 0), (False, 1)])
def test_infinite_loss_is_refused_only_with_the_gate(tmp_path: Path, gate: bool, captured: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, every=1, folder=tmp_path, sanity_gate=gate) as checkpointer:
        checkpointer.restore()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpointer.step(loss=float("inf"))
        assert checkpointer.wait(60)
        assert (checkpointer.captured, checkpointer.skipped) == (captured, 1 - captured)
