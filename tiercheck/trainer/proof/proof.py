"""Proves that a slot, and what a restore brings back, is what the state was at `step`.

A sample of the live state is taken in the training thread. It is compared with the slot before that becomes
readable, so that a torn copy is none, however the state was written meanwhile. It travels with the version,
and is compared with the live state after a load, so that training never begins with another one.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercheck.trainer.tensors.leaves import Entry
from tiercheck.trainer.tensors.samples import Sample, Sampler

SUM_BYTES = 4
"""Of one checksum."""
_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class StateProof:
    """Of one snapshot."""

    sample: Sample
    """Of what this rank holds of each entry, then of what it stores of those that it stores in part."""
    names: tuple[str, ...]
    stored: tuple[int, ...]
    """Of each entry, the number in `sample` of what is stored."""

    @staticmethod
    def take(sampler: Sampler, held: Sequence[Entry], stored: Sequence[Entry]) -> StateProof:
        """`held`: entries with all that this rank holds; `stored`: the same ones, cut to its share."""
        tensors = [entry.tensor for entry in held]
        numbers = []
        for number, (whole, part) in enumerate(zip(held, stored, strict=True)):
            if part.tensor is not whole.tensor:
                numbers.append(len(tensors))
                tensors.append(part.tensor)
            else:
                numbers.append(number)
        return StateProof(sampler.take(tensors), tuple(entry.name for entry in held), tuple(numbers))

    def written(self) -> bytes:
        """For the slot: a checksum for each entry, in their order. Waits for the device."""
        sums = self.sample.sums[: len(self.names)]
        return struct.pack(f"<{len(sums)}I", *sums)

    def torn(self, views: Mapping[str, Tensor]) -> list[str]:
        """Names of what lies otherwise in the slot than it was. Waits for the device."""
        sums = self.sample.sums
        found = Sampler().take([views[name] for name in self.names]).sums
        return [
            name
            for name, number, there in zip(self.names, self.stored, found, strict=True)
            if sums[number] != there
        ]


def first_difference(names: Sequence[str], sums: Sequence[int], now: Mapping[str, Tensor]) -> str:
    """Name of the first tensor that is not what the proof says; empty: all are."""
    if missing := [name for name in names if name not in now]:
        return missing[0]
    found = Sampler().take([now[name] for name in names]).sums
    return next((name for name, was, here in zip(names, sums, found, strict=True) if was != here), "")


@torch.no_grad()
def whole_difference(
    entries: Sequence[Entry],
    views: Mapping[str, Tensor],
    stopped: Callable[[], bool] = lambda: False,
    *,
    fetch: bool = False,
) -> str:
    """Name of the first tensor that differs from its place in the slot by any byte; empty: none, or it was
    `stopped`.

    Of tensors in host memory that lie in order. `fetch`: of the others too, which are copied for it.
    """
    for entry in entries:
        tensor, view = entry.tensor, views[entry.name]
        if not entry.lazy or not tensor.nbytes:
            continue
        if tensor.is_conj() or tensor.is_neg():  # its bytes are not yet what they stand for
            continue
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            if not fetch:
                continue
            tensor = tensor.cpu().contiguous()
        for at in range(0, tensor.nbytes, _CHUNK):
            if stopped():
                return ""
            length = min(_CHUNK, tensor.nbytes - at)
            # Without the interpreter lock, at the speed of memory.
            if _memcmp(tensor.data_ptr() + at, view.data_ptr() + at, length) and not stopped():
                return entry.name
    return ""


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
