"""Samples a few bytes of every tensor at each step, to detect whether it has changed.

Torch's in-place counters miss what is written through `.data`, by a replayed graph, or by a custom kernel.
The bytes show it. Of every 16 MiB sixteen runs are sampled, evenly spread and always the same, so that two
samples of equal shapes can be compared wherever and whenever they were taken.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tiercheck.trainer.tensors.tensor_parts import has_plain_bytes

_CHUNK = 16 * 1024 * 1024
_RUNS, _RUN = 16, 128
"""The number of runs in each chunk, and bytes in each run: a multiple of every element's size."""

_size = attrgetter("nbytes")


@dataclass(frozen=True)
class Sample:
    """The sampled bytes, still on the tensors' own devices."""

    _groups: tuple[Tensor, ...]
    _places: tuple[tuple[int, int, int], ...]
    """The group of each tensor (-1: it has no bytes to sample), and its bytes there."""

    @cached_property
    def sums(self) -> list[int]:
        """Returns a checksum for each tensor. Waits for the device."""
        contents = list(map(content, self._groups))
        return [
            zlib.crc32(contents[group][begin:end]) if group >= 0 else 0 for group, begin, end in self._places
        ]

    def sum(self) -> int:
        return zlib.crc32(b"".join(map(content, self._groups)))

    def equals(self, other: Sample) -> bool:
        """Returns whether the same bytes were sampled at the same places. For tensors in host memory."""
        return self._places == other._places and all(map(torch.equal, self._groups, other._groups))


@dataclass(frozen=True)
class _NonContiguous:
    """A tensor with elements that do not lie in order: they are looked up one by one."""

    tensor: Tensor
    index: tuple[Tensor, ...]


class Sampler:
    """Samples one list of tensors, and looks for the places only when it changes. For one thread."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._groups: list[list[Tensor] | list[_NonContiguous]] = []
        self._places: tuple[tuple[int, int, int], ...] = ()

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> Sample:
        """Samples plain tensors. Bytes are read in the order of the current stream."""
        try:
            # The sampled memory is kept alive, so that no other tensor gets its address.
            known = [*map(Tensor.data_ptr, tensors), *map(_size, tensors), *map(Tensor.stride, tensors)]
        except RuntimeError:  # one of them has no memory to look at
            known = []
        if known != self._known or not known:
            self._plan_places(tensors)
            self._known = known
        return Sample(tuple(torch.cat(_read(group)).view(-1) for group in self._groups), self._places)

    def _plan_places(self, tensors: Sequence[Tensor]) -> None:
        by_kind: dict[tuple[torch.device, int], list[Any]] = {}
        ends: dict[tuple[torch.device, int], int] = {}
        places: list[tuple[int, int, int]] = []
        for tensor in tensors:
            if tensor.layout is not torch.strided or not tensor.nbytes or tensor.is_meta:
                places.append((-1, 0, 0))
                continue
            part = _part(tensor.detach())
            seen = part.numel() if isinstance(part, Tensor) else part.index[0].numel() * tensor.element_size()
            kind = (tensor.device, part.dim() if isinstance(part, Tensor) else 0)
            begin = ends.get(kind, 0)
            by_kind.setdefault(kind, []).append(part)
            ends[kind] = begin + seen
            places.append((list(by_kind).index(kind), begin, begin + seen))
        self._groups, self._places = list(by_kind.values()), tuple(places)


def content(seen: Tensor) -> bytes:
    """Returns the bytes of a sampled tensor of bytes. Waits for the device."""
    there = seen.cpu().contiguous()
    return ctypes.string_at(there.data_ptr(), there.numel())


def _read(group: Any) -> list[Tensor]:
    """Reads one kind of parts, as `_plan_places` sorts them."""
    return (
        [odd.tensor[odd.index].view(-1).view(torch.uint8) for odd in group]
        if type(group[0]) is _NonContiguous
        else group
    )


def _part(tensor: Tensor) -> Tensor | _NonContiguous:
    """Returns runs of a tensor's bytes as rows, or all its bytes if they are few."""
    size, element = tensor.nbytes, tensor.element_size()
    plain = has_plain_bytes(tensor)
    if size < _RUNS * _RUN:
        if plain:
            return tensor.view(-1).view(torch.uint8)
        return _NonContiguous(
            tensor, torch.unravel_index(torch.arange(tensor.numel(), device=tensor.device), tensor.shape)
        )
    count = _RUNS * -(-size // _CHUNK)
    wide = size // count // element * element
    begin = (wide - _RUN) // 3 // element * element
    if plain:
        flat = tensor.view(-1).view(torch.uint8)
        return flat.as_strided((count, _RUN), (wide, 1), flat.storage_offset() + begin)
    starts = (torch.arange(count, device=tensor.device) * wide + begin) // element
    index = (starts[:, None] + torch.arange(_RUN // element, device=tensor.device)).view(-1)
    return _NonContiguous(tensor, torch.unravel_index(index, tensor.shape))
