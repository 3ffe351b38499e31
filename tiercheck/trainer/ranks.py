"""Which rank this process is, told by torch.distributed if it runs, else by torchrun's environment."""

from __future__ import annotations

import os
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def everyones(mine: T) -> list[T]:
    """What each rank gives, in their order. A collective call."""
    if not distributed() or dist.get_world_size() == 1:
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def anywhere(mine: bool) -> bool:
    """Whether it is so at any rank. A collective call."""
    return any(everyones(mine))


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process on its own."""
    if distributed():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
