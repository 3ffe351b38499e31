"""Reads the parts of tensors that torch.distributed.checkpoint requests, whichever ranks saved them."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tiercheck.protocol.artifacts.contents import (
    DCP,
    DCP_BYTES,
    FORMAT,
    Chunk,
    WholeTensor,
    contents,
    ranges_of,
)
from tiercheck.protocol.artifacts.pieces import Box
from tiercheck.trainer.backends.backend import Offer, RestoreError
from tiercheck.trainer.dcp.writer import LENGTHS, Note, rewrite_for_planner, step_of
from tiercheck.trainer.restore.resharding import SavedRanks, merged_ranges
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, dtype_of


class TierCheckReader(StorageReader):
    """Loads the version offered to this job, on its current ranks and mesh. A `Storage` creates it."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Raises ValueError if `checkpoint_id` names another step than the one offered."""
        if checkpoint_id is not None and step_of(checkpoint_id) != self._offer.version.step:
            raise ValueError(f"{os.fspath(checkpoint_id)!r} is not offered; {self._offer.version} is")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the version. Raises RestoreError."""
        return self._saved.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan requests. Raises RestoreError, NotCapturable."""
        self._saved.read(plan.items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False, so that torch itself never chooses this class."""
        return False

    @cached_property
    def _saved(self) -> _Saved:
        if self._offer.borrow is None:
            raise RestoreError(f"{self._offer.version} can only be read by the rank that saved it")
        if self._offer.deltas:
            raise RestoreError(f"{self._offer.version} was saved by a Checkpointer, with deltas")
        return _Saved(SavedRanks(self._offer.world_size, self._offer.borrow))


class _Saved:
    """A version in torch.distributed.checkpoint's terms. All methods raise RestoreError."""

    def __init__(self, others: SavedRanks) -> None:
        self._others = others
        try:
            self._notes = [self._note(rank) for rank in range(others.world_size)]
            beginnings = [(slot.header, slot.pieces) for slot in others.beginnings]
            names = [
                {place.name: note.fqn(place.name) for place in header.tensors}
                for (header, _), note in zip(beginnings, self._notes, strict=True)
            ]
            self._tensors = contents(beginnings, names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RestoreError(f"the version cannot be read: {error}") from error
        self._at: dict[tuple[str, tuple[int, ...]], tuple[WholeTensor, Chunk]] = {}
        for name, tensor in self._tensors.items():
            # An empty one may begin where another does.
            for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.box.count):
                self._at[name, chunk.box.offset] = tensor, chunk
        self._bytes = {
            fqn: (rank, place)
            for rank, note in reversed([*enumerate(self._notes)])
            for fqn, place in note.items.items()
        }

    def metadata(self) -> Metadata:
        found: dict[str, Any] = {
            name: self._described(name, tensor) for name, tensor in self._tensors.items()
        }
        found |= {fqn: BytesStorageMetadata() for fqn in self._bytes}
        paths = [dict(note.planner) for note in self._notes if note.planner is not None]
        return Metadata(found, planner_data=dict(ChainMap(*paths)) if paths else None)

    def read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        by_rank: dict[int, list[ReadItem]] = {}
        for item in items:
            by_rank.setdefault(self._rank(item), []).append(item)
        for rank, wanted in sorted(by_rank.items()):
            ranges = [bytes_of for item in wanted for bytes_of in self._ranges(item)]
            slot = self._others.open(rank, merged_ranges(ranges))
            for item in wanted:
                if item.type == LoadItemType.BYTE_IO:
                    ((begin, end),) = self._ranges(item)
                    fqn = item.storage_index.fqn
                    planner.load_bytes(item, rewrite_for_planner(fqn, slot.buffer[begin:end]))
                    continue
                tensor, chunk = self._chunk(item.storage_index)
                if not all(item.lengths):
                    continue
                dtype = dtype_of(tensor.dtype)
                stored = torch.frombuffer(slot.buffer, dtype=dtype, count=chunk.box.count, offset=chunk.begin)
                inside = Box(tuple(item.storage_offsets), tuple(item.lengths)).within(
                    Box.whole(chunk.box.shape)
                )
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored.view(chunk.box.shape)[inside])
                planner.commit_tensor(item, target)

    def _rank(self, item: ReadItem) -> int:
        if item.type == LoadItemType.BYTE_IO:
            return self._bytes[item.storage_index.fqn][0]
        return self._chunk(item.storage_index)[1].rank

    def _ranges(self, item: ReadItem) -> list[tuple[int, int]]:
        if item.type == LoadItemType.BYTE_IO:
            rank, (begin, end) = self._bytes[item.storage_index.fqn]
            start = self._others.place(rank, DCP_BYTES)[0]
            return [(start + begin, start + end)]
        tensor, chunk = self._chunk(item.storage_index)
        inside = tuple(a + b for a, b in zip(chunk.box.offset, item.storage_offsets, strict=True))
        return ranges_of(chunk, Box(inside, tuple(item.lengths)), tensor.itemsize)

    def _chunk(self, index: MetadataIndex) -> tuple[WholeTensor, Chunk]:
        return self._at[index.fqn, tuple(index.offset or ())]

    def _described(self, name: str, tensor: WholeTensor) -> TensorStorageMetadata:
        return TensorStorageMetadata(
            TensorProperties(
                dtype=dtype_of(tensor.dtype),
                requires_grad=any(name in note.grad for note in self._notes),
                pin_memory=any(name in note.pinned for note in self._notes),
            ),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
                for chunk in tensor.chunks
            ],
        )

    def _note(self, rank: int) -> Note:
        beginning = self._others.beginnings[rank]
        if beginning.header.metadata.get(FORMAT) != DCP:
            raise NotCapturable("it was saved by a Checkpointer, so a Checkpointer must restore it")
        slot = self._others.open(rank, [self._others.place(rank, DCP)])
        return Note.read(slot.blob(DCP, LENGTHS[DCP]))
