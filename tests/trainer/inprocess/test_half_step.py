"""What a step leaves behind in the middle is forgotten: the next one begins as after any other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tiercheck.protocol.names import ENV_RUN_DIR
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.half_step import forget_half_step
from tiercheck.trainer.inprocess.steps import StepLoop, entered, reenter
from tiercheck.trainer.replicas.arithmetic import bucket_layouts


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_pipeline_meets_the_rank_that_joins_as_at_its_first_step_and_with_no_loss_of_the_last() -> None:
    """Or that one would wait for ever for the shapes that all stages exchange then."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = nn.Linear(2, 2)
    stage = PipelineStage(part, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, _: found.sum())
    schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    flags = [name for name in vars(schedule) if name.endswith("initialized")]
    assert any(getattr(schedule, name) for name in flags)
    schedule._internal_losses.append(torch.ones(()))
    stage.bwd_cache[0] = (None,)
    nothing: Any = SimpleNamespace(optimizers=(), state={}, arithmetic=SimpleNamespace(layouts={}))
    forget_half_step([part], nothing)
    assert not any(getattr(schedule, name) for name in flags)
    assert not schedule._internal_losses
    assert not stage.fwd_cache
    assert not stage.bwd_cache
    assert all(parameter.grad is None for parameter in part.parameters())


@pytest.mark.usefixtures("one_of_two")
def test_parameters_that_a_step_freezes_until_its_end_are_trained_again_when_it_was_left() -> None:
    """As a GAN freezes the discriminator while it trains the generator."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replicated = nn.parallel.DistributedDataParallel(model)
    layouts = bucket_layouts([("", replicated)])
    model[0].requires_grad_(False)
    trained: Any = SimpleNamespace(optimizers=(), state={}, arithmetic=SimpleNamespace(layouts=layouts))
    forget_half_step([replicated], trained)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert bucket_layouts([("", replicated)]).keys() == layouts.keys()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepLoop]:
    """The loop of a process that leaves whatever raises, without a job around it."""
    loop = StepLoop(0, 1, lambda: None, lambda: 1)
    monkeypatch.setattr(loop, "_wait_for_release", lambda: SimpleNamespace(master_host="", master_port=0))
    monkeypatch.setattr(loop, "_is_over", lambda error, _: error is not None)
    for name in ("reconnect", "enter_function", "detach"):
        monkeypatch.setattr(groups(), name, lambda *_: None)
    yield loop
    torch.set_grad_enabled(True)


def test_evaluation_that_was_left_keeps_no_gradients_off(left: StepLoop) -> None:
    """Where the script switches them off by a call, whose end it did not reach."""
    begun = []
    for step in left.steps(1, 2):
        begun.append(torch.is_grad_enabled())
        with step:
            torch.set_grad_enabled(len(begun) > 1)
            assert len(begun) > 1, "the attempt ends in the first one's evaluation"
    assert begun == [True, True]


def test_function_that_is_called_again_begins_with_gradients(
    left: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its first call was left in an evaluation that had switched them off."""
    monkeypatch.setenv(ENV_RUN_DIR, "run")
    begun = []

    def train() -> None:
        begun.append(torch.is_grad_enabled())
        now = entered()
        assert now is not None
        now.loop = left
        torch.set_grad_enabled(len(begun) > 1)
        assert len(begun) > 1, "the attempt ends in the first one's evaluation"

    reenter(train)
    assert begun == [True, True]
