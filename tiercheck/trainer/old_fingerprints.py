"""Whether a replay on another mesh gave what the old ranks had: their fingerprints, put together from what all ranks have now.

A fingerprint (`state_hash.py`) is a sum over the words of a shard, so each rank adds up what it now has of an old shard, at the place where
that lay, and the sums of all ranks together must be the old fingerprint. Kernels of CPUs round differently at the edges of
what they are given (their vectors end elsewhere), so that this is not a formality.

Of old ranks that held the same, one is checked. All fingerprints of a step go into one sum, each times a number of its own: three
numbers per step and rank are exchanged, however many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tiercheck.protocol.pieces import Box, Piece
from tiercheck.trainer import state_hash
from tiercheck.trainer.dtypes import dtype_of
from tiercheck.trainer.leaves import local_shard
from tiercheck.trainer.resharding import Here, OtherRanks

Sums = tuple[int, int, int]
"""Columns, rows and bytes, of 64 bits each."""
_MASK = 2**64 - 1


@dataclass(frozen=True)
class _Tensor:
    """One tensor of an old rank's state, as its fingerprints went over it."""

    optimizer: int
    name: str
    key: str
    """Empty: the parameter itself."""
    piece: Piece
    owner: Piece
    """That of its parameter."""
    dtype: torch.dtype
    device: str
    lost: bool
    """A rank's own affair that no rank has any more."""

    @property
    def nbytes(self) -> int:
        return self.piece.box.count * self.dtype.itemsize


class OldFingerprints:
    """Of one restore. `sources`: the old ranks that had anything of what this rank has now."""

    def __init__(self, here: Here, others: OtherRanks, sources: Sequence[int]) -> None:
        self._parameters = [dict(each) for each in here.named]
        self._now, self._others = here, others
        checked = _different(others)
        self._here = [number for number in checked if number in set(sources)]
        self.told = [number for number in checked if number % here.world_size == here.rank]
        """The old ranks whose fingerprints this rank has to look up."""
        self.sums: list[Sums] = []
        """For each step, what this rank has less what it looked up: of all ranks together nothing may be left."""
        self._lists = {number: self._list(number) for number in {*self._here, *self.told}}

    def add(self, step: int, hashes: Mapping[int, Sequence[str]]) -> None:
        """The state after `step` is there. `hashes`: of the old ranks in `told`. Raises ValueError if they are of something else."""
        total = (0, 0, 0)
        for number in self._here:
            for place, tensors in enumerate(self._turn(number, step)):
                if not any(each.lost for each in tensors):
                    total = _plus(total, self._part(number, tensors), _weight(step, number, place))
        for number in self.told:
            turn = list(self._turn(number, step))
            if len(turn) != len(hashes[number]):
                raise ValueError(
                    f"rank {number} had {len(hashes[number])} fingerprints at step {step}, not {len(turn)}"
                )
            for place, (tensors, text) in enumerate(zip(turn, hashes[number], strict=True)):
                if not any(each.lost for each in tensors):
                    size = sum(each.nbytes for each in tensors)
                    columns, rows = int(text[:16], 16), int(text[16:], 16)
                    known = (columns, rows - state_hash.constant(size), size)
                    total = _plus(total, known, -_weight(step, number, place))
        self.sums.append(total)

    def _turn(self, number: int, step: int) -> Iterator[list[_Tensor]]:
        """What each fingerprint went over, as in `state_hash.fingerprints`."""
        tensors = self._lists[number]
        every = state_hash.turns(len(tensors), sum(each.nbytes for each in tensors))
        chosen = tensors[step % every :: every]
        small: dict[str, list[_Tensor]] = {}
        for each in chosen:
            if each.nbytes < state_hash.SMALL:
                small.setdefault(each.device, []).append(each)
        yield from small.values()
        yield from ([each] for each in chosen if each.nbytes >= state_hash.SMALL)

    def _list(self, number: int) -> list[_Tensor]:
        """The state of an old rank, in the order of `state_hash`. Raises KeyError if the snapshot lacks some of it."""
        slot, facts = self._others.beginnings[number], self._others.facts(number)
        pieces, stored = slot.pieces(), {each.name: each for each in slot.header.tensors}
        found = []
        for index, saved in enumerate(facts["optimizers"]):
            device = next((p.device.type for p in self._parameters[index].values()), "cpu")
            for name, state in saved["states"].items():
                owner = pieces.get(f"model/{name}") or Piece.whole(stored[f"model/{name}"].shape)
                private = self._others.private.get(f"model/{name}", [])
                lost = number in private and len(private) > 1 and number >= self._now.world_size
                keys = [("", f"model/{name}", device)]
                keys += [
                    (key, f"optimizer{index}/{name}/{key}", state[key]["device"])
                    for key in sorted(state)
                    if "value" not in state[key]
                ]
                for key, entry, place in keys:
                    piece = pieces.get(entry) or Piece.whole(stored[entry].shape)
                    dtype = dtype_of(stored[entry].dtype)
                    found.append(_Tensor(index, name, key, piece, owner, dtype, place, lost))
        return found

    def _part(self, number: int, tensors: Sequence[_Tensor]) -> Sums:
        """What this rank has of them, at its place in what one fingerprint went over."""
        found = [(each, self._held(number, each)) for each in tensors]
        device = next((held[0].device for _, held in found if held is not None), None)
        if device is None:
            return 0, 0, 0
        shards, size = [], 0
        for each, held in found:
            shard = torch.zeros(each.piece.box.shape, dtype=each.dtype, device=device)
            if held is not None:
                local, there, here = held
                shard[there].copy_(local[here])
                size += shard[there].nbytes
            shards.append(shard.view(-1).view(torch.uint8) if shard.numel() else shard.new_empty(0, dtype=torch.uint8))
        flat = torch.cat(shards) if len(shards) > 1 else shards[0]
        columns, rows = state_hash.words(flat)
        return columns, rows - state_hash.constant(flat.numel()), size

    def _held(self, number: int, each: _Tensor) -> tuple[Tensor, tuple[slice, ...], tuple[slice, ...]] | None:
        """What this rank answers for of it: its own tensor, and which indices of the old shard are which of that."""
        parameter = self._parameters[each.optimizer].get(each.name)
        if parameter is None:
            return None
        stored = f"model/{each.name}"
        replicas = self._now.shares.consumers_of(each.optimizer, each.name, parameter)
        if replicas is not None and replicas.index != 0:
            return None
        private = self._others.private.get(stored, [])
        if number in private and len(private) > 1 and number != self._now.rank:
            return None
        box = self._now.box(stored, parameter)
        value = parameter if not each.key else self._now.optimizers[each.optimizer].state[parameter][each.key]
        local = local_shard(value)
        if each.piece.shape == each.owner.shape:
            common = box.cut(each.piece.box)
            return None if common is None else (local, common.within(each.piece.box), common.within(box))
        # Of the parameter as a whole, such as a count of steps: whoever has the old shard's first element answers for it.
        first = tuple(min(i, n - 1) for i, n in zip(each.owner.box.offset, each.owner.shape, strict=True))
        if not all(o <= i < o + n for i, o, n in zip(first, box.offset, box.shape, strict=True)):
            return None
        everything = tuple(slice(0, extent) for extent in each.piece.box.shape)
        return local, everything, everything


def first_difference(steps: Sequence[int], said: Sequence[Sequence[Sums]]) -> str:
    """A sentence; empty if the state was right after each of `steps`. `said`: the `sums` of every rank."""
    for number, step in enumerate(steps):
        columns, rows, size = (sum(each[number][place] for each in said) & _MASK for place in range(3))
        if size:
            return f"the state of step {step} cannot be checked, because some of it is nowhere, or at several ranks"
        if columns or rows:
            return f"replaying step {step} on these ranks did not give the bits that it was taken from"
    return ""


def _different(others: OtherRanks) -> list[int]:
    """Old ranks that together had everything: those that had nothing that an earlier one did not have are left out."""
    known: set[tuple[str, Box | int]] = set()
    chosen = []
    for number, slot in enumerate(others.beginnings):
        pieces = slot.pieces()
        held: set[tuple[str, Box | int]] = {(name, piece.box) for name, piece in pieces.items()}
        for name in slot.tensors():
            if name not in pieces and (name.startswith("optimizer") or others.private[name] == [number]):
                held.add((name, number))
        if held - known:
            chosen.append(number)
            known |= held
    return chosen


@cache
def _weight(step: int, number: int, place: int) -> int:
    digest = hashlib.blake2b(f"{step}/{number}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def _plus(total: Sums, more: Sums, times: int) -> Sums:
    columns, rows, size = ((one + other * times) & _MASK for one, other in zip(total, more, strict=True))
    return columns, rows, size
