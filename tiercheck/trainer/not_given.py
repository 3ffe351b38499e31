"""Optimizers that a Checkpointer was not given, and that train what it saves: what they keep of it is in no version.

One of several that was forgotten, one inside of an object that only looks like an optimizer, one that the script made anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LOOKS = 2
"""Updates after which an optimizer is looked at: some make their state only at the second one."""
_LASTING = 100
"""Updates after which one is no passing thing, such as that of an inner loop."""
_DEEP, _MANY = 5, 10_000
"""How far into the script's objects an optimizer is looked for, and in how many of them."""
_PLAIN = (Tensor, nn.Module, type, str, bytes, int, float, type(None))


class NotGiven:
    """Hears of every update of every optimizer in this process."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        state: Iterable[Any],
        warn: Callable[[str, str], None],
    ) -> None:
        """`modules`, `optimizers`, `state`: all that is saved."""
        self._modules = modules
        self._optimizers = optimizers
        self._state = list(state)
        self._warn = warn
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._lost: list[weakref.ref[Optimizer]] = []

    def updated(self, optimizer: Optimizer, *_: object) -> None:
        """A step of it has ended. Never raises."""
        if torch.compiler.is_compiling() or any(optimizer is each for each in self._optimizers):
            return
        try:
            self._count(optimizer)
        except Exception as error:  # invariant: no failure of ours stops training
            self._warn(type(error).__name__, repr(error))

    def lost(self) -> str:
        """What is in no version, and would be needed; empty: nothing. As long as an optimizer lives, it may go on."""
        alive = (each() for each in self._lost)
        return next(
            (
                f"an optimizer ({type(each).__name__}) that this Checkpointer was not given trains parameters that are saved, and "
                "what it keeps of them is in no version: hand over all optimizers, those inside of another one too"
                for each in alive
                if each is not None
            ),
            "",
        )

    def _count(self, optimizer: Optimizer) -> None:
        updates = self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        if updates <= _LOOKS:
            kept = {id(each) for each, state in optimizer.state.items() if isinstance(each, Tensor) and state}
            if kept & self._saved() and not self._stands_for_another(optimizer):
                self._lost.append(weakref.ref(optimizer))
        elif updates == _LASTING and optimizer.state and not self.lost() and not self._stands_for_another(optimizer):
            self._warn(
                "NotGiven",
                f"an optimizer ({type(optimizer).__name__}) that the Checkpointer was not given is in no version",
            )

    def _saved(self) -> set[int]:
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        return {*map(id, trained), *(id(p) for module in self._modules for p in module.parameters())}

    def _stands_for_another(self, optimizer: Optimizer) -> bool:
        """Whether one that was given shows its state, it only passes on to one, or the script's own `state` leads to it."""
        shown = any(optimizer.state is each.state or reaches(optimizer, each) for each in self._optimizers)
        return shown or reaches(self._state, optimizer)


def reaches(value: Any, wanted: Optimizer) -> bool:
    """Whether `wanted` is in what `value` holds, directly or a few objects further."""
    seen: set[int] = set()
    now = [value]
    for _ in range(_DEEP):
        if any(each is wanted for each in now):
            return True
        fresh = {id(each): each for each in now if id(each) not in seen and not isinstance(each, _PLAIN)}
        seen |= fresh.keys()
        now = [member for each in fresh.values() for member in _members(each)][:_MANY]
    return False


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        members: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        members = value
    else:
        members = getattr(value, "__dict__", {}).values()
    return islice(members, _MANY)
