"""Detects changes of the state by anything but the optimizer, which would make a delta inexact.

torch's in-place counters show them. For writes that these miss, such as through `.data`, a sample of the
parameters' bytes is compared, where this needs no wait for a device.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import PLAIN, parameters_of, read_each, shard_or_self, write_count

_NUMBERS = {bool, int, float}
_CONTAINERS = {list, dict, deque}

_version, _shard_version = attrgetter("_version"), attrgetter("_local_tensor._version")


class VersionCounters:
    """Reads torch's in-place counters of tensors. Uses little Python, as each step reads them often.

    For a sharded tensor it reads the counter of the shard, which counts writes through the whole tensor and
    through the shard itself.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._plain = [number for number, tensor in enumerate(tensors) if type(tensor) in PLAIN]
        self._sharded = [number for number, tensor in enumerate(tensors) if type(tensor) not in PLAIN]
        self._wholes = [tensors[number] for number in self._plain]
        self._shards = [tensors[number] for number in self._sharded]

    def read(self) -> list[int]:
        """Returns the counters. Two readings are equal if there was no in-place write between them."""
        try:
            return read_each(_version, self._wholes) + read_each(_shard_version, self._shards)
        except (AttributeError, RuntimeError):  # a subclass without a shard, or one made for inference
            return [*map(write_count, self._wholes), *map(write_count, map(shard_or_self, self._shards))]

    def moved(self, before: list[int], after: list[int]) -> set[int]:
        """Returns the numbers of the tensors that were written between two readings."""
        if before == after:
            return set()
        numbers = chain(self._plain, self._sharded)
        return {number for number, old, new in zip(numbers, before, after, strict=True) if old != new}


Mark = list[list[int]]
"""A reading of a `Watch`: one list for each of its parts."""


class Watch:
    """Watches all parameters of the model and all state of the optimizers for changes.

    Each optimizer is a part of its own, because scripts may have one for every parameter: to read all of them
    at each update of one would take the square of their number. What no optimizer has is the last part.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], sent: Iterable[Tensor] = ()
    ) -> None:
        """`sent`: parameters that other ranks may update and send here through `.data`."""
        self._optimizers = optimizers
        trained = list(map(parameters_of, optimizers))
        known = {id(parameter) for each in trained for parameter in each}
        states = {id(each.state) for each in optimizers}
        self._whole = len(known) < sum(map(len, trained)) or len(states) < len(optimizers)
        """True if optimizers share something, so that one changes what belongs to another: one part then."""
        if self._whole:
            trained = [[*chain.from_iterable(trained)]]
        others = {*map(id, sent)} - known
        rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
        owners = [[*optimizers]] if self._whole else [[each] for each in optimizers]
        self._parts = [
            _Part(parameters, of, others)
            for parameters, of in zip([*trained, rest], [*owners, []], strict=True)
        ]

    def read(self) -> Mark:
        """Returns a reading, equal to another one if nothing was changed in place or replaced in between."""
        return [part.read() for part in self._parts]

    def is_changed(self, mark: Mark, index: int) -> bool:
        """Returns whether what belongs to one optimizer has changed since a reading."""
        number = 0 if self._whole else index
        return mark[number] != self._parts[number].read()

    def read_again(self, mark: Mark, index: int) -> None:
        """Sets in a reading what belongs to one optimizer."""
        number = 0 if self._whole else index
        mark[number] = self._parts[number].read()

    def elsewhere(self) -> Callable[[Mark], bool]:
        """Returns a function, for another thread, that compares the state with a result of `read`."""
        parts = [part.elsewhere() for part in self._parts]
        listed = trained_parameters(self._optimizers)
        return lambda before: (
            [part.read() for part in parts] == before and trained_parameters(self._optimizers) == listed
        )


class _Part:
    """Parameters that are read together, and what their optimizers keep."""

    def __init__(
        self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer], others: Container[int]
    ) -> None:
        """`others`: the identities of parameters whose bytes are not compared."""
        self._optimizers = optimizers
        self._kept = [_Kept(optimizer) for optimizer in optimizers]
        known = {id(each): each for each in parameters if not is_lazy(each) and not each.is_inference()}
        self._parameters = VersionCounters(list(known.values()))
        watched = [parameter for parameter in known.values() if id(parameter) not in others]
        shards = [shard_or_self(parameter) for parameter in watched]
        self._seen = [shard for shard in shards if type(shard) in PLAIN and shard.device.type == "cpu"]
        self._sampler = Sampler()

    def read(self) -> list[int]:
        found = self._parameters.read()
        for kept in self._kept:
            found += kept.read()
        found.append(self.bytes())
        return found

    def bytes(self) -> int:
        return self._sampler.take(self._seen).sum()

    def elsewhere(self) -> _Part:
        other = copy.copy(self)
        other._kept, other._sampler = [_Kept(optimizer) for optimizer in self._optimizers], Sampler()
        return other


def trained_parameters(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    """Returns the identities of the parameters of each optimizer's groups."""
    return [[*map(id, group["params"])] for optimizer in optimizers for group in optimizer.param_groups]


class Tree:
    """The structure of a model. Deltas cannot record an added or replaced module, parameter or buffer."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._owners: list[dict[str, Any]] = [module._parameters for module in modules]
        self._buffers: list[dict[str, Any]] = [module._buffers for module in modules]
        self._children: list[dict[str, Any]] = [module._modules for module in modules]
        # Sharding libraries temporarily put whole parameters in their places.
        self._by_identity = all(type(parameter) in PLAIN for parameter in model.parameters())
        self._kept = list(model.parameters()), modules  # so that no other object gets the same id
        self._seen = self._read()

    def changed(self) -> bool:
        return self._read() != self._seen

    def _read(self) -> list[Any]:
        """Reads names and identities, but not of buffers, as forward may replace one each time."""
        names = chain.from_iterable(map(dict.keys, (*self._owners, *self._buffers)))
        parameters = chain.from_iterable(map(dict.values, self._owners)) if self._by_identity else ()
        return [*names, *map(id, chain.from_iterable(map(dict.values, self._children))), *map(id, parameters)]


class _Kept:
    """The state values of one optimizer. Tensors among them are only searched after a replacement."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[Any] = []
        """All values, kept alive so that no other object gets the same id."""
        self._identities: list[int] = []
        self._containers: list[Any] = []
        """The lists and dicts among them. Their members are watched too."""
        self._marks: list[int] = []
        self._counters = VersionCounters([])

    def read(self) -> list[int]:
        states = self._optimizer.state.values()
        try:
            kept = list(chain.from_iterable(map(dict.values, states)))
        except TypeError:  # the state of a parameter may be something else than a dict
            kept = list(chain.from_iterable(map(_values, states)))
        identities = [*map(id, kept), *map(id, _members(self._containers))]
        if identities != self._identities:
            self._containers = [value for value in kept if type(value) in _CONTAINERS]
            self._values = values = kept + _members(self._containers)
            self._identities = list(map(id, values))
            tensors = [value for value in values if isinstance(value, Tensor)]
            numbers = tuple([value for value in values if type(value) in _NUMBERS])
            self._marks = [*map(id, tensors), hash(numbers)]
            self._counters = VersionCounters(tensors)
        return self._marks + self._counters.read()


def _members(containers: Sequence[Any]) -> list[Any]:
    return [member for each in containers for member in (each.values() if type(each) is dict else each)]


def _values(state: Any) -> Any:
    return state.values() if isinstance(state, dict) else (state,)
