"""torch's in-place counters of many tensors, with next to no Python for any of them: they are read several times in each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

from torch import Tensor

from tiercheck.trainer.leaves import PLAIN, read_each

_version, _shard_version = attrgetter("_version"), attrgetter("_local_tensor._version")


class Counters:
    """Of these tensors. A sharded one has two: its own, and that of its shard, which somebody may have got hold of."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._sharded = [number for number, tensor in enumerate(tensors) if type(tensor) not in PLAIN]
        self._shards = [tensors[number] for number in self._sharded]

    def read(self) -> list[int]:
        """Two readings are equal if nothing was written in place between them."""
        try:
            return read_each(_version, self._tensors) + read_each(_shard_version, self._shards)
        except (AttributeError, RuntimeError):  # a subclass without a shard, or one made for inference
            return [*map(_own, self._tensors), *map(_of_shard, self._shards)]

    def moved(self, before: list[int], after: list[int]) -> set[int]:
        """The tensors, by number, that were written between two readings."""
        if before == after:
            return set()
        numbers = chain(range(len(self._tensors)), self._sharded)
        return {number for number, old, new in zip(numbers, before, after, strict=True) if old != new}


def _own(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _of_shard(tensor: Tensor) -> int:
    shard = getattr(tensor, "_local_tensor", None)
    return 0 if shard is None else _own(shard)
