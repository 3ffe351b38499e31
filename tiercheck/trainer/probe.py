"""An unknown optimizer is believed only after its step, on clones, gave the very bits that the real one gave.

The clones are what a restart would have: the parameters, their state and gradients, the hyper-parameters, and an optimizer
whose other attributes are as they were when the script had just built it. Random numbers differ on purpose.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer import user_state
from tiercheck.trainer.attributes import is_value, own_attributes
from tiercheck.trainer.encoding import same, same_bits
from tiercheck.trainer.gradients import Event, set_hyper_parameters
from tiercheck.trainer.leaves import local_shard
from tiercheck.trainer.replayable import plain_step

SAMPLE_BYTES = 64 * 1024 * 1024
"""Parameters, state and gradients that are cloned at most. An update that mixes more parameters than these is not believed."""
TIMES = 2
"""Updates that must agree."""


class Refused(Exception):
    """The optimizer cannot be replayed exactly, and why."""


class Probe:
    """Watches the first updates of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        """At the start of the script, before any update."""
        self._optimizer = optimizer
        self._fresh, self._odd = _attributes(optimizer)
        self._agreed = 0
        self._begun = False
        self._random: dict[str, Any] | None = None
        self._shadow: Optimizer | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def passed(self) -> bool:
        return self._agreed >= TIMES

    def before(self, event: Event) -> None:
        """The real update is about to begin. Raises Refused."""
        self._shadow = None
        if self._odd:
            raise Refused(f"{self._name} keeps {self._odd} of its own, which no checkpoint holds")
        first, self._begun = not self._begun, True
        if self._optimizer.state or not first:  # the first update makes the state, if there is any
            try:
                self._clone(event)
            except Exception as error:  # whatever a stranger's class does
                raise Refused(f"a copy of {self._name} cannot be made: {error!r}") from error
            self._random = user_state.random_state()

    def after(self) -> None:
        """The real update has ended: do the same to the clones, and compare. Raises Refused."""
        shadow, self._shadow = self._shadow, None
        if shadow is None:
            return
        if not same(self._random, user_state.random_state()):
            raise Refused(f"{self._name} draws random numbers")
        try:
            self._step(shadow)
        except Exception as error:
            raise Refused(f"a step of {self._name} on clones failed: {error!r}") from error
        for real, clone in self._pairs:
            state, cloned = self._optimizer.state[real], shadow.state[clone]
            if not same_bits(local_shard(real), clone) or not same(dict(state), dict(cloned)):
                raise Refused(f"a step of {self._name} on clones of some parameters gave other bits than the real one")
        self._agreed += 1
        self._pairs = []

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def _step(self, shadow: Optimizer) -> None:
        random = user_state.random_state()
        try:
            torch.manual_seed(0x7EAC)
            plain_step(shadow)()
        finally:
            user_state.set_random_state(random)

    @torch.no_grad()
    def _clone(self, event: Event) -> None:
        real = self._optimizer
        shadow = object.__new__(type(real))
        shadow.__dict__.update(real.__dict__)
        shadow.__dict__.pop("step", None)
        shadow.__dict__.update(copy.deepcopy(self._fresh))
        shadow.__dict__.update({name: value.clone() for name, value in event.scaling.items()})
        shadow.state = defaultdict(dict)
        shadow.param_groups = []
        self._pairs = []
        room, number = SAMPLE_BYTES, 0
        for group in real.param_groups:
            chosen: list[Tensor] = []
            for parameter in group["params"]:
                gradient = event.gradients[number]
                number += 1
                state = real.state.get(parameter, {})
                shard = local_shard(parameter)
                tensors = [shard, *(local_shard(value) for value in state.values() if isinstance(value, Tensor))]
                size = sum(tensor.nbytes for tensor in tensors) + shard.nbytes
                if gradient is None or size > room:
                    continue
                room -= size
                clone = nn.Parameter(shard.clone())
                clone.grad = gradient.clone()
                shadow.state[clone] = {key: _copied(value) for key, value in state.items()}
                chosen.append(clone)
                self._pairs.append((parameter, clone))
            if chosen:
                shadow.param_groups.append({"params": chosen, **{k: v for k, v in group.items() if k != "params"}})
        if not self._pairs:
            raise Refused("no parameter is small enough to be cloned")
        groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in shadow.param_groups]
        for group in shadow.param_groups:
            for key, value in group.items():
                if isinstance(value, Tensor):
                    group[key] = value.clone()
        set_hyper_parameters(shadow, groups)
        self._shadow = shadow


def _attributes(optimizer: Optimizer) -> tuple[dict[str, Any], str]:
    """Copies of what the class keeps beside parameters and state; and what of it is not plain (empty if nothing)."""
    found: dict[str, Any] = {}
    for name, value in own_attributes(optimizer):
        if callable(value) and not isinstance(value, nn.Module):
            continue  # a function of the class's choice; the script will set the same one again
        if not is_value(value):
            return {}, f"{name}, a {type(value).__name__},"
        found[name] = copy.deepcopy(value)
    return found, ""


def _copied(value: Any) -> Any:
    return local_shard(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)
