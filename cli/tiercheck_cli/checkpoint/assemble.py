"""Whole tensors out of shards, a slab at a time: a model that fits no memory can still be copied."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tiercheck.protocol.contents import WholeTensor
from tiercheck.protocol.pieces import Box, Part
from tiercheck_cli.checkpoint.saved import Saved

SLAB = 64 * 1024 * 1024
"""Bytes held at once, unless one row has more."""


def slabs(tensor: WholeTensor, most: int = SLAB) -> Iterator[Box]:
    """The tensor in row-major order, in boxes of whole rows of at most `most` bytes."""
    if not tensor.shape or tensor.size <= most:
        yield Box.whole(tensor.shape)
        return
    row = math.prod(tensor.shape[1:]) * tensor.itemsize
    rows = max(1, most // max(1, row))
    for first in range(0, tensor.shape[0], rows):
        yield Box((first, *(0,) * (len(tensor.shape) - 1)), (min(rows, tensor.shape[0] - first), *tensor.shape[1:]))


def read_box(saved: Saved, tensor: WholeTensor, wanted: Box) -> bytearray:
    """Its elements in row-major order. Raises CannotDo."""
    size = tensor.itemsize
    filled = bytearray(wanted.count * size)
    for chunk, box in tensor.reads(wanted):
        sources = Part(chunk.box, 0).ranges(box, most=box.count)
        targets = Part(wanted, 0).ranges(box, most=box.count)
        begin, end = sources[0][0] * size, sources[-1][1] * size
        near = saved.slots[chunk.rank].read(chunk.begin + begin, chunk.begin + end)
        for source, target, count in _together(sources, targets):
            at = source * size - begin
            filled[target * size : (target + count) * size] = near[at : at + count * size]
    return filled


def _together(sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs of the same elements in both: (first in the one, first in the other, number)."""
    step = min(sources[0][1] - sources[0][0], targets[0][1] - targets[0][0])
    cut = (
        [first + at for first, last in ranges for at in range(0, last - first, step)] for ranges in (sources, targets)
    )
    for source, target in zip(*cut, strict=True):
        yield source, target, step
