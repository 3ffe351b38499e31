"""Finds changes that deltas would not tell: updates past every hook, frozen weights, large buffers.

Hooks tell when the state is about to change. Where none is called, the bytes tell that it has changed; then
copies cannot go on beside training, and what cannot be captured at all is told.

An optimizer may be one of several that was forgotten, one inside of an object that only looks like an
optimizer, or one that the script made anew. What it keeps of what it trains is in no version.

Torch's counters miss what is written through `.data`. In host memory the training thread looks at bytes
(`Watch`, `Buffers`). On a device that would be work for it at each step; there the saver's thread takes a
sample, beside the copies of a delta, and compares it with that of the snapshot or delta before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.tensors.accelerator import on_host
from tiercheck.trainer.tensors.leaves import PLAIN, parts
from tiercheck.trainer.tensors.samples import Sample, Sampler

COMPILED = "updates happen without a call of the optimizer's hooks (a compiled or captured step)"
FOREIGN = (
    "parameters change although no optimizer that this Checkpointer was given makes a step: the script "
    "trains with another one, whose "
    "state is in no version. Give it to a new Checkpointer"
)
_PATIENCE = 2
"""Steps in a row that somebody else must have made."""


class Unseen:
    """Of one Checkpointer, in the training thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooked = False
        self._foreign = 0
        self._before: tuple[Sample, Sample] | None = None
        self._samplers = Sampler(), Sampler()
        self.found = ""
        """COMPILED or FOREIGN; empty: every update so far was seen."""

    def hooked(self) -> bool:
        """A hook is called. False if the update is only being recorded, and will happen later, when none
        is.
        """
        self._hooked = True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.found = self.found or COMPILED
            return False
        return True

    def look(self) -> None:
        """A step ends. Costs nothing as long as hooks are called."""
        hooked, self._hooked = self._hooked, False
        if hooked:
            self._before, self._foreign = None, 0
            if self.found == FOREIGN:
                self.found = ""
            return
        if self.found == COMPILED and not all(parameter.is_cpu for parameter in self._parameters()):
            return  # to look again would wait for the device at each step
        before, self._before = (
            self._before,
            (
                self._samplers[0].take(self._parameters()),
                self._samplers[1].take(self._states()),
            ),
        )
        if before is None or before[0].equals(self._before[0]):
            return  # no update either: one whose gradients overflowed is left out
        if not (before[1].equals(self._before[1]) and self._states()):
            self.found = self.found or COMPILED
            return
        # once may be an update left out, and something that the script does to its weights all the same
        self._foreign += 1
        if self._foreign >= _PATIENCE:
            self.found = FOREIGN

    def _parameters(self) -> list[Tensor]:
        trained = (
            p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        )
        return [leaf for parameter in trained for _, leaf in parts(parameter)]

    def _states(self) -> list[Tensor]:
        kept = (
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, Mapping) else [state])
        )
        return [leaf for value in kept if isinstance(value, Tensor) for _, leaf in parts(value)]


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
        """What is in no version, and would be needed; empty: nothing. As long as an optimizer lives, it may
        go on."""
        alive = (each() for each in self._lost)
        return next(
            (
                f"an optimizer ({type(each).__name__}) that this Checkpointer was not given trains "
                "parameters that are saved, and "
                "what it keeps of them is in no version: hand over all optimizers, those inside of "
                "another one too"
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
        elif (
            updates == _LASTING
            and optimizer.state
            and not self.lost()
            and not self._stands_for_another(optimizer)
        ):
            self._warn(
                "NotGiven",
                f"an optimizer ({type(optimizer).__name__}) that the Checkpointer was not given is in no "
                "version",
            )

    def _saved(self) -> set[int]:
        trained = (
            p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        )
        return {*map(id, trained), *(id(p) for module in self._modules for p in module.parameters())}

    def _stands_for_another(self, optimizer: Optimizer) -> bool:
        """Whether one that was given shows its state, it only passes on to one, or the script's own `state`
        leads to it."""
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


PATIENCE = 3
"""Deltas that turn out not to tell all before none are taken any more."""


class Untold:
    """Of one model. But for `watch`, `begin` and `hopeless`, of the saver's thread."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._sampler = Sampler()
        self._known: dict[str, int] = {}
        self._moved: tuple[int, set[str]] = 0, set()
        """The newest snapshot, and what it had otherwise than what came before it."""
        self._count = 0
        self.hopeless = ""
        """What keeps changing."""

    def watch(self, tensors: Mapping[str, Tensor]) -> None:
        """These from now on, by their names in a snapshot. Those in host memory are left out."""
        shards = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}
        self._tensors = {
            name: shard
            for name, shard in shards.items()
            if type(shard) in PLAIN and shard.layout is torch.strided and not on_host(shard.device)
        }

    def begin(self) -> None:
        """Training begins: the first delta goes on from what is there now. Waits for the device."""
        if looked := self.look():
            self._known = dict(zip(looked[0], looked[1].sums, strict=True))

    def look(self) -> tuple[Mapping[str, Tensor], Sample] | None:
        """Of what the device has when it comes to this; None: there is nothing to look at."""
        tensors = self._tensors
        return (tensors, self._sampler.take(list(tensors.values()))) if tensors else None

    def snapshot(self, step: int, sums: Mapping[str, int]) -> None:
        """A snapshot of that step has these, by name."""
        seen = {name: sums[name] for name in self._tensors if name in sums}
        self._moved = step, self._changed(seen)
        self._known |= seen

    def delta(self, step: int, looked: tuple[Mapping[str, Tensor], Sample], told: Collection[str]) -> str:
        """Name of something that is otherwise than before, and that the delta of that step does not tell of;
        empty: nothing is.

        `told`: names of what it does. Waits for the device.
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
