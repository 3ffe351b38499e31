"""Checks that what deltas tell nothing of stays as it is: frozen parameters and large buffers.

Torch's counters miss what is written through `.data`. In host memory the training thread looks at bytes
(`Watch`, `Buffers`). On a device that would be work for it at each step; there the saver's thread takes a
sample, beside the copies of a delta, and compares it with that of the snapshot or delta before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tiercheck.trainer.tensors.accelerator import on_host
from tiercheck.trainer.tensors.leaves import PLAIN
from tiercheck.trainer.tensors.samples import Sample, Sampler

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
