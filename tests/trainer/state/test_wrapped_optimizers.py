"""Promise: an optimizer around another one comes back with what it keeps beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD, Optimizer

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import EQUAL, TOLD, Script, outcome, started, survives_from_a_snapshot
from tiercheck import Checkpointer
from tiercheck.trainer.tensors.leaves import NotCapturable

WIDTH = 8


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def script(wrap: Callable[[Optimizer], Any]) -> Script:
    """Its loss shows how often the averager was called, and what it counted."""
    model = nn.Linear(WIDTH, WIDTH)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(inner)

    def update() -> Tensor:
        inner.zero_grad()
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        counted = optimizer.averager.step if hasattr(optimizer, "averager") else optimizer.steps
        return loss + counted

    return Script(model, [optimizer], update)


class Passing(Optimizer):
    """Of somebody's own; it counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.steps = optimizer, optimizer.param_groups, 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return self.optimizer.step(closure)


class Elsewhere(Passing):
    """Keeps in an object what its state_dict does not show."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.history = _History()


class _History:
    last = 0


class OfItsOwn(Passing):
    state: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = defaultdict(dict)


class Alone(Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state = [{"params": list(parameters)}], defaultdict(dict)


def averaged(inner: Optimizer) -> Any:
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=3, warmup_steps=2))


@pytest.mark.parametrize("wrap", [averaged, Passing], ids=["torch's own", "somebody's own"])
def test_wrapper_comes_back_with_what_it_counts(wrap: Callable[[Optimizer], Any], tmp_path: Path) -> None:
    survives_from_a_snapshot(lambda: script(wrap), tmp_path / "checkpoints")


@pytest.mark.parametrize("wrap", [averaged, Passing], ids=["torch's own", "somebody's own"])
def test_wrapper_comes_back_from_deltas_or_is_told(
    wrap: Callable[[Optimizer], Any], delta_sidecar: ScriptedSidecar
) -> None:
    assert outcome(delta_sidecar, lambda: script(wrap)) in (EQUAL, TOLD)


def test_what_a_wrapper_does_not_show_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, checkpointer = started(lambda: script(Elsewhere), folder=tmp_path)
    checkpointer.close()
    assert "Elsewhere.history (_History) is in no version" in caplog.text
    assert "state={'history'" in caplog.text


def test_wrapper_with_a_state_of_its_own_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(NotCapturable, match=r"OfItsOwn does not call.* \[optimizer.optimizer\]"):
        started(lambda: script(OfItsOwn), folder=tmp_path)


def test_optimizer_whose_updates_cannot_be_seen_is_refused_with_what_to_call(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(NotCapturable, match=r"Alone does not call Optimizer.__init__"):
        Checkpointer(model, Alone(model.parameters()), folder=tmp_path)


class Raises(nn.Linear):
    def get_extra_state(self) -> Any:
        raise LookupError("no state")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: (model, {"a": SGD(model.parameters())}, None), "str is no torch.optim.Optimizer"),
        (lambda model: (model.state_dict(), SGD(model.parameters()), None), "not OrderedDict"),
        (lambda model: (model, SGD(model.parameters()), [{"a": 1}]), "and list"),
        (lambda model: (Raises(2, 2), SGD(model.parameters()), None), "LookupError: no state"),
    ],
    ids=["optimizers by name", "no module", "state without names", "state_dict that raises"],
)
def test_what_a_checkpointer_cannot_take_is_told_in_a_sentence(
    given: Callable[[nn.Module], Any], message: str, tmp_path: Path
) -> None:
    model, optimizer, state = given(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=message):
        Checkpointer(model, optimizer, state=state, folder=tmp_path)
