"""Checks during training that a replay gives the same bits, by repeating updates on clones.

It does so in the first updates and then periodically, because another kernel may be chosen: by the batch
size, by an autotuner, by the user. torch's own classes are trusted until they fail, others only after they
agreed. The clones are as after a restart (`clones.py`), and other attributes of a third-party optimizer are
as they were just after its construction. Random numbers differ on purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tiercheck.trainer.deltas.clones import Cloner, Clones
from tiercheck.trainer.deltas.gradients import Event
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.replayable import is_function, is_known, is_value, own_attributes
from tiercheck.trainer.state.values import is_same
from tiercheck.trainer.tensors.tensor_parts import parameters_of

SAMPLE_BYTES = 64 * 1024 * 1024
"""The most bytes of parameters, state and gradients to clone.

A third-party optimizer that mixes more parameters in an update is not trusted."""
TIMES = 2
"""The number of first updates that must agree."""
EVERY = 1000
"""The number of updates between later probes."""
_FIRST = 2
"""The first update to probe: at the one before, hooks are not in order and the state is created."""


class ProbeRefused(Exception):
    """The error for an optimizer that cannot be replayed exactly, with the reason."""


class Probe:
    """Probes some updates of one optimizer, and counts the others."""

    def __init__(self, optimizer: Optimizer, room: int) -> None:
        """Must be created before any update. `room`: bytes that may be cloned."""
        self._optimizer = optimizer
        self._known = is_known(optimizer)
        fresh, self._odd = ({}, "") if self._known else _attributes(optimizer)
        self._cloner = Cloner(optimizer, fresh, room)
        self._agreed = 0
        self._updates = 0
        self._next = _FIRST
        self._random: dict[str, Any] | None = None
        self._clones: Clones | None = None

    @property
    def believed(self) -> bool:
        return self._known or self._agreed >= TIMES

    def begins(self) -> bool:
        """Counts an update that begins. Returns whether to probe it."""
        self._updates += 1
        return self._updates >= self._next

    def before(self, event: Event | None) -> None:
        """Clones parameters before the real update. Raises ProbeRefused.

        `event` is None if the gradients are known only after the update."""
        self._clones, self._random = None, None
        if self._odd:
            raise ProbeRefused(f"{self._name} keeps {self._odd} of its own, which no checkpoint holds")
        if event is not None and len(event.gradients) != len(parameters_of(self._optimizer)):
            return  # the event could not be recorded
        try:
            self._clones = self._cloner.clone(None if event is None else event.gradients)
            if self._clones is not None and event is not None:
                self._clones.consume(event)
                self._random = user_state.random_state()
        except Exception as error:  # any error of a third-party class
            self._clones = None
            if not (self._known and isinstance(error, torch.OutOfMemoryError)):
                raise ProbeRefused(f"a copy of {self._name} cannot be made: {error!r}") from error
        if self._clones is None:
            if not self._known:
                raise ProbeRefused("no parameter is small enough to be cloned")
            self._next = self._updates + EVERY

    def after(self, event: Event) -> None:
        """Repeats the update `event` on the clones, and compares. Raises ProbeRefused."""
        clones, self._clones = self._clones, None
        if clones is None:
            return
        if self._random is not None and not is_same(self._random, user_state.random_state()):
            raise ProbeRefused(f"{self._name} draws random numbers")
        try:
            if self._random is None:
                clones.consume(event)
            _step(clones)
            differ = clones.differ(self._optimizer)
        except Exception as error:
            if self._known and isinstance(error, torch.OutOfMemoryError):
                self._next = self._updates + EVERY
                return
            raise ProbeRefused(f"a step of {self._name} on clones failed: {error!r}") from error
        if differ:
            raise ProbeRefused(
                f"a step of {self._name} on clones of some parameters gave other bits than the real one, "
                f"as the probe of update {self._updates} found"
            )
        self._agreed += 1
        self._next = self._updates + (1 if self._agreed < TIMES else EVERY)

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__


class Probes:
    """The probes of all optimizers of a Checkpointer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Many small optimizers, for example one per parameter, are probed in the same step, so they share the
        # limit.
        share = SAMPLE_BYTES // max(1, sum(map(is_known, optimizers)))
        self._probes = [Probe(each, share if is_known(each) else SAMPLE_BYTES) for each in optimizers]
        self._believed = False

    def __getitem__(self, index: int) -> Probe:
        return self._probes[index]

    @property
    def believed(self) -> bool:
        """Returns whether every optimizer is trusted, which each stays once it is."""
        self._believed = self._believed or all(probe.believed for probe in self._probes)
        return self._believed


def _step(clones: Clones) -> None:
    random = user_state.random_state()
    try:
        torch.manual_seed(0x7EAC)
        clones.step()
    finally:
        user_state.set_random_state(random)


def _attributes(optimizer: Optimizer) -> tuple[dict[str, Any], str]:
    """Returns copies of the optimizer's other attributes, and one that is not plain (empty if none)."""
    found: dict[str, Any] = {}
    for name, value in own_attributes(optimizer):
        if is_function(value):  # chosen by the class; the script will set the same one again
            found[name] = value
        elif is_value(value):
            found[name] = copy.deepcopy(value)
        else:
            return {}, f"{name}, a {type(value).__name__},"
    return found, ""
