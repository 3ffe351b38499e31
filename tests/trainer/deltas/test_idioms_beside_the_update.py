"""Idioms whose next step depends on what no optimizer updates come back too.

Target networks, buffers that come and go, phases of a training, what a script moves between groups or keeps
in them, gradients in memory of its own.

Each is left and resumed twice, from a snapshot and the deltas after it, and from a snapshot alone. As in
`test_idioms`: equal, or told.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    BASE,
    EQUAL,
    TOLD,
    WIDTH,
    Script,
    adam,
    loop,
    loss_of,
    momentum,
    net,
    outcome,
    started,
    survives_from_a_snapshot,
    train,
    trained,
)
from tiercheck.protocol.version import Kind
from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.restore.load import DifferentState

# Networks that follow another one.


def target(moves: Callable[[nn.Module, nn.Module, int], None]) -> Callable[[], Script]:
    """It is in the model, could be trained, and no optimizer has it."""

    def build() -> Script:
        model = nn.ModuleDict({"online": net()})
        model["target"] = copy.deepcopy(model["online"])

        def difference(model: Any) -> Tensor:
            batch = torch.randn(4, WIDTH)
            loss: Tensor = (model["online"](batch) - model["target"](batch).detach() - 1).square().mean()
            return loss

        def after(step: int) -> None:
            moves(model["online"], model["target"], step)

        return loop(model, adam(model["online"].parameters()), after=after, loss_of=difference)

    return build


def follows(online: nn.Module, target: nn.Module, step: int) -> None:
    for parameter, follower in zip(online.parameters(), target.parameters(), strict=True):
        follower.data.copy_(0.1 * parameter.data + 0.9 * follower.data)


def jumps(online: nn.Module, target: nn.Module, step: int) -> None:
    if step == 6:
        for parameter, follower in zip(online.parameters(), target.parameters(), strict=True):
            follower.data.copy_(parameter.data)


# Buffers that come and go.


class Carries(nn.Module):
    """`begins`: what is in its buffer at first; `goes_on`: what is in there after each forward."""

    def __init__(
        self,
        begins: Tensor | None,
        goes_on: Callable[[Tensor | None, Tensor, int], Tensor | None],
        persistent: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("carried", None if begins is None else begins.clone(), persistent=persistent)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.goes_on, self.body = goes_on, net()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.carried = self.goes_on(self.carried, x.detach(), int(self.passes))
        y: Tensor = self.body(x if self.carried is None else x + self.carried.mean(0))
        return y


def carries(*arguments: Any, beside: bool = False) -> Callable[[], Script]:
    def build() -> Script:
        module = Carries(*arguments)
        if not beside:
            return loop(module, adam(module.parameters()))
        model = net()

        def both(model: Any) -> Tensor:
            return loss_of(model) * (1 + loss_of(module).detach())

        return loop(model, adam(model.parameters()), loss_of=both, beside=module)

    return build


def first_batch(carried: Tensor | None, x: Tensor, passes: int) -> Tensor:
    return x if carried is None else carried


def cleared(carried: Tensor | None, x: Tensor, passes: int) -> Tensor | None:
    return None if passes % 3 == 0 else x[:1]


def longer(carried: Tensor | None, x: Tensor, passes: int) -> Tensor:
    return x if carried is None else torch.cat([carried[-20:], x])


def summed(carried: Tensor | None, x: Tensor, passes: int) -> Tensor:
    return x if carried is None else carried + x


# Phases.


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.body = nn.Dropout(0.5), net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.drop(x))
        return y


def evaluates_for_good(first: int) -> Callable[[], Script]:
    """As one that trains on without dropout, or that forgets `train()` after an evaluation."""

    def build() -> Script:
        model = Dropping()
        return loop(model, adam(model.parameters()), before=lambda step: model.train(step < first))

    return build


def evaluates_at_the_end_of_each_step() -> Script:
    """It trains again where the next step begins, which in a new life of the script is not the first one."""
    model, made = Dropping(), list[int]()

    def before(step: int) -> None:
        if made:
            model.train()
        made.append(step)

    return loop(model, adam(model.parameters()), before=before, after=lambda step: model.eval())


def module_beside_evaluates() -> Script:
    model, beside = net(), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))

    def both(model: Any) -> Tensor:
        return loss_of(model) + beside(torch.randn(4, WIDTH)).square().sum()

    def after(step: int) -> None:
        if step == 3:
            beside[0].eval()

    return loop(model, adam(model.parameters()), after=after, loss_of=both, beside=beside)


# Groups.


def moved_to_another_group() -> Script:
    model = net()
    first, *others = model.parameters()
    optimizer = AdamW([{"params": [first], "lr": 1e-2}, {"params": others, "lr": 1e-3}])

    def before(step: int) -> None:
        if step in (3, 6):
            left, right = (group["params"] for group in optimizer.param_groups)
            left.append(right.pop(0))

    return loop(model, optimizer, before=before)


class Averages(SGD):
    """Keeps averages up to date that its groups list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter, average in zip(group["params"], group["averages"], strict=True):
                average.lerp_(parameter, 0.1)


def average_listed_in_a_group() -> Script:
    model = net()
    average = copy.deepcopy(model)
    averages = [parameter.detach() for parameter in average.parameters()]
    optimizer = Averages([{"params": list(model.parameters()), "averages": averages}], lr=1e-2)

    def both(model: Any) -> Tensor:
        return loss_of(model) * (1 + loss_of(average).detach())

    return loop(model, optimizer, loss_of=both, average=average)


def anchors_in_a_group() -> Script:
    """Another optimizer pulls towards them; the script writes them anew."""

    class Anchored(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter, anchor in zip(group["params"], group["anchors"], strict=True):
                    parameter.grad.add_(parameter - anchor, alpha=0.1)
            super().step()

    model = net()
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = Anchored([{"params": list(model.parameters()), "anchors": anchors}], lr=1e-2, momentum=0.9)

    def after(step: int) -> None:
        if step % 2:
            for parameter, anchor in zip(
                model.parameters(), optimizer.param_groups[0]["anchors"], strict=True
            ):
                anchor.copy_(parameter.detach())

    return loop(model, optimizer, after=after)


def betas_in_tensors() -> Script:
    model = net()
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = Adam(model.parameters(), lr=torch.tensor(1e-2), betas=betas, foreach=False)

    def after(step: int) -> None:
        optimizer.param_groups[0]["betas"][0].mul_(0.97)

    return loop(model, optimizer, after=after)


# Updates.


class Scaled(SGD):
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 1e-2 * scale
        super().step()


def step_with_an_argument() -> Script:
    """The same one for so long that a probe sees nothing odd."""
    model, argument = net(), dict[str, float]()
    optimizer = Scaled(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        argument["scale"] = 1.0 if step < 5 else 0.5

    return loop(model, optimizer, before=before, step=lambda: optimizer.step(**argument))


def gradients_by_data() -> Script:
    """In memory that is used again, under another tensor each time, whose counter tells nothing."""
    model = net()
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def between(step: int) -> None:
        for parameter, own in zip(model.parameters(), sums, strict=True):
            assert parameter.grad is not None
            parameter.grad = own.zero_().add_(parameter.grad).data

    return loop(model, momentum(model.parameters()), between=between)


def gradients_of_odd_strides() -> Script:
    model = net()

    def between(step: int) -> None:
        for parameter in model.parameters():
            given: Any = parameter.grad
            parameter.grad = given.t().contiguous().t() if given.dim() > 1 else given.mean().expand(WIDTH)

    return loop(model, momentum(model.parameters()), between=between)


def rolled_back() -> Script:
    model = net()
    optimizer, best = adam(model.parameters()), dict[str, Any]()

    def after(step: int) -> None:
        if step in (2, 6):
            best.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        if step in (5, 8):
            model.load_state_dict(best["model"])
            optimizer.load_state_dict(best["optimizer"])

    return loop(model, optimizer, after=after, best=best)


def inner_and_outer() -> Script:
    """As several workers train that meet seldom; the outer optimizer has parameters of its own."""
    model = net()
    outer = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizers: list[Optimizer] = [adam(model.parameters()), SGD(outer, lr=0.7, momentum=0.9, nesterov=True)]

    def after(step: int) -> None:
        if step % 3 == 0:
            for parameter, own in zip(model.parameters(), outer, strict=True):
                own.grad = own.data - parameter.data
            optimizers[1].step()
            for parameter, own in zip(model.parameters(), outer, strict=True):
                parameter.data.copy_(own.data)

    script = loop(model, optimizers[0], after=after)
    return Script(model, optimizers, script.update, script.state)


class Experts(nn.Module):
    """All but one have no gradient; one parameter is a number, one has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.experts[int(torch.randint(4, ()))](x)
        return chosen * self.scale


def experts() -> Script:
    model = Experts()
    return loop(model, adam(model.parameters()))


def ensemble() -> Script:
    """Parameters that no module has."""
    parameters, _ = stack_module_state([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    skeleton = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def all_of_them(model: Any) -> Tensor:
        batch = torch.randn(4, WIDTH)
        losses = vmap(lambda one: functional_call(model, one, (batch,)).square().mean())(parameters)
        return losses.sum()

    return loop(skeleton, adam(parameters.values()), loss_of=all_of_them)


def in_a_thread() -> Script:
    model, thread = net(), ThreadPoolExecutor(1)
    optimizer = adam(model.parameters())
    return loop(model, optimizer, step=lambda: thread.submit(optimizer.step).result())


class Remembers(Optimizer):
    """Keeps its last gradients in a list."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            last = self.state[parameter].setdefault("last", [])
            last.append(parameter.grad.clone())
            del last[:-3]
            parameter.sub_(sum(last), alpha=1e-2)


def forgets() -> Script:
    """The script makes its lists empty, and they stay the same lists."""
    model = net()
    optimizer = Remembers(model.parameters())

    def before(step: int) -> None:
        if step == 6:
            for state in optimizer.state.values():
                state["last"].clear()

    return loop(model, optimizer, before=before)


ONES = torch.ones(1, WIDTH)
IDIOMS: dict[str, tuple[Callable[[], Script], set[str]]] = {
    "target that follows, by data": (target(follows), {TOLD, EQUAL}),
    "target that jumps, by data": (target(jumps), {EQUAL}),
    "buffer that is None until the first forward": (carries(None, first_batch), {EQUAL}),
    "buffer that is None at times": (carries(ONES, cleared), {EQUAL}),
    "persistent buffer that is None at times": (carries(ONES, cleared, True), {EQUAL}),
    "buffer that grows": (carries(ONES, longer), {EQUAL}),
    "buffer of a module beside": (carries(ONES, summed, beside=True), {TOLD, EQUAL}),
    "evaluates for good before the snapshot": (evaluates_for_good(2), {EQUAL}),
    "evaluates for good after the snapshot": (evaluates_for_good(6), {EQUAL}),
    "evaluates at the end of each step": (evaluates_at_the_end_of_each_step, {EQUAL}),
    "module beside evaluates on the way": (module_beside_evaluates, {TOLD, EQUAL}),
    "parameter moved to another group": (moved_to_another_group, {EQUAL}),
    "average listed in a group": (average_listed_in_a_group, {TOLD, EQUAL}),
    "anchors in a group": (anchors_in_a_group, {EQUAL}),
    "betas in tensors": (betas_in_tensors, {EQUAL}),
    "step with an argument": (step_with_an_argument, {EQUAL, TOLD}),
    "gradients in memory of one's own, by data": (gradients_by_data, {EQUAL}),
    "gradients of odd strides": (gradients_of_odd_strides, {EQUAL}),
    "rolled back": (rolled_back, {EQUAL, TOLD}),
    "inner and outer optimizer": (inner_and_outer, {EQUAL, TOLD}),
    "experts": (experts, {EQUAL}),
    "ensemble": (ensemble, {EQUAL}),
    "update in a thread": (in_a_thread, {EQUAL}),
    "lists made empty": (forgets, {EQUAL}),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_comes_back_equal_from_deltas_or_is_told(delta_sidecar: ScriptedSidecar, name: str) -> None:
    build, allowed = IDIOMS[name]
    assert outcome(delta_sidecar, build) in allowed


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_comes_back_equal_from_a_snapshot(tmp_path: Path, name: str) -> None:
    build, _ = IDIOMS[name]
    survives_from_a_snapshot(build, tmp_path)


def test_fingerprint_of_a_state_that_the_script_has_changed_by_then_is_none(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps a script may empty its momentum, and a delta that is right would be found wrong by it
    at the restore."""
    model = net()
    optimizer = momentum(model.parameters())
    script, checkpointer = started(lambda: loop(model, optimizer), every=BASE)
    fold = state_hash.fold

    def late(tensors: Any) -> state_hash.Folded:
        if checkpointer.step_number == BASE + 2:
            optimizer.state[model[0].weight]["momentum_buffer"].zero_()
        return fold(tensors)

    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, BASE)
        monkeypatch.setattr(state_hash, "fold", late)
        for _ in range(2):
            train(script, checkpointer, 1, wait=True)
        assert sorted(delta_sidecar.completed(Kind.DELTA)) == [BASE + 1]


class Codebook(nn.Module):
    """Gives itself another parameter in each forward, of which no optimizer hears."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.body = nn.Parameter(torch.randn(8, WIDTH)), net()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        self.codes = nn.Parameter(self.codes.detach() * 0.9 + y.detach().mean(0))
        return y + self.codes.sum(0).detach()


def test_model_that_is_another_one_after_each_step_is_told_before_it_is_refused(
    delta_sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Script:
        model = Codebook()
        return loop(model, adam(model.parameters()))

    _, checkpointer = trained(build, BASE + 1, every=BASE)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
    assert [request.message for request in delta_sidecar.asked("no-deltas")] == [
        "the model, or what its optimizers train, is another one after each step"
    ]
    assert "what optimizer 0 trains is not what it was when `restore` was called" in caplog.text
    delta_sidecar.offer(BASE, BASE)
    _, checkpointer = started(build, seed=77)
    with checkpointer, pytest.raises(DifferentState, match="optimizer 0 has other parameters"):
        checkpointer.restore()


def test_tensors_of_the_model_in_a_dict_of_the_script_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where `state_dict` was meant to be copied: after a restore they are what it was meant to be."""
    model, best = net(), dict[str, Any]()

    def after(step: int) -> None:
        weights = model.state_dict()
        best["weights"] = copy.deepcopy(weights) if step < 3 else weights

    script, checkpointer = started(
        lambda: loop(model, adam(model.parameters()), after=after, best=best), folder=tmp_path, every=1
    )
    with checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.restore()
        train(script, checkpointer, 2)
        assert "Shared" not in caplog.text
        train(script, checkpointer, 1)
        assert "Shared: state['best'] holds tensors of the model" in caplog.text


def test_tensor_that_is_kept_on_a_parameter_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    speed: Any = model[0].weight

    def after(step: int) -> None:
        speed.speed = speed.grad

    script, checkpointer = started(
        lambda: loop(model, adam(model.parameters()), after=after), folder=tmp_path, every=1
    )
    with checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.restore()
        train(script, checkpointer, 1)
    assert (
        "Attribute: a tensor that is kept as an attribute of the parameter 0.weight is in no version"
        in caplog.text
    )
