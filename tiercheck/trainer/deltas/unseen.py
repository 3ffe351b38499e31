"""Detects changes that deltas do not record: updates without hooks, frozen weights, large buffers.

Hooks announce changes of the state. If none is called, the bytes show a change; then copies cannot run beside
training, and state that cannot be captured is reported.

An optimizer that was not given to the Checkpointer may be a forgotten one, one inside an object that only
resembles an optimizer, or one that the script has recreated. Its state is in no version.

torch's counters miss writes through `.data`. In host memory the training thread compares bytes (`Watch`,
`Buffers`). On a device that would delay each step; there the saver thread takes a sample beside the copies of
a delta, and compares it with that of the previous snapshot or delta.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.tensors.accelerator import on_host
from tiercheck.trainer.tensors.samples import Sample, Sampler
from tiercheck.trainer.tensors.tensor_parts import PLAIN, parameters_of, parts, shard_or_self

COMPILED = "updates happen without a call of the optimizer's hooks (a compiled or captured step)"
FOREIGN = (
    "parameters change although no optimizer that this Checkpointer was given makes a step: the script "
    "trains with another one, whose "
    "state is in no version. Give this Checkpointer both, or the new one to a Checkpointer with another `run`"
)
_PATIENCE = 2
"""The number of consecutive steps that another optimizer must have made."""


class UnhookedUpdates:
    """Detects updates of a Checkpointer's parameters that call no hook. Only for the training thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooked = False
        self._foreign = 0
        self._before: tuple[Sample, Sample] | None = None
        self._samplers = Sampler(), Sampler()
        self.found = ""
        """COMPILED or FOREIGN; empty: every update so far called hooks."""

    def hooked(self) -> bool:
        """Notes the call of a hook. Returns False during the capture of a CUDA graph, which runs later."""
        self._hooked = True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.found = self.found or COMPILED
            return False
        return True

    def look(self) -> None:
        """Checks at the end of a step for an unseen update. Costs nothing if hooks were called."""
        hooked, self._hooked = self._hooked, False
        if hooked:
            self._before, self._foreign = None, 0
            if self.found == FOREIGN:
                self.found = ""
            return
        if self.found == COMPILED and not all(parameter.is_cpu for parameter in self._parameters()):
            return  # another sample would wait for the device at each step
        before, self._before = (
            self._before,
            (self._samplers[0].take(self._parameters()), self._samplers[1].take(self._states())),
        )
        if before is None or before[0].equals(self._before[0]):
            return  # no update at all: one with overflowed gradients is skipped
        if not (before[1].equals(self._before[1]) and self._states()):
            self.found = self.found or COMPILED
            return
        # a single one may be a skipped update together with another change of weights by the script
        self._foreign += 1
        if self._foreign >= _PATIENCE:
            self.found = FOREIGN

    def _parameters(self) -> list[Tensor]:
        return [leaf for parameter in parameters_of(*self._optimizers) for _, leaf in parts(parameter)]

    def _states(self) -> list[Tensor]:
        kept = (
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, Mapping) else [state])
        )
        return [leaf for value in kept if isinstance(value, Tensor) for _, leaf in parts(value)]


_LOOKS = 2
"""The number of updates at which an optimizer is examined: some create state only at the second."""
_LASTING = 100
"""The number of updates after which an optimizer is not temporary, such as one of an inner loop."""
_INTEGRATIONS = "tiercheck.integrations"
_DEEP, _MANY = 5, 10_000
"""The depth and the number of the script's objects in which an optimizer is searched for."""
_PLAIN = (Tensor, nn.Module, type, str, bytes, int, float, type(None))


class UnregisteredOptimizers:
    """Detects optimizers that train saved parameters and were not given to the Checkpointer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        state: Iterable[Any],
        warn: Callable[[str, str], None],
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._given = {*map(id, optimizers)}
        self._state = list(state)
        self._warn = warn
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._lost: list[weakref.ref[Optimizer]] = []
        self._scalers: dict[int, Any] = {}
        """The `GradScaler` of the first updates of each given optimizer, by identity; None: it has none."""

    def updated(self, optimizer: Optimizer, *_: object) -> None:
        """Handles the end of a step of any optimizer in the process. Never raises."""
        if torch.compiler.is_compiling():
            return
        if (given := id(optimizer)) in self._given:
            if given not in self._scalers:
                self._scalers[given] = _scaler_of_update()
            return
        try:
            self._count(optimizer)
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._warn(type(error).__name__, repr(error))

    def lost(self) -> str:
        """Returns a message about a live optimizer with needed state that is in no version; empty: none."""
        alive = (each() for each in self._lost)
        return next(
            (
                f"an optimizer ({type(each).__name__}) that this Checkpointer was not given trains "
                "parameters that are saved, and what it keeps of them is in no version: hand over all "
                "optimizers, those inside of another one too"
                for each in alive
                if each is not None
            ),
            "",
        )

    @cached_property
    def forgotten(self) -> list[tuple[str, str]]:
        """Returns the kind and a message about each scheduler or scaler not in the script's `state`.

        They are looked for once: the search is long."""
        return list(self._find_forgotten())

    def _find_forgotten(self) -> Iterator[tuple[str, str]]:
        if are_of_integration(self._state):
            return  # they save what their framework has
        own = [each for each in self._state if not type(each).__module__.startswith("tiercheck.")]
        for each in self._optimizers:
            name, scaler = type(each).__name__, self._scalers.get(id(each))
            if hasattr(each.step, "_wrapped_by_lr_sched") and not reaches(own, each):
                yield (
                    "Schedule",
                    f"a scheduler sets the learning rate of {name}, and `state` has none: give the "
                    'Checkpointer state={"scheduler": scheduler}, or each start begins its schedule anew',
                )
            if scaler is not None and not reaches(own, scaler):
                yield (
                    "Scaler",
                    f"a GradScaler scales the gradients of {name}, and `state` has none: give the "
                    'Checkpointer state={"scaler": scaler}, or each start begins with its first scale',
                )

    def _count(self, optimizer: Optimizer) -> None:
        updates = self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        if updates <= _LOOKS:
            kept = {id(each) for each, state in optimizer.state.items() if isinstance(each, Tensor) and state}
            if kept & self._saved() and not self._stands_for_another(optimizer):
                self._lost.append(weakref.ref(optimizer))
        elif (
            updates == _LASTING
            and optimizer.state
            and not self.lost()
            and not self._stands_for_another(optimizer)
        ):
            self._warn(
                "UnregisteredOptimizers",
                f"an optimizer ({type(optimizer).__name__}) that the Checkpointer was not given is in no "
                "version",
            )

    def _saved(self) -> set[int]:
        held = (parameter for module in self._modules for parameter in module.parameters())
        return {*map(id, parameters_of(*self._optimizers)), *map(id, held)}

    def _stands_for_another(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer is covered by a given one or by the script's `state`.

        It shares a given one's state, wraps a given one, or is reachable from `state`."""
        shown = any(optimizer.state is each.state or reaches(optimizer, each) for each in self._optimizers)
        return shown or reaches(self._state, optimizer)


def _scaler_of_update() -> Any:
    """Returns the `GradScaler` that makes the running update; None: there is none."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = frame.f_locals.get("self") if frame.f_back is not None else None
    return scaler if scaler is not None and scaler.is_enabled() else None


def are_of_integration(state: Iterable[Any]) -> bool:
    """Returns whether an integration saves what its framework has, and where it is in the data."""
    return any(type(each).__module__.startswith(_INTEGRATIONS) for each in state)


def reaches(value: Any, wanted: object) -> bool:
    """Returns whether `wanted` is reachable from `value` over a few objects."""
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


PATIENCE = 3
"""The number of incomplete deltas after which no more are taken."""


class UntrackedTensors:
    """Detects changes of one model's tensors that deltas do not record.

    Only for the saver thread, except `watch`, `begin` and `hopeless`."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._sampler = Sampler()
        self._known: dict[str, int] = {}
        self._moved: tuple[int, set[str]] = 0, set()
        """The step of the newest snapshot, and the tensors that had changed in it."""
        self._count = 0
        self.hopeless = ""
        """The name of a tensor that keeps changing; empty: none."""

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the tensors to check, by name in a snapshot. Those in host memory are left out."""
        shards = {name: shard_or_self(tensor) for name, tensor in tensors.items()}
        self._tensors = {
            name: shard
            for name, shard in shards.items()
            if type(shard) in PLAIN and shard.layout is torch.strided and not on_host(shard.device)
        }

    def begin(self) -> None:
        """Records the state at the start of training, for the first delta. Waits for the device."""
        if looked := self.look():
            self._known = dict(zip(looked[0], looked[1].sums, strict=True))

    def look(self) -> tuple[Mapping[str, Tensor], Sample] | None:
        """Enqueues a sample of the tensors on the device; None: there are none to check."""
        tensors = self._tensors
        return (tensors, self._sampler.take(list(tensors.values()))) if tensors else None

    def snapshot(self, step: int, sums: Mapping[str, int]) -> None:
        """Records the checksums of a snapshot's tensors, by name."""
        seen = {name: sums[name] for name in self._tensors if name in sums}
        self._moved = step, self._changed(seen)
        self._known |= seen

    def delta(self, step: int, looked: tuple[Mapping[str, Tensor], Sample], told: Collection[str]) -> str:
        """Returns the name of a changed tensor that a step's delta does not record; empty: none.

        The last argument names the tensors that it records. Waits for the device.
        """
        tensors, sample = looked
        seen = dict(zip(tensors, sample.sums, strict=True))
        changed = self._changed(seen) | (self._moved[1] if self._moved[0] == step else set())
        self._known |= seen
        moved = min(changed.difference(told), default="")
        if moved:
            self._count += 1
            if self._count >= PATIENCE:
                self.hopeless = moved
        return moved

    def _changed(self, seen: Mapping[str, int]) -> set[str]:
        return {name for name, found in seen.items() if self._known.get(name, found) != found}
