"""Clones some parameters of an optimizer, to repeat an update as a restore would.

A probe clones few parameters at a time, in turn, so that all are eventually covered. Nothing is random.

After a restore, the gradients of a delta are at the beginning of their own memory, even if they were views
of larger memory in training; so is the state. Parameters are filled in place. If a kernel's results depend on
any of this, the clones get other bits.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.deltas.encoding import decode, encode
from tiercheck.trainer.deltas.gradients import Event
from tiercheck.trainer.state.replayable import (
    is_elementwise,
    is_known,
    own_attributes,
    plain_step,
    why_not_separable,
)
from tiercheck.trainer.state.values import is_same
from tiercheck.trainer.tensors.tensor_parts import (
    PLAIN,
    NotCapturable,
    have_same_bits,
    local_shard,
    parameters_of,
)

_GRAIN = 1024
"""The number of elements of which cuts are at multiples."""


@dataclass(frozen=True)
class ProbeCandidate:
    """A parameter that may be cloned."""

    number: int
    """The parameter's index in the optimizer's order."""
    size: int
    """Bytes that clones of the parameter, its gradient and its state take."""
    elements: int = 0
    """The number of elements, if it may be cut; 0: only the whole can be cloned."""


class ProbePart(NamedTuple):
    """The cloned part of a parameter: the whole, or its elements from `begin` to before `end`."""

    number: int
    begin: int = 0
    end: int = 0

    @property
    def is_whole(self) -> bool:
        return self.end == 0


class ParameterPlace(NamedTuple):
    """The place at which a turn begins."""

    number: int = 0
    element: int = 0


def choose(
    candidates: Sequence[ProbeCandidate], start: ParameterPlace, room: int, most: int
) -> tuple[list[ProbePart], ParameterPlace]:
    """Returns at most `most` parts of at most `room` bytes, cyclically from `start`, and the next start.

    Only candidates larger than `room` are cut. Those that can neither be cut nor fit are skipped.
    `candidates` are in order.
    """
    first = next((at for at, each in enumerate(candidates) if each.number >= start.number), 0)
    order = [*candidates[first:], *candidates[:first]]
    element = start.element if order and order[0].number == start.number else 0
    parts: list[ProbePart] = []
    left = room
    for each in order:
        if len(parts) == most:
            return parts, ParameterPlace(each.number)
        if each.size <= room:
            if each.size > left:
                return parts, ParameterPlace(each.number)
            parts.append(ProbePart(each.number))
            left -= each.size
        elif each.elements:
            begin = element if element < each.elements else 0
            end = min(each.elements, begin + left * each.elements // each.size // _GRAIN * _GRAIN)
            if end > begin:
                parts.append(ProbePart(each.number, begin, end))
                left -= -(-each.size * (end - begin) // each.elements)
            if end < each.elements and (end > begin or left < room):
                return parts, ParameterPlace(each.number, end)
        element = 0
    return parts, ParameterPlace(order[0].number if order else 0)


_MOST = 256
"""The most parameters of a known class to clone at once: each takes some calls, even if small."""
_LINE = 64
"""Bytes. No kernel distinguishes alignments beyond multiples of this."""


class Cloner:
    """Clones parameters of one optimizer, in turn."""

    def __init__(self, optimizer: Optimizer, fresh: Mapping[str, Any], room: int) -> None:
        """`fresh`: attributes of the copied optimizer. `room`: bytes that may be cloned at once."""
        self._optimizer = optimizer
        self._fresh = fresh
        self._room = room
        self._start = ParameterPlace()

    @torch.no_grad()
    def clone(self, gradients: Sequence[Tensor | None] | None) -> Clones | None:
        """Clones the next parameters in turn; None if there is nothing to clone.

        `gradients`: the update's inputs; None: not known yet. Raises NotCapturable, and any exception of a
        third-party optimizer.
        """
        candidates = list(self._candidates(gradients))
        most = _MOST if is_known(self._optimizer) else len(candidates)
        parts, self._start = choose(candidates, self._start, self._room, most)
        if not parts:
            return None
        real = self._optimizer
        shadow: Optimizer = object.__new__(type(real))
        shadow.__dict__.update(real.__dict__)
        if not is_known(real):
            # A step of the copy may write to objects shared with the real one.
            for name, _ in own_attributes(real):
                del shadow.__dict__[name]
        shadow.__dict__.pop("step", None)
        shadow.__dict__.update(copy.deepcopy(dict(self._fresh)))
        shadow.state = defaultdict(dict)
        shadow.param_groups = []
        clones = Clones(shadow, [], [])
        wanted = {part.number: part for part in parts}
        number = 0
        for index, group in enumerate(real.param_groups):
            mine = [(wanted[at], p) for at, p in enumerate(group["params"], number) if at in wanted]
            number += len(group["params"])
            if mine:
                clones.groups.append((index, _settled(group)))
                shadow.param_groups.append({"params": [self._pair(part, p, clones) for part, p in mine]})
        return clones

    def _pair(self, part: ProbePart, parameter: Tensor, clones: Clones) -> Tensor:
        shard = local_shard(parameter)
        clone = nn.Parameter(_lying_as(_cut(shard, shard, part)), requires_grad=parameter.requires_grad)
        clones.optimizer.state[clone] = {
            key: _cut(value, shard, part).clone()  # in the order in memory that a restore gives it
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        clones.pairs.append(Pair(parameter, clone, part))
        return clone

    def _candidates(self, gradients: Sequence[Tensor | None] | None) -> Iterator[ProbeCandidate]:
        known, elementwise = is_known(self._optimizer), is_elementwise(self._optimizer)
        may_cut = not why_not_separable(self._optimizer)
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            gradient = None if gradients is None else gradients[number]
            if not parameter.requires_grad or (gradients is not None and gradient is None):
                continue
            if known and not elementwise and hasattr(parameter, "placements"):
                continue  # its update is a collective, which must not be begun by one rank alone
            try:
                shard = local_shard(parameter)
                values = self._optimizer.state.get(parameter, {}).values()
                state = [local_shard(value) for value in values if isinstance(value, Tensor)]
            except NotCapturable:
                if not known:
                    raise
                continue  # a wrapper: fingerprints check its parts, at the restore
            size = 2 * shard.nbytes + sum(tensor.nbytes for tensor in state)
            aligned = all(
                each.numel() == 1 or (each.shape == shard.shape and each.is_contiguous()) for each in state
            )
            cuttable = (
                may_cut and aligned and shard.is_contiguous() and (gradient is None or _is_flat(gradient))
            )
            yield ProbeCandidate(number, size, shard.numel() if cuttable else 0)


@dataclass(frozen=True)
class Pair:
    real: Tensor
    """The parameter."""
    clone: Tensor
    """The clone of its shard, or of a part of it."""
    part: ProbePart


@dataclass
class Clones:
    optimizer: Optimizer
    pairs: list[Pair]
    groups: list[tuple[int, dict[str, Any]]]
    """The index of the real group for each group of the clones, and the values that differ."""

    @torch.no_grad()
    def consume(self, event: Event) -> None:
        """Sets gradients and hyper-parameters of the clones to those of `event`, as a restore would."""
        for pair in list(self.pairs):
            gradient = event.gradients[pair.part.number]
            if gradient is not None and not pair.part.is_whole and not _is_flat(gradient):
                self.pairs.remove(pair)  # it cannot be cut
            elif gradient is not None:
                # As a restore makes it from a delta.
                encoded = encode(_cut(gradient, gradient, pair.part), sparse=False)
                restored = decode(encoded.parts.get, encoded.about, gradient.device)
                if restored is not None and restored.dtype != pair.clone.dtype:
                    pair.clone.grad_dtype = restored.dtype
                pair.clone.grad = restored
        for (index, settled), group in zip(self.groups, self.optimizer.param_groups, strict=True):
            group.update({key: _copied(value) for key, value in event.groups[index].items()} | settled)
        vars(self.optimizer).update({name: value.clone() for name, value in event.scaling.items()})

    def step(self) -> None:
        plain_step(self.optimizer)()

    def differ(self, real: Optimizer) -> bool:
        """Returns whether the real parameters or their state have other bits."""
        for pair in self.pairs:
            shard = local_shard(pair.real)
            state = {
                key: _cut(value, shard, pair.part) for key, value in real.state.get(pair.real, {}).items()
            }
            if not have_same_bits(_cut(shard, shard, pair.part), pair.clone):
                return True
            if not is_same(state, dict(self.optimizer.state.get(pair.clone, {}))):
                return True
        return False


def _settled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `foreach` setting that torch would choose for all parameters of a group.

    torch uses the loop over single tensors if any of them requires it, but only some are cloned."""
    kinds = {(type(parameter) in PLAIN, parameter.device.type) for parameter in group["params"]}
    open_ = "foreach" in group and group["foreach"] is None
    return {"foreach": False} if open_ and (len(kinds) > 1 or not all(plain for plain, _ in kinds)) else {}


def _cut(value: Any, shard: Tensor, part: ProbePart) -> Any:
    """Returns the part of a tensor with the shape of `shard`; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    plain = value if value.layout is not torch.strided else local_shard(value)
    if part.is_whole or plain.shape != shard.shape:
        return plain
    return plain.view(-1)[part.begin : part.end]


def _is_flat(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.is_contiguous()


def _lying_as(shard: Tensor) -> Tensor:
    """Returns a copy with the original's offset from a multiple of `_LINE` bytes."""
    if shard.data_ptr() % _LINE == 0 or not shard.is_contiguous():
        return shard.clone()
    room = torch.empty(shard.nbytes + _LINE, dtype=torch.uint8, device=shard.device)
    skip = (shard.data_ptr() - room.data_ptr()) % _LINE
    return room[skip : skip + shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)


def _copied(value: Any) -> Any:
    return local_shard(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)
