"""Restores a script in the middle of a chain, and compares every bit with the run that went on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.small_runs import same_bits
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.state.capture import named_parameters_of
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

BASE, STEP, AFTER = 4, 9, 3
MORE = 4
"""Steps after the ninth, so that the next snapshot is among them."""
EQUAL, TOLD, REFUSED = "equal", "told", "refused"


@dataclass
class Script:
    """What a training script owns. `update` does all of one step but its end, and returns the loss."""

    model: nn.Module
    optimizers: list[Optimizer]
    update: Callable[[], Tensor]
    state: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        found = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            for name, parameter in named_parameters_of(optimizer, self.model):
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        found[f"{index}/{name}/{key}"] = value.detach().clone()
        return found

    def hyper(self) -> list[dict[str, Any]]:
        return [
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]


Build = Callable[[], Script]
At = Callable[[int], object]
"""Called with the number of the step."""
WIDTH = 24


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module) -> Tensor:
    return mse_loss(model(torch.randn(4, WIDTH)), torch.randn(4, WIDTH))


def adam(parameters: Iterable[Tensor]) -> Optimizer:
    return AdamW([each for each in parameters if each.requires_grad], lr=1e-2)


def momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=1e-2, momentum=0.9)


def loop(
    model: nn.Module,
    *optimizers: Optimizer,
    before: At = id,
    between: At = id,
    after: At = id,
    loss_of: Callable[[Any], Tensor] = loss_of,
    step: Callable[[], object] | None = None,
    **state: Any,
) -> Script:
    """The plain loop, with something before each step, between its gradients and its updates, and after
    these. What is called with the number of the step has it from the state. `step`: in place of those of the
    optimizers.
    """
    count = {"step": 0}
    if {before, between, after} != {id}:
        state["count"] = count

    def update() -> Tensor:
        count["step"] += 1
        before(count["step"])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        between(count["step"])
        for update in [step] if step else [optimizer.step for optimizer in optimizers]:
            update()
        after(count["step"])
        return loss

    return Script(model, list(optimizers), update, state)


def by_closure(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Any], Tensor] = loss_of,
    between: At = id,
) -> Script:
    """The loop whose optimizer asks for the loss."""

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        between(0)
        return loss

    return Script(model, [optimizer], lambda: optimizer.step(evaluate))  # type: ignore[arg-type, return-value]


def mean_square(rows: int, width: int) -> Callable[[Any], Tensor]:
    return lambda model: model(torch.randn(rows, width)).square().mean()


def simple(
    make: Callable[[Iterable[Tensor]], Optimizer] = adam,
    after: Callable[[Any, Optimizer, int], object] = lambda *_: None,
    model: Callable[[], nn.Module] = net,
) -> Build:
    """The plain loop of one model and its optimizer."""

    def build() -> Script:
        made = model()
        optimizer = make(made.parameters())
        return loop(made, optimizer, after=lambda step: after(made, optimizer, step))

    return build


def master_weights(width: int) -> tuple[nn.Module, Optimizer, Callable[[], Tensor]]:
    """Mixed precision by hand: a model, an optimizer of parameters that no module has, and what makes a step
    of both."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).bfloat16()
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def update() -> Tensor:
        loss: Tensor = model(torch.randn(4, width).bfloat16()).float().square().mean()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return loss

    return model, optimizer, update


def started(build: Build, seed: int = 0, **options: Any) -> tuple[Script, Checkpointer]:
    torch.manual_seed(seed)
    random.seed(seed)
    script = build()
    checkpointer = Checkpointer(script.model, script.optimizers, state=script.state, **options)
    return script, checkpointer


def train(script: Script, checkpointer: Checkpointer, steps: int, wait: bool = False) -> list[str]:
    """Losses, exactly as bits. `wait`: until what is saved of these steps is there."""
    losses = []
    for _ in range(steps):
        loss = float(script.update().detach())
        checkpointer.step(loss)
        losses.append(loss.hex())
    assert not wait or checkpointer.wait(DEADLINE)
    return losses


def trained(build: Build, steps: int, **options: Any) -> tuple[Script, Checkpointer]:
    """As `started`, after its first steps."""
    script, checkpointer = started(build, **options)
    checkpointer.restore()
    train(script, checkpointer, steps)
    return script, checkpointer


def saved(build: Build, steps: int, **options: Any) -> Script:
    """A run that has saved so many steps, and is over."""
    whole, checkpointer = trained(build, steps, **options)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
    return whole


def survives_from_a_snapshot(build: Build, folder: Path, **options: Any) -> tuple[Script, Script]:
    """Restores step 5 of nine from its snapshot alone. Returns that run, and the resumed one."""
    whole, checkpointer = started(build, folder=folder, every=5, **options)
    with checkpointer:
        checkpointer.restore()
        losses = train(whole, checkpointer, 5)
        assert checkpointer.wait(DEADLINE)
        assert (checkpointer.captured, checkpointer.skipped) == (1, 0)
        losses += train(whole, checkpointer, STEP - 5)
    again, checkpointer = started(build, seed=77, folder=folder, every=100, **options)
    with checkpointer:
        assert checkpointer.restore() == 5
        assert train(again, checkpointer, STEP - 5) == losses[5:]
    return whole, again


def survives(sidecar: ScriptedSidecar, build: Build, missing: int = 0, **options: Any) -> None:
    """Restores step 9 from the snapshot of step 4 and five deltas. `missing`: deltas that may be skipped
    before step 4."""
    whole, checkpointer = started(build, **options)
    checkpointer.restore()
    train(whole, checkpointer, STEP)
    checkpointer.wait(DEADLINE)
    assert sorted(sidecar.completed(Kind.DELTA)) == list(range(BASE + 1, STEP + 1))
    tensors, hyper = whole.tensors(), whole.hyper()
    sidecar.offer(BASE, STEP)
    expected = train(whole, checkpointer, AFTER)
    checkpointer.close()
    assert checkpointer.deltas_skipped == missing

    again, checkpointer = started(build, seed=77, **options)
    assert checkpointer.restore() == STEP
    same_bits(again.tensors(), tensors)
    assert again.hyper() == hyper
    # Where a script zeroes them in place, they are zeros: nothing of what was replayed.
    assert all(p.grad is None or not p.grad.count_nonzero() for p in again.model.parameters())
    assert train(again, checkpointer, AFTER) == expected
    same_bits(again.tensors(), whole.tensors())
    checkpointer.close()
    assert not sidecar.asked("mismatch", Kind.DELTA)


def outcome(sidecar: ScriptedSidecar, build: Callable[[], Script]) -> str:
    """What becomes of it. Fails if a version comes back that is not what was there."""
    try:
        whole, checkpointer = started(build, every=BASE)
        checkpointer.restore()
    except NotCapturable:
        return REFUSED
    losses = train(whole, checkpointer, STEP)
    assert checkpointer.wait(DEADLINE)
    snapshots, deltas = sidecar.completed(Kind.SNAPSHOT), sidecar.completed(Kind.DELTA)
    told = bool(sidecar.asked("no-deltas") or any(each.message for each in sidecar.asked("cannot-save")))
    if snapshots:
        # From the oldest snapshot whose chain of deltas leads on: as much as possible is replayed.
        chains = {base: _end_of_chain(base, deltas) for base in snapshots}
        base = min(chains, key=lambda base: (-chains[base], base))
        sidecar.offer(base, chains[base])
    losses += train(whole, checkpointer, MORE)
    checkpointer.close()
    told = told or bool(sidecar.asked("no-deltas"))
    if not snapshots:
        assert told, "nothing was saved, and nobody was told"
        return TOLD

    again, checkpointer = started(build, seed=77, every=BASE)
    step = checkpointer.restore()
    assert not sidecar.asked("mismatch", Kind.DELTA), "found wrong at the restore"
    assert step == chains[base]
    resumed = train(again, checkpointer, STEP + MORE - step)
    checkpointer.close()
    if resumed == losses[step:]:
        return EQUAL if step >= STEP - 1 else TOLD if told else "behind, and nobody was told"
    return (
        TOLD if told and any(each.message for each in sidecar.asked("cannot-save")) else "silently different"
    )


def _end_of_chain(base: int, deltas: dict[int, str]) -> int:
    return base + len(list(itertools.takewhile(deltas.__contains__, itertools.count(base + 1))))
