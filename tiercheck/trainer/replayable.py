"""Whether an optimizer can be replayed exactly is found out, never assumed: known by its class, or to be probed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_NAMES = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor",
    "SparseAdam", "Muon",
)  # fmt: skip
KNOWN = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""Their step is a function of parameters, gradients, state and hyper-parameters alone; tests replay every one of them."""


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_known(optimizer: Optimizer) -> bool:
    """Exactly one of those classes: a subclass may do anything."""
    return type(optimizer) in KNOWN


def hindrance(optimizer: Optimizer) -> str:
    """Why it cannot be replayed whatever a probe says; empty if nothing is known against it."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return f"{name} evaluates the model several times in one step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable, so its step depends on the graph around it"
    return ""


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Its `step` without hooks, and without what a learning-rate scheduler wraps around it to warn of a wrong order."""
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = getattr(function, "__wrapped__", function)

    def step() -> Any:
        # A class that calls the step of its base class comes to hooks once more.
        hidden = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
        vars(optimizer).update({name: OrderedDict() for name in hidden})
        try:
            return function(optimizer)
        finally:
            vars(optimizer).update(hidden)

    return step
