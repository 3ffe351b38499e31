"""Checks that replicas are equal, because a restore would mix unequal shares into a state no rank had.

At each snapshot every replica samples its state, a few hundred elements of each tensor, different ones each
time, and writes the checksums to the process group's store. Then it reads those of its two neighbours in the
ring of replicas. The later of two neighbours sees both checksums, so without any waiting no version of
unequal replicas is completed. From then on each replica saves its whole state, and no deltas are taken. The
checksums are in the slot too, and a restore compares them again.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiercheck.protocol.plain_json import parse_json
from tiercheck.trainer.backends.backend import Skipped, is_distributed, log
from tiercheck.trainer.replicas.replicas import Shares, share_of
from tiercheck.trainer.tensors.samples import content
from tiercheck.trainer.tensors.tensor_parts import Entry, local_shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

REPLICAS = "replicas"
"""The key of a slot's metadata with the form of storage (shares or whole shards) and checksums.

There is one checksum of the samples for each ring of replicas."""
_SHARES, _WHOLE = "shares", "whole"
_TENSORS = 64
"""The most tensors of a ring sampled at one snapshot; more are sampled in turn."""
_RUNS, _LENGTH = 16, 32
"""The number and length, in elements, of the runs sampled of a tensor."""
_REMEMBERED = 8
"""The number of snapshots with sums in the store, by which one replica may be ahead of another."""
_RINGS = 16
"""The most rings in the metadata of a slot, where there is little room."""


@dataclass(frozen=True)
class _Ring:
    """Ranks that hold the same part of some tensors, including this rank, in the process group's order."""

    name: str
    ranks: tuple[int, ...]

    def neighbours(self, rank: int) -> set[int]:
        at = self.ranks.index(rank)
        return {self.ranks[at - 1], self.ranks[(at + 1) % len(self.ranks)]} - {rank}


@dataclass(frozen=True)
class ReplicaSamples:
    """The samples of one snapshot."""

    step: int
    whole: bool
    samples: dict[str, dict[str, Tensor | None]] = field(default_factory=dict)
    """The samples of tensors by ring and name; None if a tensor could not be sampled."""

    @cached_property
    def sums(self) -> dict[str, dict[str, int | None]]:
        """Returns the checksums of the samples. Waits for the device."""
        return {
            ring: dict(zip(seen, _sums(list(seen.values())), strict=True))
            for ring, seen in self.samples.items()
        }

    def written(self) -> str:
        parts = [_WHOLE if self.whole else _SHARES]
        for ring, sums in sorted(self.sums.items())[:_RINGS]:
            if None not in sums.values():
                parts.append(
                    f"{ring}:{hashlib.blake2b(repr(list(sums.values())).encode(), digest_size=8).hexdigest()}"
                )
        return " ".join(parts)


class Equality:
    """Compares one Checkpointer's replicas. The saver thread calls `look` and `judge`."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._rank = dist.get_rank() if is_distributed() else 0
        self._store, self._prefix = _store(), ""
        if self._store is not None:
            # Checkpointers of one process must not read each other's sums; all ranks create them in the same
            # order.
            try:
                number = self._store.add(f"tiercheck/checkpointers/{self._rank}", 1)
                self._prefix = f"tiercheck/replicas/{number}"
            except RuntimeError:
                self._store = None  # the store of a group without connections
        self._rings: dict[str, _Ring] = {}
        self._of_tensor: dict[str, tuple[_Ring, ...]] = {}
        self._records: dict[str, deque[Any]] = {}

    def look(self, step: int, entries: Sequence[Entry]) -> ReplicaSamples:
        """Samples the state, which must not change meanwhile."""
        by_ring: dict[str, list[Entry]] = {}
        whole = not any(entry.piece is not None and entry.piece.span is not None for entry in entries)
        if self._store is None:
            return ReplicaSamples(step, whole)
        for entry in entries:
            for ring in self._rings_of(entry):
                by_ring.setdefault(ring.name, []).append(entry)
        samples: dict[str, dict[str, Tensor | None]] = {}
        for name, held in by_ring.items():
            every = -(-len(held) // _TENSORS)
            samples[name] = {
                entry.name: _sample(local_shard(entry.origin), step)
                if entry.origin is not None and entry.lazy
                else None
                for entry in held[step % every :: every]
            }
        return ReplicaSamples(step, whole, samples)

    def judge(self, looked: ReplicaSamples) -> None:
        """Compares with the neighbours. Raises Skipped if the snapshot must not be completed."""
        if self._store is None or not looked.samples:
            return
        try:
            found = self._compare(looked, self._store)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            # The process with the store may be gone.
            log.debug("replicas cannot be compared: %r", error)
            return
        if found:
            raise Skipped("ReplicasDiffer", found)

    def _compare(self, looked: ReplicaSamples, store: Store) -> str:
        """Returns the reason why the snapshot must not be completed; empty if there is none."""
        for name, sums in looked.sums.items():
            records = self._records.setdefault(name, deque(maxlen=_REMEMBERED))
            records.append([looked.step, looked.whole, list(sums.values())])
            store.set(self._key(name, self._rank), json.dumps(list(records)))
        differ = f"{self._prefix}/differ"
        if store.check([differ]):
            self._shares.keep_whole(store.get(differ).decode())
            if not looked.whole:
                return self._shares.whole
        for name, sums in looked.sums.items():
            for other in sorted(self._rings[name].neighbours(self._rank)):
                theirs = self._record(store, self._key(name, other), looked.step)
                if theirs is None:
                    continue
                if theirs[1] != looked.whole:
                    return f"rank {other} does not save in the same way yet"
                unequal = [
                    t
                    for (t, own), its in zip(sums.items(), theirs[2], strict=True)
                    if None not in (own, its) and own != its
                ]
                if unequal and not looked.whole:
                    message = _message(self._rank, other, unequal)
                    store.set(differ, message)
                    self._shares.keep_whole(message)
                    return message
        return ""

    def _record(self, store: Store, key: str, step: int) -> list[Any] | None:
        if not store.check([key]):  # a get would wait for a missing key
            return None
        records: list[list[Any]] = parse_json(store.get(key))
        return next((record for record in reversed(records) if record[0] == step), None)

    def _key(self, ring: str, rank: int) -> str:
        return f"{self._prefix}/{ring}/{rank}"

    def _rings_of(self, entry: Entry) -> tuple[_Ring, ...]:
        known = self._of_tensor.get(entry.name)
        if known is not None or entry.origin is None:
            return known or ()
        replicas = self._shares.replicas_of(entry.name, entry.origin)
        rings: tuple[_Ring, ...] = ()
        if replicas is not None and share_of(local_shard(entry.origin), replicas) is not None:
            rings = tuple(_ring(group) for group in replicas.groups if group.size() > 1)
            self._rings.update((ring.name, ring) for ring in rings)
        self._of_tensor[entry.name] = rings
        return rings


def are_unequal(written: Iterable[str]) -> bool:
    """Returns whether a version's slots, given by their REPLICAS values, are of unequal replicas."""
    known: dict[str, str] = {}
    return any(known.setdefault(ring, found) != found for text in written for ring, found in _rings_in(text))


def were_saved_as_shares(written: str) -> bool:
    return written.startswith(_SHARES)


def were_saved_whole(written: str) -> bool:
    """Returns whether each of several replicas saved its whole state, because they differed."""
    return written.startswith(_WHOLE) and bool(_rings_in(written))


def _rings_in(written: str) -> list[tuple[str, str]]:
    return [(ring, found) for ring, _, found in (part.partition(":") for part in written.split()[1:])]


def _message(rank: int, other: int, names: Sequence[str]) -> str:
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"ranks {rank} and {other} should hold the same bits and do not: {some}. Each of them saves all that "
        "it has from now on, and takes no deltas"
    )


def _store() -> Store | None:
    """Returns the process group's store; None: there is none, or no other rank."""
    if not is_distributed() or dist.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d

    give = getattr(distributed_c10d, "_get_default_store", None)  # there is no public function for it
    try:
        store: Store | None = None if give is None else give()
    except (RuntimeError, ValueError):  # a backend without one (MPI)
        return None
    return store


def _ring(group: dist.ProcessGroup) -> _Ring:
    ranks = tuple(dist.get_process_group_ranks(group))
    return _Ring(hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest(), ranks)


def _sums(samples: Sequence[Tensor | None]) -> list[int | None]:
    seen = [sample for sample in samples if sample is not None]
    if len({sample.device for sample in seen}) == 1:
        # One transfer.
        seen = list(torch.cat(seen).cpu().split_with_sizes([sample.numel() for sample in seen]))
    there = iter(seen)
    return [None if sample is None else zlib.crc32(content(next(there))) for sample in samples]


@torch.no_grad()
def _sample(tensor: Tensor, step: int) -> Tensor:
    """Returns a copy of the bytes of some elements, in runs, which memory delivers together.

    Needs at least `share_of`'s smallest tensor."""
    flat = tensor.detach().view(-1)
    wide = flat.numel() // _RUNS
    begin = step * 0x9E3779B1 % (wide - _LENGTH + 1)
    return flat[: _RUNS * wide].view(_RUNS, wide)[:, begin : begin + _LENGTH].reshape(-1).view(torch.uint8)
