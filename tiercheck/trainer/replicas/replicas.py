"""Saves what several ranks hold alike in parts, one for each, and puts it together again among them.

Of a shard with R replicas each one stores an equal share of its elements, so that capture, network and memory
fall with the data-parallel degree (REFT, arXiv 2310.12670). After a restore the replicas give each other
their shares, with collectives of the process group that binds them: no way between them is faster.

ZeroRedundancyOptimizer (ZeRO stage 1) wraps an ordinary optimizer of the parameters that this rank updates,
and sends the results to the other ranks after each step. So the one inside is captured, each rank's state is
nobody else's, and after a restore the results are sent once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.protocol.artifacts.pieces import Piece, fair_span
from tiercheck.trainer.backends.backend import shard_of
from tiercheck.trainer.state.capture import Inventory
from tiercheck.trainer.state.live import Wrapped
from tiercheck.trainer.tensors.leaves import Entry, local_shard


class Partitions:
    """The optimizers of a script, and those that do the work."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises TypeError for one whose steps are not its own."""
        self._whole: dict[int, Any] = {}
        self.outer = list(optimizers)
        self.inner: list[Optimizer] = []
        for index, optimizer in enumerate(optimizers):
            if not _is_zero(optimizer):
                self.inner.append(optimizer)
                continue
            whole: Any = optimizer
            if getattr(whole, "_overlap_with_ddp", False):
                raise TypeError(
                    "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters inside of "
                    "backward, where no step is "
                    "complete; use overlap_with_ddp=False"
                )
            self._whole[index] = whole
            self.inner.append(whole.optim)

    @property
    def sent(self) -> list[Tensor]:
        """Parameters that some rank updates, and sends to the others."""
        return [
            parameter
            for whole in self._whole.values()
            for group in whole.param_groups
            for parameter in group["params"]
        ]

    def __contains__(self, index: int) -> bool:
        """Whether the optimizer with this number keeps its state for some parameters only."""
        return index in self._whole

    def stepped(self) -> None:
        """Tell the inner optimizers what a scheduler has changed since their last step: it knows the wrappers
        only, which pass it on when the next step begins."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.param_groups, whole.optim.param_groups)

    def loaded(self) -> None:
        """The inner optimizers were restored, and their parameters with them: tell the wrappers and the other
        ranks. A collective call."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.optim.param_groups, whole.param_groups)
            whole._sync_params()


def _is_zero(optimizer: Optimizer) -> bool:
    # By name: importing its module takes time, and without torch.distributed it does not exist.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


SMALLEST = 64 * 1024
"""Bytes; a smaller tensor is stored whole by every replica, because a share of it would cost more than it
saves."""
_BUCKET = 64 * 1024 * 1024
"""Bytes that one rank contributes to one exchange."""


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same shard. `groups`: process groups whose product they are, the outermost
    first."""

    groups: tuple[dist.ProcessGroup, ...]

    @cached_property
    def count(self) -> int:
        return math.prod(group.size() for group in self.groups)

    @cached_property
    def index(self) -> int:
        """Of this rank among them."""
        index = 0
        for group in self.groups:
            index = index * group.size() + group.rank()
        return index

    def gather(self, own: Tensor) -> Tensor:
        """What every replica contributes, as rows in their order. `own`: flat, and of the same length
        everywhere."""
        rows = own
        for group in reversed(self.groups):
            whole = rows.new_empty(group.size() * rows.numel())
            dist.all_gather_into_tensor(whole, rows, group=group)  # type: ignore[no-untyped-call,unused-ignore]
            rows = whole
        return rows.view(self.count, -1)


class Shares:
    """Which part of each tensor of a state this rank stores."""

    def __init__(self, wrapped: Wrapped, partitions: Partitions) -> None:
        self._partitions = partitions
        self.outer = partitions.outer
        """The optimizers that the script adds parameter groups to."""
        self.whole = ""
        """Why every replica saves all of a shard; empty: each saves its share."""
        self._of_name: dict[str, Replicas] = {}
        for path, module in wrapped.replicated:
            if module.process_group.size() > 1:
                replicas = Replicas((module.process_group,))
                for name, _ in module.module.named_parameters(remove_duplicate=False):
                    if name not in module.parameters_to_ignore:
                        self._of_name[path + name] = replicas
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._of_mesh: dict[tuple[object, tuple[int, ...]], Replicas] = {}
        self._alike: object | None = None
        """Of which inventories `_places` tells where their entries lie."""
        self._places: list[tuple[Piece | None, Replicas | None]] = []

    def keep_whole(self, why: str) -> None:
        """No shares from now on. Any thread may say so."""
        self.whole = self.whole or why

    def own(self, inventory: Inventory) -> list[Entry]:
        """The entries as this rank stores them: with the pieces that they are, and cut to its share."""
        if inventory.alike is None or inventory.alike is not self._alike:
            self._places, self._alike = list(map(self._place_of, inventory.entries)), inventory.alike
        return list(map(self._stored, inventory.entries, self._places))

    def describe(self, entry: Entry) -> Entry:
        """One entry, as `own` does."""
        return self._stored(entry, self._place_of(entry))

    def _place_of(self, entry: Entry) -> tuple[Piece | None, Replicas | None]:
        return self._place(entry.name, entry.tensor if entry.origin is None else entry.origin, entry.tensor)

    def _stored(self, entry: Entry, place: tuple[Piece | None, Replicas | None]) -> Entry:
        name, tensor, lazy, finite, origin, _ = entry
        piece, replicas = place
        if piece is not None and replicas is not None and not self.whole:
            span = share_of(tensor, replicas)
            if span is not None:
                tensor, piece = cut(tensor, span), Piece(piece.shape, piece.box, span)
        return Entry(name, tensor, lazy, finite, origin, piece)  # a third of the time that `_replace` takes

    def shard(self, name: str, value: Tensor) -> Piece | None:
        """What this rank has of a tensor with that name in a slot; None: it is its own affair."""
        return self._place(name, value, local_shard(value))[0]

    def replicas_of(self, name: str, value: Tensor) -> Replicas | None:
        """The ranks that hold the same as this one of a tensor with that name in a slot; None: there are
        none."""
        return self._place(name, value, local_shard(value))[1]

    def consumers_of(self, optimizer: int, name: str, parameter: Tensor) -> Replicas | None:
        """The ranks whose optimizer with this number consumes the same gradient of the parameter; None: only
        this one."""
        return None if optimizer in self._partitions else self.replicas_of(f"model/{name}", parameter)

    def _place(self, name: str, value: Tensor, shard: Tensor) -> tuple[Piece | None, Replicas | None]:
        found = shard_of(value, shard)
        if found is not None:
            mesh, dims = found.replicated
            if not dims:
                return found.piece, None
            key = (mesh, dims)
            if key not in self._of_mesh:
                self._of_mesh[key] = Replicas(tuple(mesh.get_group(dim) for dim in dims))
            return found.piece, self._of_mesh[key]
        optimizer, parameter = owner_of(name)
        replicas = self._of_name.get(parameter)
        counts = (
            optimizer >= 0 and not shard.dim()
        )  # how often a parameter was updated: the same wherever it is
        if replicas is None and not self._alone and not counts:
            return None, None
        return Piece.whole(shard.shape), None if optimizer in self._partitions else replicas


def owner_of(name: str) -> tuple[int, str]:
    """Optimizer (-1: the model itself) and parameter that a stored tensor, `model/<parameter>` or
    `optimizer<i>/<parameter>/<key>`, belongs to.

    One of a module beside the model belongs to itself: `state/<name>/<parameter>`. So does a buffer that is
    not persistent.
    """
    kind, _, rest = name.partition("/")
    if kind in ("state", "buffers"):
        return -1, name
    return (-1, rest) if kind == "model" else (int(kind.removeprefix("optimizer")), rest.rpartition("/")[0])


def share_of(shard: Tensor, replicas: Replicas) -> tuple[int, int] | None:
    """The elements that this rank stores; None: all. The same rule at every replica, whole rows where there
    are enough."""
    if shard.nbytes < SMALLEST or shard.layout is not torch.strided or not shard.is_contiguous():
        return None
    return fair_span(shard.numel(), replicas.index, replicas.count, _grain(shard, replicas.count))


def cut(shard: Tensor, span: tuple[int, int]) -> Tensor:
    """A view of these elements; as rows, if they are whole ones."""
    flat = shard.detach().view(-1)[span[0] : span[1]]
    width = shard.shape[-1] if shard.dim() > 1 else 1
    return flat.view(-1, width) if width > 1 and span[0] % width == 0 and flat.numel() % width == 0 else flat


def _grain(shard: Tensor, count: int) -> int:
    width = int(shard.shape[-1]) if shard.dim() > 1 else 1
    return width if shard.numel() // width >= count else 1


@torch.no_grad()
def exchange(wanted: Sequence[tuple[Replicas, Tensor]]) -> None:
    """Complete each tensor, of which this rank has its own share in place, with the shares of its replicas.

    A collective call: all replicas give the same tensors in the same order.
    """
    for replicas, tensors in _buckets(wanted):
        shares = [-(-_longest(tensor, replicas) * tensor.element_size() // 8) * 8 for tensor in tensors]
        place = _device(replicas, tensors[0])
        own = torch.zeros(sum(shares), dtype=torch.uint8, device=place)
        for tensor, at in zip(tensors, _starts(shares), strict=True):
            mine = _bytes(tensor, replicas, replicas.index)
            own[at : at + mine.numel()].copy_(mine)
        rows = replicas.gather(own)
        for tensor, at in zip(tensors, _starts(shares), strict=True):
            for index in range(replicas.count):
                if index != replicas.index:
                    theirs = _bytes(tensor, replicas, index)
                    theirs.copy_(rows[index, at : at + theirs.numel()])


def _buckets(wanted: Sequence[tuple[Replicas, Tensor]]) -> Iterator[tuple[Replicas, list[Tensor]]]:
    by_group: dict[Replicas, list[Tensor]] = {}
    for replicas, tensor in wanted:
        by_group.setdefault(replicas, []).append(tensor)
    for replicas, tensors in by_group.items():
        bucket: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if bucket and size + tensor.nbytes // replicas.count > _BUCKET:
                yield replicas, bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes // replicas.count
        yield replicas, bucket


def _starts(lengths: Sequence[int]) -> Iterator[int]:
    at = 0
    for length in lengths:
        yield at
        at += length


def _span(tensor: Tensor, replicas: Replicas, index: int) -> tuple[int, int]:
    return fair_span(tensor.numel(), index, replicas.count, _grain(tensor, replicas.count))


def _longest(tensor: Tensor, replicas: Replicas) -> int:
    begin, end = _span(tensor, replicas, 0)
    return end - begin


def _bytes(tensor: Tensor, replicas: Replicas, index: int) -> Tensor:
    """The bytes of one replica's share, in place."""
    begin, end = _span(tensor, replicas, index)
    flat = tensor.detach().view(-1)[begin:end]
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _device(replicas: Replicas, tensor: Tensor) -> torch.device:
    """Where the group can exchange: on the tensor's own device, or on the GPU if it is a group of GPUs."""
    devices = {device.type for group in replicas.groups for device in group._device_types}
    if tensor.device.type in devices or "cuda" not in devices:
        return tensor.device
    return torch.device("cuda", torch.cuda.current_device())
