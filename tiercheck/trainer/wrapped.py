"""What is wrapped around a model is no part of its state: the same names with and without it, so that a run may change it.

DistributedDataParallel and torch.compile put a word of theirs before every name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_FRAMEWORKS = {"AcceleratedOptimizer", "LightningOptimizer"}


@dataclass(frozen=True)
class Wrapped:
    """A model as a script trains it."""

    model: nn.Module
    """Without what is wrapped around it as a whole."""
    replicated: tuple[tuple[str, DistributedDataParallel], ...]
    """Each module whose parameters are the same at all ranks of a process group, with what comes before their names in `model`."""

    @staticmethod
    def look(model: nn.Module) -> Wrapped:
        around: list[tuple[str, DistributedDataParallel]] = []
        inner = model
        while True:
            if isinstance(inner, DistributedDataParallel):
                around.append(("", inner))
                inner = inner.module
            elif isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
                inner = compiled
            else:
                break
        for path, module in inner.named_modules():
            if isinstance(module, DistributedDataParallel):
                around.append((f"{path}.module.", module))
        return Wrapped(inner, tuple(around))


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer that does the work, without what Accelerate or Lightning have put around it: only that one calls its hooks."""
    while type(optimizer).__name__ in _FRAMEWORKS:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer")
    return optimizer
