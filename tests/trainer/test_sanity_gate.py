"""Nothing poisoned becomes a restore point, unless the script asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiercheck import Checkpointer
from tiercheck.trainer.save.slot_context import Sanity


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


def test_a_good_step_ends_the_row() -> None:
    sanity = Sanity()
    for step in (3, 4, 5):
        sanity.refused(step)
    assert sanity.in_a_row == 3
    sanity.good(6)
    assert sanity.in_a_row == 0


def test_steps_that_nobody_looked_at_do_not_end_it() -> None:
    sanity = Sanity()
    sanity.refused(4)
    sanity.refused(8)  # a state that is not finite does not heal
    assert sanity.in_a_row == 5


def test_a_step_counts_once_and_a_good_gradient_does_not_outweigh_its_loss() -> None:
    sanity = Sanity()
    sanity.refused(3)
    sanity.refused(3)
    sanity.good(3)
    sanity.good(2)
    assert sanity.in_a_row == 1
