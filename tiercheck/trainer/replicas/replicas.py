"""Splits state that several ranks hold equally into shares, and reassembles it after a restore.

Of a shard with R replicas each one stores an equal share of its elements, so that capture, network and memory
costs fall with the data-parallel degree (REFT, arXiv 2310.12670). After a restore the replicas exchange their
shares with collectives of their process group, which is the fastest path between them.

ZeroRedundancyOptimizer (ZeRO stage 1) wraps an ordinary optimizer of the parameters that this rank updates,
and sends the results to the other ranks after each step. So the inner optimizer is captured, no other rank
has its state, and after a restore the results are sent once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.protocol.artifacts.pieces import Piece, fair_span
from tiercheck.trainer.backends.backend import shard_of
from tiercheck.trainer.state.aliasing import Wrapped
from tiercheck.trainer.state.capture import Inventory
from tiercheck.trainer.tensors.tensor_parts import Entry, NotCapturable, local_shard, parameters_of


class Partitions:
    """The optimizers of a script, and the inner optimizers of their wrappers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises TypeError for an optimizer that updates parameters outside of its own steps."""
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
                    "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters inside of backward, "
                    "where no step is complete; use overlap_with_ddp=False"
                )
            self._whole[index] = whole
            self.inner.append(whole.optim)

    @property
    def sent(self) -> list[Tensor]:
        """Returns the parameters that one rank updates and sends to the others."""
        return parameters_of(*self._whole.values())

    def __contains__(self, index: int) -> bool:
        """Returns whether the optimizer with this number has state for only some parameters."""
        return index in self._whole

    def stepped(self) -> None:
        """Copies a scheduler's changes of the wrappers since the last step to the inner optimizers.

        The wrappers themselves would copy them only when the next step begins."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.param_groups, whole.optim.param_groups)

    def loaded(self) -> None:
        """Updates the wrappers and the other ranks after the inner optimizers and parameters were restored.

        A collective call."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.optim.param_groups, whole.param_groups)
            whole._sync_params()


def _is_zero(optimizer: Optimizer) -> bool:
    # By name: importing its module takes time, and it does not exist without torch.distributed.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


SMALLEST = 64 * 1024
"""Bytes. Every replica stores smaller tensors whole, as sharing them would cost more than it saves."""
_BUCKET = 64 * 1024 * 1024
"""The most bytes that one rank contributes to one exchange."""


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same shard: the product of `groups`, the outermost process group first."""

    groups: tuple[dist.ProcessGroup, ...]

    @cached_property
    def count(self) -> int:
        return math.prod(group.size() for group in self.groups)

    @cached_property
    def index(self) -> int:
        index = 0
        for group in self.groups:
            index = index * group.size() + group.rank()
        return index

    def gather(self, own: Tensor) -> Tensor:
        """Returns all replicas' contributions as rows, in order. `own`: flat, of equal length on all."""
        rows = own
        for group in reversed(self.groups):
            whole = rows.new_empty(group.size() * rows.numel())
            dist.all_gather_into_tensor(whole, rows, group=group)  # type: ignore[no-untyped-call,unused-ignore]
            rows = whole
        return rows.view(self.count, -1)


class Shares:
    """Determines the part of each tensor of a state that this rank stores."""

    def __init__(self, wrapped: Wrapped, partitions: Partitions) -> None:
        self._partitions = partitions
        self.outer = partitions.outer
        """The optimizers to which the script adds parameter groups."""
        self.whole = ""
        """The reason why every replica saves whole shards; empty: each saves its share."""
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
        """The identity (`alike`) of the inventories for which `_places` is valid."""
        self._places: list[tuple[Piece | None, Replicas | None]] = []

    def keep_whole(self, why: str) -> None:
        """Makes this rank save whole shards from here on. May be called from any thread."""
        self.whole = self.whole or why

    def own(self, inventory: Inventory) -> list[Entry]:
        """Returns the entries as this rank stores them: with their pieces, and cut to its share."""
        if inventory.alike is None or inventory.alike is not self._alike:
            self._places, self._alike = list(map(self._place_of, inventory.entries)), inventory.alike
        return list(map(self._stored, inventory.entries, self._places))

    def _place_of(self, entry: Entry) -> tuple[Piece | None, Replicas | None]:
        return self._place(entry.name, entry.tensor if entry.origin is None else entry.origin, entry.tensor)

    def _stored(self, entry: Entry, place: tuple[Piece | None, Replicas | None]) -> Entry:
        name, tensor, lazy, finite, origin, _ = entry
        piece, replicas = place
        if piece is not None and replicas is not None and not self.whole:
            span = share_of(tensor, replicas)
            if span is not None:
                tensor, piece = cut(tensor, span), Piece(piece.shape, piece.box, span)
        return Entry(name, tensor, lazy, finite, origin, piece)  # takes a third of the time of `_replace`

    def shard(self, name: str, value: Tensor) -> Piece | None:
        """Returns this rank's piece of a tensor, by name in a slot; None: the tensor is this rank's alone."""
        return self._place(name, value, local_shard(value))[0]

    def replicas_of(self, name: str, value: Tensor) -> Replicas | None:
        """Returns the ranks with the same shard of a tensor, by name in a slot; None: no others."""
        return self._place(name, value, local_shard(value))[1]

    def consumers_of(self, named: Sequence[Sequence[tuple[str, Tensor]]]) -> list[list[Replicas | None]]:
        """Returns the ranks with the same gradient of each parameter; None: only this one.

        `named`: the parameters of each optimizer, with their names in the model."""
        return [
            [
                None if index in self._partitions else self._consumers(name, parameter)
                for name, parameter in parameters
            ]
            for index, parameters in enumerate(named)
        ]

    def _consumers(self, name: str, parameter: Tensor) -> Replicas | None:
        try:
            return self.replicas_of(f"model/{name}", parameter)
        except NotCapturable:  # it consists of other tensors, or the inventory refuses it, by its name
            return None

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
        # The number of updates of a parameter is the same on all ranks.
        counts = optimizer >= 0 and not shard.dim()
        if replicas is None and not self._alone and not counts:
            return None, None
        return Piece.whole(shard.shape), None if optimizer in self._partitions else replicas


def owner_of(name: str) -> tuple[int, str]:
    """Returns the optimizer (-1: the model itself) and the parameter to which a stored tensor belongs.

    Its name is `model/<parameter>` or `optimizer<i>/<parameter>/<key>`. A tensor of a module beside the
    model, `state/<name>/<parameter>`, belongs to itself, as does a buffer that is not persistent.
    """
    kind, _, rest = name.partition("/")
    if kind in ("state", "buffers"):
        return -1, name
    return (-1, rest) if kind == "model" else (int(kind.removeprefix("optimizer")), rest.rpartition("/")[0])


def share_of(shard: Tensor, replicas: Replicas) -> tuple[int, int] | None:
    """Returns the range of elements that this rank stores; None: all.

    All replicas use the same rule, with whole rows if there are enough."""
    if shard.nbytes < SMALLEST or shard.layout is not torch.strided or not shard.is_contiguous():
        return None
    return _span(shard, replicas, replicas.index)


def cut(shard: Tensor, span: tuple[int, int]) -> Tensor:
    """Returns a view of these elements, as rows if they are whole rows."""
    flat = shard.detach().view(-1)[span[0] : span[1]]
    width = shard.shape[-1] if shard.dim() > 1 else 1
    return flat.view(-1, width) if width > 1 and span[0] % width == 0 and flat.numel() % width == 0 else flat


def _grain(shard: Tensor, count: int) -> int:
    width = int(shard.shape[-1]) if shard.dim() > 1 else 1
    return width if shard.numel() // width >= count else 1


@torch.no_grad()
def exchange(wanted: Sequence[tuple[Replicas, Tensor]]) -> None:
    """Completes each tensor, in which this rank has its share, with the shares of the other replicas.

    A collective call: all replicas pass the same tensors in the same order.
    """
    for replicas, tensors in _buckets(wanted):
        # The first replica's share is the longest.
        longest = [_span(tensor, replicas, 0)[1] for tensor in tensors]
        shares = [-(-n * t.element_size() // 8) * 8 for n, t in zip(longest, tensors, strict=True)]
        starts = [0, *accumulate(shares[:-1])]
        place = _device(replicas, tensors[0])
        own = torch.zeros(sum(shares), dtype=torch.uint8, device=place)
        for tensor, at in zip(tensors, starts, strict=True):
            mine = _bytes(tensor, replicas, replicas.index)
            own[at : at + mine.numel()].copy_(mine)
        rows = replicas.gather(own)
        for tensor, at in zip(tensors, starts, strict=True):
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


def _span(tensor: Tensor, replicas: Replicas, index: int) -> tuple[int, int]:
    return fair_span(tensor.numel(), index, replicas.count, _grain(tensor, replicas.count))


def _bytes(tensor: Tensor, replicas: Replicas, index: int) -> Tensor:
    """Returns a view of the bytes of one replica's share."""
    begin, end = _span(tensor, replicas, index)
    flat = tensor.detach().view(-1)[begin:end]
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _device(replicas: Replicas, tensor: Tensor) -> torch.device:
    """Returns the device for the exchange: the tensor's own, or the GPU if the group supports only GPUs."""
    devices = {device.type for group in replicas.groups for device in group._device_types}
    if tensor.device.type in devices or "cuda" not in devices:
        return tensor.device
    return torch.device("cuda", torch.cuda.current_device())
