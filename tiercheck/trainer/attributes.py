"""What the class of an optimizer keeps beside its parameters and their state, such as a count of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.gradients import SCALING
from tiercheck.trainer.readable import encoded

_LARGEST = 1024 * 1024
"""Bytes of a tensor that is taken for a value."""
_UNCHANGEABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_EVERYBODYS = {
    *vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)),
    "param_groups",
    "state",
    "step",
    "_opt_called",
    *SCALING,
}


def own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Names and values that not every optimizer has."""
    for name, value in vars(optimizer).items():
        if name not in _EVERYBODYS and not name.startswith("__"):
            yield name, value


def is_value(value: Any) -> bool:
    """Whether it is data, and little: numbers, texts, small tensors, and collections of them."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and value.nbytes <= _LARGEST
    if isinstance(value, Mapping):
        return all(map(is_value, value)) and all(map(is_value, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_value, value))
    return isinstance(value, _UNCHANGEABLE) or encoded(value) is not None


def is_function(value: Any, deep: int = 3) -> bool:
    """Whether it is code alone. What is bound to an object, or is one, may change that: a copy that calls it would do so too.

    `deep`: how many functions may lie in one another.
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
    """What it has from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing was put there yet
            found.append(cell.cell_contents)
    return found
