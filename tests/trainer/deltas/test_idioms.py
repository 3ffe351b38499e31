"""Idioms of strangers' training loops resume after nine steps in a new life of the script.

Equal, or refused, or told; never silently different, never the script's end. Equal means that the losses
after the resumption are those of the run that went on, in every bit. Told means that the job knows by then
that deltas are off, or that nothing can be saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import (
    EQUAL,
    REFUSED,
    TOLD,
    WIDTH,
    Script,
    adam,
    by_closure,
    loop,
    loss_of,
    master_weights,
    momentum,
    net,
    outcome,
    simple,
)

After = Callable[[Any, Optimizer, int], object]


# Averaged weights.


def swap(data: bool) -> After:
    def after(model: nn.Module, *_: object) -> None:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if data else parameter).mul_(0.5)
            loss_of(model)
            for parameter, old in zip(model.parameters(), kept, strict=True):
                (parameter.data if data else parameter).copy_(old)

    return after


def swap_pointers(model: nn.Module, *_: object) -> None:
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        loss_of(model)
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.data = old


def averaged_beside() -> Script:
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    follow = lambda _: average.update_parameters(model)  # noqa: E731
    return loop(model, adam(model.parameters()), after=follow, average=average)


def averaged_in_a_dict() -> Script:
    model = net()
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def follow(step: int) -> None:
        for name, value in model.named_parameters():
            shadow[name].lerp_(value.detach(), 0.1)

    return loop(model, adam(model.parameters()), after=follow, shadow=shadow)


def stochastic_weight_average() -> Script:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = momentum(model.parameters())
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=5e-3, anneal_epochs=3)

    def after(step: int) -> None:
        schedule.step()
        average.update_parameters(model)
        update_bn([torch.ones(4, WIDTH)], average)

    return loop(model, optimizer, after=after, average=average, schedule=schedule)


def lookahead(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Slow weights that are written back by `.data`, in the optimizer's own state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            slow = state.setdefault("slow", parameter.detach().clone())
            slow.add_(parameter.data - slow, alpha=0.5)
            parameter.data.copy_(slow)


# Updates of one's own.


def decay(data: bool) -> After:
    def after(model: nn.Module, *_: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if data else parameter).mul_(0.999)

    return after


def renormalised(model: Any, *_: object) -> None:
    model[0].weight.data = normalize(model[0].weight.data, dim=1)


def clipped_weights(model: nn.Module, *_: object) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def by_hand_alone() -> Script:
    """An optimizer that is only given so that its groups may be scheduled; the script moves the weights."""
    model = net()
    optimizer = SGD(model.parameters(), lr=1e-2)

    @torch.no_grad()
    def step() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=optimizer.param_groups[0]["lr"])

    return loop(model, optimizer, step=step)


class Sam(Optimizer):
    """Sharpness-aware minimisation around another optimizer, as it is copied from script to script."""

    def __init__(self, parameters: Iterable[Tensor], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = momentum(self.param_groups[0]["params"])
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.base.step()


def sharpness_aware(base: bool) -> Callable[[], Script]:
    def build() -> Script:
        model = net()
        optimizer = Sam(model.parameters())

        def update() -> Tensor:
            batch = torch.randn(4, WIDTH)
            model.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.climb()
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            return loss

        return Script(model, [optimizer.base if base else optimizer], update)

    return build


def noisy(model: nn.Module, *_: object) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)


class Langevin(SGD):
    """Draws random numbers inside of its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Remembers(SGD):
    """Keeps what its step depends on outside of its state."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.calls
        super().step()


# Several optimizers, several steps.


def two_optimizers_at_different_steps() -> Script:
    model = net()
    fast, slow = adam(model[0].parameters()), momentum([*model[1].parameters(), *model[3].parameters()])

    def after(step: int) -> None:
        if step % 3 == 0:
            slow.step()

    script = loop(model, fast, before=lambda _: model.zero_grad(), after=after)
    return Script(model, [fast, slow], script.update, script.state)


def adversaries() -> Script:
    model = nn.ModuleDict({"generator": net(), "critic": net()})
    optimizers = [adam(model["generator"].parameters()), adam(model["critic"].parameters())]

    def update() -> Tensor:
        generated = model["generator"](torch.randn(4, WIDTH))
        optimizers[1].zero_grad()
        critic = model["critic"](generated.detach()).mean() - model["critic"](torch.randn(4, WIDTH)).mean()
        critic.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss: Tensor = -model["critic"](generated).mean()
        loss.backward()
        optimizers[0].step()
        return loss

    return Script(model, optimizers, update)


def accumulation() -> Script:
    model = net()
    optimizer = adam(model.parameters())

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros(())
        for _ in range(3):
            loss = loss_of(model) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Script(model, [optimizer], update)


def optimizer_in_backward() -> Script:
    model = net()
    optimizers = {parameter: AdamW([parameter], lr=1e-2) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return loop(model, *optimizers.values(), step=lambda: None)


def scheduled(kind: Callable[[Optimizer], Any]) -> Callable[[], Script]:
    def build() -> Script:
        script = simple(adam)()
        schedule = kind(script.optimizers[0])
        inner = script.update

        def update() -> Tensor:
            loss = inner()
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(float(loss))
            else:
                schedule.step()
            return loss

        return Script(script.model, script.optimizers, update, {"schedule": schedule})

    return build


def thawed() -> Script:
    model = net()
    model[0].requires_grad_(False)
    optimizer = adam([*model[1].parameters(), *model[3].parameters()])

    def before(step: int) -> None:
        if step == 6:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    return loop(model, optimizer, before=before)


def made_anew() -> Script:
    """A second phase with an optimizer that the Checkpointer has never heard of."""
    model = net()
    optimizers = [adam(model.parameters())]

    def before(step: int) -> None:
        if step == 6:
            optimizers[0] = momentum(model.parameters())

    def step() -> None:
        optimizers[0].step()

    return loop(model, *optimizers, before=before, step=step)


def masters() -> Script:
    model, optimizer, update = master_weights(WIDTH)
    return Script(model, [optimizer], update)


def compiled_step() -> Script:
    model = net()
    optimizer = adam(model.parameters())
    return loop(model, optimizer, step=torch.compile(optimizer.step, backend="eager"))


def closure() -> Script:
    model = net()
    return by_closure(model, momentum(model.parameters()))


def second_order() -> Script:
    model, batch = net(), torch.ones(4, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    return by_closure(model, optimizer, lambda model: model(batch).square().mean())


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(net(), backend="eager")
    return model


def tied() -> nn.Module:
    model = net()
    model[3].weight = model[0].weight
    return model


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def normed() -> nn.Module:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
    )
    return nn.Sequential(model, nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def pruned() -> nn.Module:
    model = net()
    prune.random_unstructured(model[0], "weight", amount=0.5)
    return model


def adapted() -> nn.Module:
    model = net()
    model.requires_grad_(False)
    model.append(nn.Linear(WIDTH, WIDTH))
    return model


# Optimizers of somebody's own, and what they keep in other places than their state.


class Slow(SGD):
    """Slow weights in a list, made at once or at the first step."""

    def __init__(self, parameters: Iterable[Tensor], lazy: bool = False) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        if not lazy:
            self.slow = self.copies()

    def copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if not hasattr(self, "slow"):
            self.slow = self.copies()
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.add_(parameter - slow, alpha=0.5)
            parameter.copy_(slow)


class Eigenvectors(SGD):
    """Scales updates by eigenvectors, which lie transposed in memory: sums over them round by that order."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in filter(lambda each: each.dim() == 2, self.param_groups[0]["params"]):
            kept, gradient = self.state[parameter], parameter.grad
            if not kept:
                outer = [gradient @ gradient.T, gradient.T @ gradient]
                kept["left"], *kept["right"] = (torch.linalg.eigh(each)[1] for each in outer)
            for basis in (kept["left"], *kept["right"]):
                gradient.mul_(basis.exp().mean())
        super().step()


class Own(Optimizer):
    """Momentum, kept where `kept` says."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.averages: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.kept(parameter).mul_(0.9).add_(parameter.grad), alpha=1e-2)

    def kept(self, parameter: Tensor) -> Tensor:
        kept: Tensor = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
        return kept


class UnderIdentity(Own):
    def kept(self, parameter: Tensor) -> Tensor:
        kept: Tensor = self.state[id(parameter)].setdefault("kept", torch.zeros_like(parameter))  # type: ignore[index]
        return kept


class Beside(Own):
    def kept(self, parameter: Tensor) -> Tensor:
        return self.averages.setdefault(parameter, torch.zeros_like(parameter))


class Rounds(Own):
    """Draws from a generator that it keeps."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.drawn = torch.Generator().manual_seed(torch.initial_seed() % 1000)

    def kept(self, parameter: Tensor) -> Tensor:
        return super().kept(parameter).add_(torch.randn(parameter.shape, generator=self.drawn), alpha=1e-3)


class Multiplies(Own):
    """Its products are others under autocast, in which the whole loop runs."""

    def kept(self, parameter: Tensor) -> Tensor:
        if parameter.dim() < 2:
            return super().kept(parameter)
        return (parameter @ parameter.T @ parameter).float()


def all_in_autocast() -> Script:
    script = simple(Multiplies)()
    inner = script.update

    def update() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner()

    return Script(script.model, script.optimizers, update)


class Bound(Own):
    """Keeps a method of its own, as one that chooses its rule in the constructor."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.rule = super().step

    def step(self, closure: Any = None) -> None:
        self.rule()


class Both(Optimizer):
    """Others in a list, as those for matrices and for the rest."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        listed = list(parameters)
        super().__init__(listed, {})
        self.optimizers = [adam(listed[:2]), momentum(listed[2:])]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def forgotten() -> Script:
    """Two optimizers, of which the Checkpointer is given one."""
    model = net()
    given, other = momentum(model[0].parameters()), adam(model[3].parameters())
    return Script(model, [given], loop(model, given, other).update)


class Masked(SGD):
    """Writes a mask that a buffer of the model is too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if "mask" in self.state[parameter]:
                self.state[parameter]["mask"].copy_(parameter.abs() > parameter.abs().median())


def mask_of_both() -> Script:
    model = net()
    model.register_buffer("mask", torch.rand(WIDTH, WIDTH))
    optimizer = Masked(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer.state[model[0].weight]["mask"] = model.mask
    return loop(
        model, optimizer, loss_of=lambda made: loss_of(made) + (made[0].weight * made.mask).square().sum()
    )


# Models that become others on their way.


def at_step_six(
    model: Callable[[], nn.Module], change: Callable[[Any, Optimizer], None]
) -> Callable[[], Script]:
    def build() -> Script:
        made = model()
        optimizer = adam(made.parameters())

        def before(step: int) -> None:
            if step == 6:
                change(made, optimizer)

        return loop(made, optimizer, before=before)

    return build


def head_made_anew(model: Any, optimizer: Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]
    place = [each is model[3].weight for each in parameters].index(True)
    optimizer.state.pop(model[3].weight)
    model[3].weight = parameters[place] = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)


class Centred(nn.Module):
    """Takes the mean of what it has seen from its input. `late`: the first forward makes its buffer, which no
    state_dict holds."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        if not late:
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x - self.mean


def centred(late: bool = False) -> nn.Module:
    return nn.Sequential(Centred(late=late), *net())


def centred_anew(model: Any, optimizer: Optimizer) -> None:
    model[0] = Centred()


def sparse_gradients() -> Script:
    model = nn.Embedding(50, WIDTH, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    return loop(model, optimizer, loss_of=lambda made: made(torch.randint(50, (6,))).square().mean())


def python_random() -> Script:
    script = simple(adam)()
    inner = script.update

    def update() -> Tensor:
        with torch.no_grad():
            script.model[0].bias += 0 * random.random()  # type: ignore[index, operator]
        return inner() * (1 + random.random())

    return Script(script.model, script.optimizers, update)


def full_state_hook() -> Script:
    script = simple(adam)()
    script.model._register_state_dict_hook(
        lambda module, state, *_: state.update({key: value.clone() for key, value in state.items()})
    )
    return script


def tensor_rate(parameters: Iterable[Tensor]) -> AdamW:
    return AdamW(parameters, lr=torch.tensor(1e-2))


_SCHEDULES = torch.optim.lr_scheduler
IDIOMS: dict[str, tuple[Callable[[], Script], set[str]]] = {
    "plain": (simple(adam), {EQUAL}),
    "momentum": (simple(momentum), {EQUAL}),
    "rate in a tensor": (simple(tensor_rate), {EQUAL}),
    "amsgrad, foreach": (simple(lambda p: AdamW(p, lr=1e-2, amsgrad=True, foreach=True)), {EQUAL}),
    "fused": (simple(lambda p: AdamW(p, lr=1e-2, fused=True)), {EQUAL}),
    "weights swapped in place": (simple(adam, swap(data=False)), {EQUAL, TOLD}),
    "weights swapped by data": (simple(adam, swap(data=True)), {EQUAL, TOLD}),
    "weights swapped by pointer": (simple(adam, swap_pointers), {EQUAL, TOLD}),
    "average as a module beside": (averaged_beside, {EQUAL, TOLD}),
    "average in a dict": (averaged_in_a_dict, {EQUAL}),
    # In the state of torch's older schedule is a function, which it could not load safely itself.
    "stochastic weight average": (
        stochastic_weight_average,
        {EQUAL, TOLD} if hasattr(SWALR, "_set_anneal_func") else {REFUSED},
    ),
    "lookahead": (simple(momentum, lookahead), {EQUAL, TOLD}),
    "decay in place": (simple(momentum, decay(data=False)), {EQUAL, TOLD}),
    "decay by data": (simple(momentum, decay(data=True)), {EQUAL, TOLD}),
    "weights renormalised by pointer": (simple(momentum, renormalised), {EQUAL, TOLD}),
    "weights clipped": (simple(momentum, clipped_weights), {EQUAL, TOLD}),
    "noise on weights": (simple(momentum, noisy), {EQUAL, TOLD}),
    "updates by hand alone": (by_hand_alone, {EQUAL, TOLD}),
    "SAM, given its base": (sharpness_aware(base=True), {EQUAL, TOLD}),
    "SAM itself": (sharpness_aware(base=False), {REFUSED}),
    "noise inside of the step": (simple(lambda p: Langevin(p, lr=1e-2)), {EQUAL, TOLD}),
    "optimizer that remembers": (simple(Remembers), {TOLD, EQUAL}),
    "state that lies transposed": (simple(lambda p: Eigenvectors(p, lr=0.1)), {EQUAL}),
    "two optimizers at different steps": (two_optimizers_at_different_steps, {EQUAL}),
    "adversaries": (adversaries, {EQUAL}),
    "accumulation and clipping": (accumulation, {EQUAL}),
    "optimizer in backward": (optimizer_in_backward, {EQUAL}),
    "cosine schedule": (scheduled(lambda o: _SCHEDULES.CosineAnnealingLR(o, 20)), {EQUAL}),
    "one cycle": (scheduled(lambda o: _SCHEDULES.OneCycleLR(o, 0.1, 40)), {EQUAL}),
    "plateau": (scheduled(lambda o: _SCHEDULES.ReduceLROnPlateau(o, patience=1)), {EQUAL}),
    "thawed on the way": (thawed, {EQUAL}),
    "optimizer made anew": (made_anew, {TOLD}),
    "master weights": (masters, {EQUAL, TOLD}),
    "compiled step": (compiled_step, {EQUAL, TOLD}),
    "compiled model": (simple(adam, model=compiled), {EQUAL}),
    "closure": (closure, {EQUAL}),
    "L-BFGS": (second_order, {EQUAL, TOLD}),
    "tied weights": (simple(adam, model=tied), {EQUAL}),
    "dropout and batch norm": (simple(adam, model=dropout), {EQUAL}),
    "spectral and weight norm": (simple(adam, model=normed), {EQUAL, TOLD}),
    "pruned": (simple(adam, model=pruned), {EQUAL}),
    "adapter on frozen layers": (
        simple(adam, model=adapted),
        {EQUAL},
    ),
    "sparse gradients": (sparse_gradients, {EQUAL}),
    "Python's random numbers": (python_random, {EQUAL, TOLD}),
    "state_dict of copies": (full_state_hook, {REFUSED}),
    "slow weights in a list": (simple(Slow), {EQUAL, TOLD}),
    "slow weights made at the first step": (simple(lambda p: Slow(p, lazy=True)), {EQUAL, TOLD}),
    "kept under an identity": (simple(UnderIdentity), {TOLD}),
    "kept beside the state, by parameter": (simple(Beside), {EQUAL}),
    "generator of the optimizer's own": (simple(Rounds), {EQUAL, TOLD}),
    "method kept as an attribute": (simple(Bound), {EQUAL, TOLD}),
    "all in autocast": (all_in_autocast, {EQUAL, TOLD}),
    "optimizers in a list": (simple(Both), {REFUSED}),
    "optimizer forgotten": (forgotten, {TOLD}),
    "mask of model and optimizer": (mask_of_both, {EQUAL, TOLD}),
    "head made anew": (at_step_six(net, head_made_anew), {EQUAL}),
    "module replaced": (at_step_six(centred, centred_anew), {EQUAL}),
    "buffer made in forward": (simple(adam, model=lambda: centred(late=True)), {EQUAL}),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_comes_back_equal_or_is_refused_or_told(delta_sidecar: ScriptedSidecar, name: str) -> None:
    build, allowed = IDIOMS[name]
    assert outcome(delta_sidecar, build) in allowed


def test_there_are_enough_of_them() -> None:
    assert len(IDIOMS) >= 30
