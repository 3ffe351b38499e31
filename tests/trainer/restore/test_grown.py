"""Promise: what a script adds on its way is there again, or it is told what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune
from torch.optim import AdamW, Optimizer

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import (
    EQUAL,
    Script,
    loop,
    mean_square,
    outcome,
    saved,
    started,
    survives_from_a_snapshot,
)
from tests.trainer.small_runs import same_bits
from tiercheck.trainer.checkpointer import Checkpointer
from tiercheck.trainer.restore.load import DifferentState

WIDTH = 12
Changed = Callable[[nn.Sequential, Optimizer, int], None]


def script(
    change: Changed = lambda *_: None, make: Callable[[], nn.Module] = lambda: nn.Sequential(*layers())
) -> Script:
    """The plain loop; `change` is called at the beginning of each step."""
    model: Any = make()
    optimizer = AdamW(next(iter(model.children())).parameters(), lr=1e-2)
    return loop(
        model,
        optimizer,
        before=lambda step: change(model, optimizer, step - 1),
        loss_of=mean_square(4, WIDTH),
    )


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


# Buffers.


def quantised() -> nn.Module:
    """Its observers get their shapes in the first forward."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), quantization.QuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    prepared: nn.Module = quantization.prepare_qat(model.train())
    return prepared


class Grows(nn.Module):
    """Keeps all that it has seen; `register`: whether the buffer is made in the first forward only."""

    def __init__(self, first: Tensor | None, persistent: bool = True, register: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.persistent = persistent
        if not register:
            self.register_buffer("seen", first, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", None, persistent=self.persistent)
        seen = self.seen if isinstance(self.seen, Tensor) else torch.ones(1, WIDTH)
        self.seen = torch.cat([seen, x.detach()]).detach().requires_grad_(seen.requires_grad)
        done: Tensor = self.layer(x) * self.seen.mean(0)
        return done


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "quantised": quantised,
    "grows": lambda: Grows(torch.ones(2, WIDTH)),
    "grows from nothing": lambda: Grows(torch.empty(0, WIDTH)),
    "made in the first forward": lambda: Grows(None),
    "registered in the first forward": lambda: Grows(None, register=True),
    "requires a gradient": lambda: Grows(torch.ones(2, WIDTH).requires_grad_()),
    "not persistent": lambda: Grows(torch.ones(2, WIDTH), persistent=False),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_buffer_comes_back_in_the_shape_that_it_had(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    survives_from_a_snapshot(lambda: script(make=make), tmp_path)


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_buffer_comes_back_in_the_shape_that_it_had_after_deltas(
    make: Callable[[], nn.Module], delta_sidecar: ScriptedSidecar
) -> None:
    assert outcome(delta_sidecar, lambda: script(make=make)) == EQUAL


def test_buffer_that_changed_its_shape_is_the_same_object(tmp_path: Path) -> None:
    """Others may hold it: a fake quantiser's is in two modules."""
    saved(lambda: script(make=quantised), 7, folder=tmp_path, every=1)
    again, checkpointer = started(lambda: script(make=quantised), folder=tmp_path)
    before = dict(again.model.named_buffers())
    with checkpointer:
        assert checkpointer.restore() == 7
    assert all(each is before[name] for name, each in again.model.named_buffers())


def test_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved(script, 7, folder=tmp_path, every=1)
    wider = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH))
    _, checkpointer = started(lambda: script(make=lambda: wider), folder=tmp_path)
    with checkpointer, pytest.raises(DifferentState, match=r"model/\d\.(weight|bias) is \("):
        checkpointer.restore()


# Groups, and what is frozen.


def once(change: Changed, at: int = 3) -> Callable[[], Script]:
    """A script that makes `change` when it comes to step `at`, or later if it began later."""

    def build() -> Script:
        done: list[None] = []

        def changed(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
            if step >= at and not done:
                done.append(change(model, optimizer, step))

        return script(changed)

    return build


def adds_a_group(model: nn.Sequential, optimizer: Optimizer, _: int) -> None:
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 1e-3})


def adds_a_group_and_holds_on_to_it(model: nn.Sequential, optimizer: Optimizer, _: int) -> None:
    group: dict[str, Any] = {"params": list(model[1].parameters()), "lr": 1e-3}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[-1] is group


def adds_two_groups(model: nn.Sequential, optimizer: Optimizer, _: int) -> None:
    optimizer.add_param_group({"params": model[1].weight, "lr": 1e-3})
    optimizer.add_param_group({"params": [model[1].bias]})


def freezes(model: nn.Sequential, optimizer: Optimizer, _: int) -> None:
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    model[0].weight.grad = None


@pytest.mark.parametrize(
    "change",
    [adds_a_group, adds_a_group_and_holds_on_to_it, adds_two_groups, freezes],
    ids=lambda change: change.__name__,
)
def test_script_may_do_once_more_what_was_restored(change: Changed, tmp_path: Path) -> None:
    survives_from_a_snapshot(once(change), tmp_path)


def test_group_that_was_added_twice_by_the_script_itself_is_torchs_own_error(tmp_path: Path) -> None:
    saved(once(adds_a_group), 7, folder=tmp_path, every=1)
    again, checkpointer = started(script, folder=tmp_path)
    (optimizer,), model = again.optimizers, again.model
    with checkpointer:
        assert checkpointer.restore() == 7
        assert isinstance(model, nn.Sequential)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": model[0].parameters()})
        adds_a_group(model, optimizer, 0)
        assert "add_param_group" not in vars(optimizer)
        with pytest.raises(ValueError, match="more than one parameter group"):
            adds_a_group(model, optimizer, 0)


# Parameters.


def test_pruning_masks_of_the_way_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def prunes(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            prune.random_unstructured(model[0], "weight", amount=0.5)

    survives_from_a_snapshot(lambda: script(prunes), tmp_path)
    assert "parameter (model/0.weight): pruned, as when saved" in caplog.text


def prunes_further(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    """Torch decides by the weight of the last forward, before the last update, and not by the parameter."""
    if step in (3, 5, 9):
        for each in model:
            prune.l1_unstructured(each, "weight", amount=0.2)
    model(torch.ones(1, WIDTH))  # twice in a step: the weight of the second forward lies where it lay before


def larger() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2000), nn.Linear(2000, WIDTH))


@pytest.mark.parametrize("make", [larger, lambda: nn.Sequential(*layers())], ids=["larger", "smaller"])
def test_weight_that_is_pruned_further_before_its_first_forward_loses_the_same(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    survives_from_a_snapshot(lambda: script(prunes_further, make), tmp_path)


@pytest.mark.parametrize("make", [larger, lambda: nn.Sequential(*layers())], ids=["larger", "smaller"])
def test_weight_that_is_pruned_further_after_deltas_loses_the_same(
    make: Callable[[], nn.Module], delta_sidecar: ScriptedSidecar
) -> None:
    assert outcome(delta_sidecar, lambda: script(prunes_further, make)) == EQUAL


def adapts(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    model[1].register_parameter("lora_a", nn.Parameter(torch.ones(WIDTH)))


def parametrizes(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    parametrizations.weight_norm(model[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [(adapts, "lora_a.*must add the adapter"), (parametrizes, "parametrizations.*must call")],
    ids=["adapter", "parametrization"],
)
def test_what_cannot_be_added_is_named_with_what_the_script_must_do(
    change: Changed, message: str, tmp_path: Path
) -> None:
    whole = saved(once(change), 7, folder=tmp_path, every=1)
    _, checkpointer = started(script, folder=tmp_path)
    with checkpointer, pytest.raises(DifferentState, match=f"{message}.* before `restore`"):
        checkpointer.restore()
    again = script()
    assert isinstance(again.model, nn.Sequential)
    change(again.model, again.optimizers[0], 0)
    with Checkpointer(again.model, again.optimizers, state=again.state, folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 7
    same_bits(again.tensors(), whole.tensors())
