"""Which rank this process is, and where its shard lies in the whole tensor.

torch.distributed tells the rank if it runs, else torchrun's environment; DTensor tells the place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tiercheck.protocol.artifacts.pieces import Box, Piece

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def gather_from_all(mine: T) -> list[T]:
    """What each rank gives, in their order. A collective call."""
    if not is_distributed() or dist.get_world_size() == 1:
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def is_true_anywhere(mine: bool) -> bool:
    """Whether it is so at any rank. A collective call."""
    return any(gather_from_all(mine))


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process on its own."""
    if is_distributed():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Shard:
    piece: Piece
    replicated: tuple[DeviceMesh, tuple[int, ...]]
    """The dimensions of the mesh along which other ranks hold the same."""


def shard_of(value: Tensor, local: Tensor) -> Shard | None:
    """Of a DTensor, whose local shard is `local`; None for other tensors, and where torch's own account does
    not fit the shard."""
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", None)
    if mesh is None or placements is None or any(placement.is_partial() for placement in placements):
        return None
    return _placed(mesh, tuple(placements), tuple(value.shape), tuple(local.shape))


@lru_cache(maxsize=64 * 1024)
def _placed(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], local: tuple[int, ...]
) -> Shard | None:
    """Remembered, because torch takes long to tell it, and it is asked for every tensor at every snapshot."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    if tuple(extent) != local or len(offset) != len(extent):
        return None
    dims = tuple(
        dim for dim, placement in enumerate(placements) if placement.is_replicate() and mesh.size(dim) > 1
    )
    return Shard(Piece(shape, Box(tuple(offset), tuple(extent))), (mesh, dims))
