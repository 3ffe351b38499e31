"""Proves while training that a replay gives the very bits, by making an update again on clones.

In the first updates, and then once in a while, since a kernel may be chosen anew: by the size of a batch, by
an autotuner, by hand. A class of torch's is believed until it fails, another one only after it agreed. The
clones are what a restart would have (`clones.py`), and a stranger's other attributes are as they were when
the script had just built it. Random numbers differ on purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tiercheck.trainer.deltas.clones import Cloner, Clones
from tiercheck.trainer.deltas.encoding import are_equal_by_bits
from tiercheck.trainer.deltas.gradients import Event
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.replayable import is_function, is_known, is_value, own_attributes

SAMPLE_BYTES = 64 * 1024 * 1024
"""Parameters, state and gradients that are cloned at most. A stranger's update that mixes more parameters
than these is not believed."""
TIMES = 2
"""Updates that must agree at first."""
EVERY = 1000
"""Updates from one probe to the next after that."""
_FIRST = 2
"""The update that is looked at first: at the one before hooks are not yet in order, and the state is being
made."""


class ProbeRefused(Exception):
    """The optimizer cannot be replayed exactly, and why."""


class Probe:
    """Watches the updates of one optimizer. Between probes it only counts them."""

    def __init__(self, optimizer: Optimizer, room: int) -> None:
        """At the start of the script, before any update. `room`: bytes that may be cloned."""
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
        """An update begins. Whether it is to be looked at."""
        self._updates += 1
        return self.due

    @property
    def due(self) -> bool:
        """Whether the update under way is to be looked at, if it can be."""
        return self._updates >= self._next

    def before(self, event: Event | None) -> None:
        """The real update is about to begin. None: its gradients will be known when it has ended. Raises
        Refused."""
        self._clones, self._random = None, None
        if self._odd:
            raise ProbeRefused(f"{self._name} keeps {self._odd} of its own, which no checkpoint holds")
        if event is not None and len(event.gradients) != sum(
            len(g["params"]) for g in self._optimizer.param_groups
        ):
            return  # it could not be noted
        try:
            self._clones = self._cloner.clone(None if event is None else event.gradients)
            if self._clones is not None and event is not None:
                self._clones.consume(event)
                self._random = user_state.random_state()
        except Exception as error:  # whatever a stranger's class does
            self._clones = None
            if not (self._known and isinstance(error, torch.OutOfMemoryError)):
                raise ProbeRefused(f"a copy of {self._name} cannot be made: {error!r}") from error
        if self._clones is None:
            if not self._known:
                raise ProbeRefused("no parameter is small enough to be cloned")
            self._next = self._updates + EVERY

    def after(self, event: Event) -> None:
        """The real update, which consumed `event`, has ended: do the same to the clones, and compare. Raises
        Refused."""
        clones, self._clones = self._clones, None
        if clones is None:
            return
        if self._random is not None and not are_equal_by_bits(self._random, user_state.random_state()):
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
    """Of all optimizers of a Checkpointer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Many small optimizers, one for each parameter, say, are probed in the same step: together they clone
        # no more than one does.
        share = SAMPLE_BYTES // max(1, sum(map(is_known, optimizers)))
        self._probes = [Probe(each, share if is_known(each) else SAMPLE_BYTES) for each in optimizers]

    def __getitem__(self, index: int) -> Probe:
        return self._probes[index]

    @property
    def believed(self) -> bool:
        """Whether every optimizer is."""
        return all(probe.believed for probe in self._probes)


def _step(clones: Clones) -> None:
    random = user_state.random_state()
    try:
        torch.manual_seed(0x7EAC)
        clones.step()
    finally:
        user_state.set_random_state(random)


def _attributes(optimizer: Optimizer) -> tuple[dict[str, Any], str]:
    """Copies of what the class keeps beside parameters and state; and what of it is not plain (empty if
    nothing)."""
    found: dict[str, Any] = {}
    for name, value in own_attributes(optimizer):
        if is_function(value):  # of the class's choice; the script will set the same one again
            found[name] = value
        elif is_value(value):
            found[name] = copy.deepcopy(value)
        else:
            return {}, f"{name}, a {type(value).__name__},"
    return found, ""
