"""Whether scripts of many kinds come back as they were, bit for bit, or are refused before it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from benchmarks.gpu_acceptance.checks import Found, Setting, Skip
from benchmarks.gpu_acceptance.scripts import (
    Build,
    Script,
    clear,
    comes_back,
    judge_returns,
    layers,
    loss_of,
    runs_alone,
    width_of,
)

Make = Callable[[Iterable[Tensor]], Optimizer]


def known_optimizers(setting: Setting) -> Found:
    """C2."""
    script = partial(_plain, setting)
    cases: dict[str, Build] = {}
    kernels: list[dict[str, Any]] = [{"fused": True}, {"foreach": True}, {"foreach": False}]
    for dtype in (torch.float32, torch.bfloat16):
        for how in (*kernels, {"fused": True, "amsgrad": True}):
            for odd in (False, True):
                name = f"AdamW {' '.join(f'{key}={value}' for key, value in how.items())} {dtype}"
                cases[name + _at(odd)] = script(partial(AdamW, lr=1e-3, **how), dtype=dtype, odd=odd)
    cases["SGD Nesterov"] = script(partial(SGD, lr=1e-2, momentum=0.9, nesterov=True))
    for odd in (False, True):
        cases["Adafactor" + _at(odd)] = script(partial(Adafactor, lr=1e-2), odd=odd)
        if hasattr(torch.optim, "Muon"):
            cases["Muon" + _at(odd)] = script(partial(torch.optim.Muon, lr=1e-3), odd=odd, matrices=True)
    if setting.gpu:
        cases["AdamW capturable"] = script(partial(AdamW, lr=1e-3, capturable=True))
        on_device = torch.tensor(1e-3, device=setting.device)
        cases["AdamW, lr on the device"] = script(lambda p: AdamW(p, lr=on_device.clone(), fused=True))
        cases["GradScaler, fused, overflows"] = partial(_scaled, setting)
    return judge_returns({name: comes_back(setting, build) for name, build in cases.items()}, exact=True)


def compiled_optimizer(setting: Setting) -> Found:
    """C3."""
    backend = "eager" if setting.small else "inductor"

    def build() -> Script:
        torch._dynamo.reset()
        model = layers(setting)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        update = torch.compile(optimizer.step, backend=backend)
        return Script(model, [optimizer], lambda: _updated(model, model, optimizer, setting, update))

    return _alone_then_back(setting, "torch.compile(optimizer.step)", build)


def gradients_of_a_graph(setting: Setting) -> Found:
    """C4."""

    def build() -> Script:
        torch._dynamo.reset()
        model = layers(setting)
        run = torch.compile(model, mode="reduce-overhead")
        optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
        return Script(model, [optimizer], lambda: _updated(model, run, optimizer, setting, optimizer.step))

    return _alone_then_back(setting, "mode='reduce-overhead'", build, base=8, step=13)


def master_weights(setting: Setting) -> Found:
    """C7."""

    def build() -> Script:
        model = layers(setting, torch.bfloat16)
        masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
        optimizer = AdamW(masters, lr=1e-2)

        def update() -> Tensor:
            loss = loss_of(model, setting, torch.bfloat16)
            loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            return loss

        return Script(model, [optimizer], update)

    return judge_returns({"masters of bf16 weights": comes_back(setting, build)})


def lists_of_tensors(setting: Setting) -> Found:
    """C8."""
    return judge_returns({"an optimizer with lists": comes_back(setting, _plain(setting, _Listed))})


def state_dict_of_copies(setting: Setting) -> Found:
    """C10."""

    def build() -> Script:
        model = nn.Linear(width_of(setting), width_of(setting)).to(setting.device)

        def clone(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
            state.update({name: value.clone() for name, value in state.items()})

        model.register_state_dict_post_hook(clone)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        return Script(model, [optimizer], lambda: _updated(model, model, optimizer, setting, optimizer.step))

    return judge_returns({"a state_dict of clones": comes_back(setting, build)})


class _Listed(Optimizer):
    """Momentum, in a list, as SOAP and Shampoo keep their matrices."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["GG"] = [torch.zeros_like(parameter)]
            state["GG"][0].add_(parameter.grad)
            parameter.sub_(0.1 * state["GG"][0])


def _alone_then_back(setting: Setting, name: str, build: Build, **how: int) -> Found:
    if why := runs_alone(build):
        raise Skip(f"the script does not run here without TierCheck either: {why}")
    clear(setting)
    return judge_returns({name: comes_back(setting, build, **how)})


def _updated(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    setting: Setting,
    update: Callable[[], Any],
    *,
    dtype: torch.dtype = torch.float32,
    odd: bool = False,
) -> Tensor:
    model.zero_grad()  # also of parameters that this optimizer has not
    loss = loss_of(run, setting, dtype)
    loss.backward()
    if odd:
        _move_gradients(model)
    update()
    return loss.detach().clone()  # its memory may be a graph's


def _plain(
    setting: Setting,
    make: Make,
    *,
    dtype: torch.dtype = torch.float32,
    odd: bool = False,
    matrices: bool = False,
) -> Build:
    def build() -> Script:
        model = layers(setting, dtype)
        optimizer = make([each for each in model.parameters() if each.dim() == 2 or not matrices])
        return Script(
            model,
            [optimizer],
            lambda: _updated(model, model, optimizer, setting, optimizer.step, dtype=dtype, odd=odd),
        )

    return build


def _scaled(setting: Setting) -> Script:
    model = layers(setting)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=2)

    def update() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model, setting)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Script(model, [optimizer], update, {"scaler": scaler})


def _at(odd: bool) -> str:
    return ", gradients at odd addresses" if odd else ""


def _move_gradients(model: nn.Module) -> None:
    """Into one buffer, at any element of it, as those of FSDP2 and of DistributedDataParallel's buckets
    lie.
    """
    parameters = [each for each in model.parameters() if each.grad is not None]
    room = sum(each.numel() + 3 for each in parameters) + 1
    buffer, at = torch.empty(room, device=parameters[0].device, dtype=parameters[0].dtype), 1
    for parameter in parameters:
        assert parameter.grad is not None
        view = buffer[at : at + parameter.numel()].view_as(parameter)
        parameter.grad = view.copy_(parameter.grad)
        at += parameter.numel() + 3
