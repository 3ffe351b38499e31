"""Describes optimizer classes: whether they replay exactly, and what they keep.

`probe.py` checks what an optimizer does in this very process. Some classes keep more than parameters and
their state, such as a count of their steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.state.readable import to_record
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, is_wrapper, parameters_of, shard_or_self

_NAMES = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD",
    "Adafactor",
    "SparseAdam", "Muon",
)  # fmt: skip
KNOWN = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
"""The classes with steps that depend only on parameters, gradients, state and hyper-parameters.

Tests replay every one of them.
"""

_SEPARABLE = {*_NAMES} - {"Adafactor", "Muon", "SparseAdam"}
"""The classes with steps that treat each element alone, but for counts that all elements share."""
_EXACT_IN_HALF = {"AdamW"}
"""The classes that are exact on CPUs. Others add half-precision products, which only vectors round."""

SCALING = ("grad_scale", "found_inf")
"""The attributes that `torch.amp.GradScaler` sets at a fused optimizer."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_known(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's class is one of `KNOWN`: a subclass may do anything."""
    return type(optimizer) in KNOWN


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether the step treats each element alone, so that each rank may update its own shard."""
    return is_known(optimizer) and type(optimizer).__name__ in _SEPARABLE


def why_not_replayable(optimizer: Optimizer) -> str:
    """Returns why an optimizer cannot be replayed whatever a probe finds; empty: no reason is known."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return f"{name} evaluates the model several times in one step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable, so its step depends on the graph around it"
    if (wrapped := next(filter(is_wrapper, parameters_of(optimizer)), None)) is not None:
        return f"{name} trains a {type(shard_or_self(wrapped)).__name__}, which rounds as its class decides"
    return ""


def why_not_separable(optimizer: Optimizer) -> str:
    """Returns why a part of the parameters, cut anywhere, could get other bits; empty: known not to.

    A test of every class shows it (tests/trainer/proof/test_probes.py). A probe may then try out a part of a
    large tensor.
    """
    name = type(optimizer).__name__
    if not is_elementwise(optimizer):
        return f"{name} is not known to treat each element on its own"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                continue
            if group.get("fused"):
                return f"{name} with fused=True rounds differently at the edges of a shard on CPUs"
            if parameter.dtype not in (torch.float32, torch.float64) and name not in _EXACT_IN_HALF:
                return f"{name} rounds {parameter.dtype} differently at the edges of a shard on CPUs"
    return ""


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Returns an optimizer's `step` without hooks and without the wrapper of a learning-rate scheduler.

    The wrapper warns of a wrong order. Autocast is off too, as where the script restores: a step that depends
    on it differs when it is probed.
    """
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = getattr(function, "__wrapped__", function)

    def step() -> Any:
        # A class that calls the step of its base class runs hooks once more.
        hidden = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
        vars(optimizer).update({name: OrderedDict() for name in hidden})
        kinds = {parameter.device.type for parameter in parameters_of(optimizer)}
        try:
            with ExitStack() as without:
                for kind in kinds:
                    without.enter_context(torch.autocast(kind, enabled=False))
                return function(optimizer)
        finally:
            vars(optimizer).update(hidden)

    return step


_LARGEST = 1024 * 1024
"""Bytes. The largest tensor that counts as a value."""
_UNCHANGEABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@cache
def _shared_attributes() -> set[str]:
    """Returns the names that every optimizer has."""
    made = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)  # not at import: it imports torch._dynamo
    return {*vars(made), "param_groups", "state", "step", "add_param_group", "_opt_called", *SCALING}


def own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields names and values of attributes that not every optimizer has."""
    for name, value in vars(optimizer).items():
        if name not in _shared_attributes() and not name.startswith("__"):
            yield name, value


def is_value(value: Any) -> bool:
    """Returns whether a value is a little data: numbers, texts, small tensors, or collections of them."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and value.nbytes <= _LARGEST
    if isinstance(value, Mapping):
        return all(map(is_value, value)) and all(map(is_value, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_value, value))
    if isinstance(value, _UNCHANGEABLE):
        return True
    try:
        apart = to_record(value)
    except NotCapturable:
        return False
    return apart is not None and all(map(is_value, apart[1]))


def is_function(value: Any, deep: int = 3) -> bool:
    """Returns whether a value is code alone.

    What is bound to an object, or is one, may change that: a copy that calls it would do so too. `deep`: how
    many functions may be nested.
    """
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, ModuleType))
    if type(value) is FunctionType:
        return deep > 0 and all(
            isinstance(each, _UNCHANGEABLE) or is_function(each, deep - 1) for each in closed_over(value)
        )
    if type(value) is partial:
        return is_function(value.func, deep) and all(map(is_value, (*value.args, *value.keywords.values())))
    return isinstance(value, type)


def closed_over(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is still empty
            found.append(cell.cell_contents)
    return found
