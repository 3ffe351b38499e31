"""What the class of an optimizer keeps beside its parameters and their state, such as a count of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.gradients import SCALING

_LARGEST = 1024 * 1024
"""Bytes of a tensor that is taken for a value."""
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_EVERYBODYS = {
    *vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)),
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
    return isinstance(value, _VALUES)
