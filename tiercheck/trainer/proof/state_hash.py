"""Computes cheap fingerprints of the state, to check during a replay that it gives the right state.

A fingerprint is two sums over a tensor's bits as 64-bit words: columns and rows of a matrix of words, each
weighted by odd constants and added modulo 2^64. It is the same on every device, costs two reads at memory
speed, and any difference in one word changes it. It detects differing arithmetic, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.tensors.tensor_parts import is_wrapper, local_shard, parameters_of, parts

MOST = 8
"""The largest k, where a delta has the fingerprints of every k-th tensor, in turn."""
_AT_ONCE = 64 * 1024 * 1024, 64
"""The bytes and the number of tensors that are cheap enough for every delta."""

Place = tuple[int, int, str]
"""The optimizer, the parameter's number, and the key of its state ("" is the parameter itself)."""

_COLUMNS = 1024
SMALL = 64 * 1024
"""Bytes. Smaller tensors share one fingerprint, because the calls per tensor would dominate."""
_ODD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number


def state_of_turn(optimizers: Sequence[Optimizer], step: int) -> list[tuple[Place, Tensor]]:
    """Returns the shards to check after `step`, in turn."""
    state = list(_state(optimizers))
    every = turns(len(state), sum(tensor.nbytes for _, tensor in state))
    return [(place, local_shard(tensor)) for place, tensor in state[step % every :: every]]


def whole_state(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [local_shard(tensor) for _, tensor in _state(optimizers)]


def turns(tensors: int, size: int) -> int:
    """Returns the k for a state of this many tensors and bytes. 1 for small ones: every delta checks all."""
    return min(MOST, max(1, -(-size // _AT_ONCE[0]), -(-tensors // _AT_ONCE[1])))


def _state(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Place, Tensor]]:
    for index, optimizer in enumerate(optimizers):
        for number, parameter in enumerate(parameters_of(optimizer)):
            yield from _leaves((index, number, ""), parameter)
            state = optimizer.state.get(parameter)
            for key, value in sorted(state.items()) if state else ():
                if isinstance(value, Tensor):
                    yield from _leaves((index, number, key), value)


def _leaves(place: Place, value: Tensor) -> Iterator[tuple[Place, Tensor]]:
    if not is_wrapper(value):
        yield place, value
        return
    index, number, key = place
    for path, leaf in parts(value):
        yield (index, number, f"{key}{path}"), leaf


@dataclass(frozen=True)
class Folded:
    """Fingerprints that devices are still computing.

    `by_device`: for each device, two words for each of some tensors, and the tensors' numbers."""

    by_device: Sequence[tuple[Tensor, Sequence[int]]]

    def texts(self) -> list[str]:
        """Returns the fingerprints in hex. Waits for the devices."""
        found = [""] * sum(len(numbers) for _, numbers in self.by_device)
        for values, numbers in self.by_device:  # one transfer for each device
            for number, (columns, rows) in zip(numbers, values.tolist(), strict=True):
                found[number] = f"{columns % 2**64:016x}{rows % 2**64:016x}"
        return found


def fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """Returns one for all small tensors of each device, by first appearance, then one per large tensor."""
    return fold(tensors).texts()


@torch.no_grad()
def fold(tensors: Sequence[Tensor]) -> Folded:
    """Computes `fingerprints` without waiting for the devices."""
    small: dict[torch.device, list[Tensor]] = {}
    large: list[Tensor] = []
    for tensor in tensors:
        if tensor.nbytes < SMALL:
            small.setdefault(tensor.device, []).append(_bytes(tensor))
        else:
            large.append(_bytes(tensor))
    sums = [_fold(torch.cat(parts)) for parts in small.values()] + [_fold(flat) for flat in large]
    by_device: dict[torch.device, list[int]] = {}
    for number, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(number)
    return Folded(
        [(torch.stack([sums[number] for number in numbers]), numbers) for numbers in by_device.values()]
    )


def first_difference(
    places: Sequence[Place], tensors: Sequence[Tensor], wanted: Sequence[str]
) -> Place | str:
    """Returns where the state differs from `wanted`, earlier `fingerprints` of it; empty if nowhere."""
    found = fingerprints(tensors)
    if found == list(wanted):
        return ""
    if len(found) != len(wanted):
        return "the number of tensors"
    large = [place for place, tensor in zip(places, tensors, strict=True) if tensor.nbytes >= SMALL]
    number = next(
        number for number, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other
    )
    first_large = len(found) - len(large)
    return large[number - first_large] if number >= first_large else "a small tensor"


def _bytes(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _fold(flat: Tensor) -> Tensor:
    """Returns the two words of the fingerprint of these bytes."""
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    words = flat.view(torch.int64)
    rows = words.numel() // _COLUMNS
    body = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    rest = words[rows * _COLUMNS :]
    columns, many = _weights(_COLUMNS, flat.device), _weights(max(rows, 1), flat.device)
    tail = (rest * columns[: rest.numel()]).sum()
    length = -(-flat.numel() // 8) * 8 * _ODD % 2**63
    by_column = (body.sum(0) * columns).sum() + tail
    by_row = (body.sum(1) * many[:rows]).sum() + 3 * tail + length
    return torch.stack([by_column, by_row])


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """Returns well-mixed odd weights; torch's integers wrap."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD
    return (mixed ^ (mixed >> 29)) * 2 + 1
