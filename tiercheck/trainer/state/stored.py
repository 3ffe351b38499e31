"""Reads a state from its slot straight into the memory of the tensors, on a few threads.

Mapping a file costs a fault for every few pages, which takes longer than copying them; `preadv` has none, and
releases the interpreter lock. The mapping stays for what cannot be filled that way, and to look at shapes
without reading anything.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import torch
from torch import Tensor

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, accelerator_of
from tiercheck.trainer.tensors.leaves import write

_PIECE = 4 * 1024 * 1024
_MANY = 32 * 1024 * 1024
"""Bytes that are worth a second thread."""
_THREADS = 4
_WINDOW = 64 * 1024 * 1024
"""Bytes that are on their way to a device at once, of two such windows."""


class StoredTensors(Mapping[str, Tensor]):
    """A slot's tensors by name, as views of its mapping; `read_into` is the fast way to get at many of
    them.
    """

    def __init__(
        self, descriptor: int, size: int, views: Mapping[str, Tensor], offsets: Mapping[str, int]
    ) -> None:
        """Takes `descriptor` over: it is closed with this object. `size`: of the artifact."""
        self._descriptor, self._size = descriptor, size
        self._views, self._offsets = views, offsets

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def ensure_whole(self) -> None:
        """Raises RestoreError if the file is too short."""
        found = os.fstat(self._descriptor).st_size
        if found < self._size:
            raise RestoreError(f"the checkpoint is cut off: {found} of {self._size} bytes are there")

    @torch.no_grad()
    def read_into(self, wanted: Sequence[tuple[str, Tensor]]) -> None:
        """Fill each tensor with what is stored under its name; shapes and dtypes must be the same.

        Raises RestoreError if bytes are missing or cannot be read: before anything is written, if the file is
        too short already.
        """
        self.ensure_whole()
        self._read([(target, self._views[name], self._offsets[name]) for name, target in wanted])

    @torch.no_grad()
    def read_parts(self, wanted: Sequence[tuple[str, int, Tensor]]) -> None:
        """Fill each tensor with elements that are stored under its name, as they lie there, from that one on.

        Raises RestoreError if the bytes cannot be read; no others need to be there.
        """
        found = []
        for name, first, target in wanted:
            stored = self._views[name].view(-1)[first : first + target.numel()].view(target.shape)
            found.append((target, stored, self._offsets[name] + first * stored.element_size()))
        self._read(found)

    def _read(self, wanted: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Tensors to fill; with what; where its bytes are in the file."""
        pieces: list[tuple[memoryview, int]] = []
        on_device: dict[Accelerator, list[tuple[Tensor, int]]] = {}
        for target, stored, offset in wanted:
            device = accelerator_of([target])
            if not _is_plain(target, stored):
                write(target, stored)
            elif device is not None:
                on_device.setdefault(device, []).append((target.view(-1).view(torch.uint8), offset))
            else:
                target.view(-1).view(torch.uint8)[
                    :0
                ].zero_()  # changes nothing but torch's counter of changes
                pieces += _pieces(target, offset)
        try:
            self._fill_all(pieces)
            for device, targets in on_device.items():
                self._lift(device, targets)
        except OSError as error:
            raise RestoreError(f"the checkpoint cannot be read: {error}") from error

    def _lift(self, device: Accelerator, wanted: Sequence[tuple[Tensor, int]]) -> None:
        """Bring bytes onto a device by way of two page-locked windows: one is filled while the other is
        emptied.

        Flat tensors of bytes to fill; where these are in the file.
        """
        windows = [device.room(min(_WINDOW, sum(target.numel() for target, _ in wanted))) for _ in range(2)]
        marks: list[Mark] = []
        for window, batch in zip(cycle(windows), _batches(wanted, len(windows[0]))):
            if len(marks) == len(windows):
                marks.pop(0).synchronize()
            places = window[: sum(target.numel() for target, _ in batch)].split_with_sizes(
                [t.numel() for t, _ in batch]
            )
            self._fill_all(
                [p for place, (_, at) in zip(places, batch, strict=True) for p in _pieces(place, at)]
            )
            for place, (target, _) in zip(places, batch, strict=True):
                device.put(target, place)
            marks.append(device.final())
        for mark in marks:
            mark.synchronize()

    def _fill_all(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        threads = min(_THREADS, len(os.sched_getaffinity(0)))
        if threads > 1 and sum(len(view) for view, _ in pieces) >= _MANY:
            with ThreadPoolExecutor(threads, thread_name_prefix="tiercheck-read") as pool:
                list(pool.map(lambda piece: self._fill(*piece), pieces))
        else:
            for view, offset in pieces:
                self._fill(view, offset)

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if count == 0:
                raise RestoreError(f"the checkpoint is cut off: nothing is at byte {offset} of {self._size}")
            view, offset = view[count:], offset + count


def _pieces(target: Tensor, offset: int) -> list[tuple[memoryview, int]]:
    """The memory of a tensor on the host, bit by bit; of each where its content is in the file."""
    if not target.nbytes:
        return []
    memory = (ctypes.c_char * target.nbytes).from_address(target.data_ptr())
    view = memoryview(memory).cast("B")
    return [(view[at : at + _PIECE], offset + at) for at in range(0, target.nbytes, _PIECE)]


def _batches(wanted: Iterable[tuple[Tensor, int]], most: int) -> Iterator[list[tuple[Tensor, int]]]:
    """All of them in order, each batch of at most so many bytes; what is larger is cut."""
    batch: list[tuple[Tensor, int]] = []
    left = most
    for target, offset in wanted:
        at = 0
        while at < target.numel():
            part = target[at : at + left]
            batch.append((part, offset + at))
            at += part.numel()
            left -= part.numel()
            if not left:
                yield batch
                batch, left = [], most
    if batch:
        yield batch


def _is_plain(target: Tensor, stored: Tensor) -> bool:
    """Whether the bytes of `target` in memory are those of the file, one by one."""
    return (
        target.layout is torch.strided
        and target.is_contiguous()
        and (target.dtype, target.shape) == (stored.dtype, stored.shape)
        and not target.is_conj()
        and not target.is_neg()
    )
