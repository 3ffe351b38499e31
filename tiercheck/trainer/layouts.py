"""A snapshot's layout rarely changes from one to the next, and slots must be made before they are needed: this remembers it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tiercheck.protocol.pieces_table import pieces_table
from tiercheck.protocol.slot import PIECES, PROOF, SlotLayout
from tiercheck.trainer import user_state
from tiercheck.trainer.dtypes import dtype_name
from tiercheck.trainer.leaves import Entry, NotCapturable
from tiercheck.trainer.proof import SUM_BYTES
from tiercheck.trainer.slot_file import USER_BLOB


class UnknownRoom(Enum):
    """What is said of a delta slot's bytes where no number is."""

    AS_BEFORE = "as before"
    KNOWN_SOON = "known soon"
    """So slots are not asked for yet."""


DeltaRoom = int | UnknownRoom
"""Bytes of a delta slot; 0: no delta is taken."""


@dataclass(frozen=True)
class Planned:
    """A snapshot's layout, and the table of its pieces, which goes into it as it is."""

    slot: SlotLayout
    pieces: bytes


class Layouts:
    """May be used by several threads: the training thread asks early, the saver's when it knows how long the user blob is."""

    def __init__(self, reserve: Callable[[int, DeltaRoom], None]) -> None:
        """`reserve` is told the size of each new layout, and the room for deltas as `plan` was."""
        self._reserve = reserve
        self._lock = threading.Lock()
        self._layout: Planned | None = None
        self._signature: tuple[Any, ...] = ()
        self._capacity = 0

    @property
    def known(self) -> bool:
        """Whether there is one yet."""
        return self._layout is not None

    def plan(self, entries: Sequence[Entry], blob_bytes: int, delta_room: DeltaRoom = UnknownRoom.AS_BEFORE) -> Planned:
        """The layout for these tensors; the same object until the set of tensors changes or the blob outgrows its place.

        Raises NotCapturable.
        """
        with self._lock:
            self._capacity = user_state.capacity_for(blob_bytes, self._capacity)
            signature = (
                self._capacity,
                *((entry.name, entry.tensor.dtype, entry.tensor.shape, entry.piece) for entry in entries),
            )
            if self._layout is None or signature != self._signature:
                pieces = pieces_table({entry.name: entry.piece for entry in entries if entry.piece is not None})
                stored = [
                    (entry.name, dtype_name(entry.tensor.dtype), tuple(entry.tensor.shape), entry.tensor.nbytes)
                    for entry in entries
                ]
                try:
                    slot = SlotLayout.plan(
                        [
                            (PIECES, "U8", (len(pieces),), len(pieces)),
                            (PROOF, "U8", (SUM_BYTES * len(entries),), SUM_BYTES * len(entries)),
                            *stored,
                            (USER_BLOB, "U8", (self._capacity,), self._capacity),
                        ]
                    )
                except (TypeError, ValueError) as error:
                    raise NotCapturable(str(error)) from error
                self._layout, self._signature = Planned(slot, pieces), signature
                self._reserve(slot.size, delta_room)
            return self._layout
