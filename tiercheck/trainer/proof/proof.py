"""Proves that a slot, and the state after a restore, equal the state at `step`.

A sample of the live state is taken in the training thread. It is compared with the slot before that becomes
readable, so that a copy torn by concurrent writes is rejected. It is stored with the version, and compared
with the live state after a load, so that training never begins with another state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercheck.trainer.tensors.samples import Sample, Sampler
from tiercheck.trainer.tensors.tensor_parts import Entry

SUM_BYTES = 4
"""Bytes of one checksum."""
_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class StateProof:
    """The proof of one snapshot."""

    sample: Sample
    """The sample of each entry that this rank holds, then of the stored parts of entries cut to its share."""
    names: tuple[str, ...]
    stored: tuple[int, ...]
    """The index in `sample` of the stored tensor of each entry."""

    @staticmethod
    def take(sampler: Sampler, held: Sequence[Entry], stored: Sequence[Entry]) -> StateProof:
        """Takes a sample. `held`: the rank's entries; `stored`: the same entries, cut to its share."""
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
        """Returns the checksums for the slot, one per entry, in order. Waits for the device."""
        sums = self.sample.sums[: len(self.names)]
        return struct.pack(f"<{len(sums)}I", *sums)

    def torn(self, views: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of tensors that differ in the slot. Waits for the device."""
        sums = self.sample.sums
        found = Sampler().take([views[name] for name in self.names]).sums
        return [
            name
            for name, number, there in zip(self.names, self.stored, found, strict=True)
            if sums[number] != there
        ]


def first_difference(names: Sequence[str], sums: Sequence[int], now: Mapping[str, Tensor]) -> str:
    """Returns the name of the first tensor that differs from the proof; empty: none."""
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
    """Returns the first tensor's name that differs from the slot in any byte; empty: none, or `stopped`.

    Compares contiguous tensors in host memory, and with `fetch` the others too, by copying them.
    """
    for entry in entries:
        tensor, view = entry.tensor, views[entry.name]
        if not entry.lazy or not tensor.nbytes:
            continue
        if tensor.is_conj() or tensor.is_neg():  # its bytes do not represent its values yet
            continue
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            if not fetch:
                continue
            tensor = tensor.cpu().contiguous()
        for at in range(0, tensor.nbytes, _CHUNK):
            if stopped():
                return ""
            length = min(_CHUNK, tensor.nbytes - at)
            # Runs without the interpreter lock, at memory speed.
            if _memcmp(tensor.data_ptr() + at, view.data_ptr() + at, length) and not stopped():
                return entry.name
    return ""


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
