"""Writes what torch.distributed.checkpoint plans into the rank's slot, with one copy of the tensors.

A note has what DCP needs of a slot beside its tensors: JSON and checked bytes, never a pickle.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tiercheck.protocol.artifacts.contents import DCP, DCP_BYTES, DCP_PREFIX, FORMAT
from tiercheck.protocol.artifacts.pieces import Box, Piece, pieces_table
from tiercheck.protocol.artifacts.slot import PIECES, SlotLayout
from tiercheck.protocol.plain_json import parse_json
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import Backend
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.state.readable import check_readable, read_plain, write_plain
from tiercheck.trainer.state.slot_file import OpenSlots, bytes_into
from tiercheck.trainer.state.user_state import capacity_for
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, dtype_name

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Note:
    """The facts beside tensors that DCP needs of one rank's slot."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The tensor of each entry not named `dcp/<tensor>`: a rank may hold several chunks of one tensor."""
    grad: frozenset[str] = frozenset()
    """The names of tensors that require a gradient."""
    pinned: frozenset[str] = frozenset()
    """The names of tensors that were page-locked."""
    items: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The places in entry `dcp_bytes` of the items that are no tensors."""
    planner: Mapping[str, Path] | None = None
    """The default planner's data: where each name was in the nested state."""

    def fqn(self, entry: str) -> str:
        """Returns the tensor's name in the state."""
        return self.names.get(entry, entry.removeprefix(DCP_PREFIX))

    def written(self) -> bytes:
        return json.dumps(
            {
                "names": dict(self.names),
                "grad": sorted(self.grad),
                "pinned": sorted(self.pinned),
                "bytes": {fqn: list(place) for fqn, place in self.items.items()},
                "planner": None
                if self.planner is None
                else [[fqn, list(path)] for fqn, path in self.planner.items()],
            },
            separators=(",", ":"),
        ).encode()

    @staticmethod
    def read(text: bytes) -> Note:
        """Reads a note. Raises ValueError, KeyError, TypeError or AttributeError if it is none."""
        raw = parse_json(text)
        planner = raw["planner"]
        return Note(
            {str(entry): str(fqn) for entry, fqn in raw["names"].items()},
            frozenset(raw["grad"]),
            frozenset(raw["pinned"]),
            {str(fqn): (int(place[0]), int(place[1])) for fqn, place in raw["bytes"].items()},
            None if planner is None else {str(fqn): tuple(path) for fqn, path in planner},
        )


LENGTHS = {DCP: "dcp_length", DCP_BYTES: "dcp_bytes_length"}
"""The metadata keys of the number of bytes used in these entries."""


def planner_paths(data: Any) -> dict[str, Path] | None:
    """Returns a plan's `planner_data` if torch's own planner could have made it. Raises NotCapturable."""
    if data is None:
        return None
    plain = isinstance(data, Mapping) and all(
        isinstance(fqn, str)
        and isinstance(path, (tuple, list))
        and all(type(part) in (str, int) for part in path)
        for fqn, path in data.items()
    )
    if not plain:
        raise NotCapturable(
            "the planner's own data is not names and paths, so it could only be stored as a pickle"
        )
    return {fqn: tuple(path) for fqn, path in data.items()}


def readable(fqn: str, content: bytes, value: Callable[[], Any] | None) -> bytes:
    """Returns `content` if reading it runs no code, else `value` rewritten for that. Raises NotCapturable."""
    try:
        read_plain(content, fqn)
    except NotCapturable:
        if value is None:
            raise
        check_readable(found := value(), fqn)
        return write_plain(found, fqn)
    return content


def rewrite_for_planner(fqn: str, content: bytes) -> io.BytesIO:
    """Writes a value anew for a planner, which unpickles without any check. Raises NotCapturable.

    What was stored never reaches that unpickler itself.
    """
    buffer = io.BytesIO()
    torch.save(read_plain(content, fqn), buffer)
    buffer.seek(0)
    return buffer


_FORMAT_VERSION = "1.0.0"
"""The version of torch's metadata (`CURRENT_DCP_VERSION`)."""


@dataclass
class Slots:
    """A rank's access to its slots, for all writers of its `Storage`. Pickled only with a folder."""

    backend: Backend
    rank: int
    world_size: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    """The lock held while the backend is called: saves run in threads of torch."""
    mapped: OpenSlots = field(default_factory=OpenSlots)
    room: dict[str, int] = field(default_factory=dict)
    """Bytes kept for each entry of varying length, so that the layout stays the same from save to save."""

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self.backend, FolderBackend):
            raise TypeError(
                "AsyncCheckpointerType.PROCESS is for folders only: in a cluster the sidecar is that other "
                "process already; use AsyncCheckpointerType.THREAD"
            )
        return {"backend": self.backend, "rank": self.rank, "world_size": self.world_size, "room": self.room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def capacity(self, entry: str, length: int) -> int:
        self.room[entry] = capacity_for(length, self.room.get(entry, 0))
        return self.room[entry]


class TierCheckWriter(StorageWriter):
    """Saves one version, the state after a step. A `Storage` creates it.

    A writer may be used again when its save is over. The step is given at creation, or as the number at the
    end of `checkpoint_id` ("checkpoints/step-50").
    """

    def __init__(self, slots: Slots, step: int | None = None) -> None:
        self._slots, self._step = slots, step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the step from the end of `checkpoint_id`, if there is one. Raises ValueError."""
        if checkpoint_id is None:
            return
        step = step_of(checkpoint_id)
        self._step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError if the step was not given."""
        if self._step is None or self._step < 1:
            raise ValueError(
                "which step is this the state of? Use storage.writer(step), or a checkpoint_id that ends "
                "in its number"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        backend = self._slots.backend
        if isinstance(backend, FolderBackend) and self._step is not None:
            # Before any rank writes: files of a failed save must not be mixed with those of this one.
            backend.withdraw(self._step)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises ValueError unless every rank of the job takes part: a version is that of all."""
        if len(plans) != self._slots.world_size:
            raise ValueError(
                f"{len(plans)} ranks save, the job has {self._slots.world_size}: all must take part in "
                "one save"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of the plan.

        Raises NotCapturable if one can only be stored as a pickle that might run code, Skipped if there is no
        slot.
        """
        assert self._step is not None
        results: Future[list[WriteResult]] = Future()
        results.set_result(_Save(self._slots, self._step, plan, planner).run())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Completes torch's metadata. A version is complete once all ranks have their slots."""
        metadata.version = _FORMAT_VERSION
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False, so that torch itself never chooses this class."""
        return False


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Returns the number at its end. Raises ValueError."""
    match = re.search(r"(\d+)/*$", os.fspath(checkpoint_id))
    if match is None:
        raise ValueError(f"{os.fspath(checkpoint_id)!r} does not end in the number of a step")
    return int(match[1])


class _Save:
    """One rank's part of one save."""

    def __init__(self, slots: Slots, step: int, plan: SavePlan, planner: SavePlanner) -> None:
        self._slots, self._step, self._planner = slots, step, planner
        self._tensors: dict[str, WriteItem] = {}
        self._pieces: dict[str, Piece] = {}
        names: dict[str, str] = {}
        places: dict[str, tuple[int, int]] = {}
        content = bytearray()
        for item in plan.items:
            fqn = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                # Resolved now, not when the slot is there: its size depends on them. They are small.
                written = planner.resolve_data(item)
                assert not isinstance(written, torch.Tensor)
                look_up = getattr(planner, "lookup_object", None)  # a custom planner may have none
                found = readable(fqn, written.getvalue(), look_up and partial(look_up, item.index))
                places[fqn] = (len(content), len(content) + len(found))
                content += found
                continue
            entry = DCP_PREFIX + fqn
            while entry in self._tensors:
                entry += "+"
            if entry != DCP_PREFIX + fqn:
                names[entry] = fqn
            data = item.tensor_data
            assert data is not None
            if data.properties.layout is not torch.strided:
                raise NotCapturable(f"{fqn} is {data.properties.layout}; only dense tensors can be stored")
            self._tensors[entry] = item
            self._pieces[entry] = Piece(
                tuple(data.size), Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            )
        self._content = bytes(content)
        self._note = Note(
            names,
            self._having("requires_grad"),
            self._having("pin_memory"),
            places,
            planner_paths(plan.planner_data),
        ).written()

    def run(self) -> list[WriteResult]:
        slots, table = self._slots, pieces_table(self._pieces)
        blobs = {DCP: self._note, DCP_BYTES: self._content}
        room = {entry: slots.capacity(entry, len(blob)) for entry, blob in blobs.items()}
        layout = SlotLayout.plan(
            [
                (PIECES, "U8", (len(table),), len(table)),
                *((entry, "U8", (size,), size) for entry, size in room.items()),
                *(self._declared(entry, item) for entry, item in self._tensors.items()),
            ]
        )
        with slots.lock:
            path = slots.backend.begin(self._step, layout.size, Kind.SNAPSHOT)
        try:
            with slots.lock:
                slot = slots.mapped.open(path)
            views = slot.begin(layout)
            for entry, item in self._tensors.items():
                tensor = self._planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                if tensor.is_cuda:
                    slot.pin()
                views[entry].copy_(tensor.detach())
            bytes_into(views[PIECES], table)
            for entry, blob in blobs.items():
                bytes_into(views[entry], blob)
            about = {FORMAT: DCP, **{LENGTHS[entry]: str(len(blob)) for entry, blob in blobs.items()}}
            version = Version(self._step, slots.backend.attempt)
            slot.finish(layout, slots.rank, version, slots.world_size, about)
        except BaseException:
            with slots.lock:
                slots.backend.abandon(path, self._step, Kind.SNAPSHOT)
            raise
        with slots.lock:
            slots.backend.complete(path, self._step, layout.size, Kind.SNAPSHOT)
        sizes = {entry: self._declared(entry, item)[3] for entry, item in self._tensors.items()}
        return [
            WriteResult(self._tensors[entry].index, size, slots.rank) for entry, size in sizes.items()
        ] + [
            WriteResult(MetadataIndex(fqn), end - begin, slots.rank)
            for fqn, (begin, end) in Note.read(self._note).items.items()
        ]

    def _declared(self, entry: str, item: WriteItem) -> tuple[str, str, tuple[int, ...], int]:
        assert item.tensor_data is not None
        dtype, sizes = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
        return entry, dtype_name(dtype), sizes, self._pieces[entry].count * dtype.itemsize

    def _having(self, flag: str) -> frozenset[str]:
        return frozenset(
            item.index.fqn
            for item in self._tensors.values()
            if item.tensor_data is not None and getattr(item.tensor_data.properties, flag)
        )


class StagingWriter(TierCheckWriter, BlockingAsyncStager):
    """Copies the state itself, because `dcp.async_save` of torch 2.6 does not copy tensors on CPUs.

    Training changes these in place, such as the step counts of AdamW.
    """

    NEEDED = not hasattr(state_dict_saver, "_copy_state_dict")
    cache_staged_state_dict = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged = _state_dict_utils._create_cpu_state_dict(state_dict)
        return _state_dict_utils._copy_state_dict(state_dict, staged)
