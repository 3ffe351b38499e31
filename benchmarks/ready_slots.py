"""Measures how long slots for deltas take to be made ready after a start.

Beside it the machine's limit: anonymous memory in huge pages, faulted in and so filled with zeros by as many
threads. Memory is touched once before anything is measured: in a virtual machine the host hands it out at the
first touch, whoever makes it, and that takes twenty times as long as all that is measured here.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import GIB, MIB, Figure, Outcome, Scale, bytes_text, scratch, seconds_text
from tiercheck.protocol.artifacts.sizing import Room
from tiercheck_sidecar.pacing import spare_hands
from tiercheck_sidecar.vault import Vault

PROMISED = 0.3
"""Seconds per GiB with all cores."""
_CADENCE = 3
_SLOTS = 2 * _CADENCE + 2
_POPULATE = 23  # MADV_POPULATE_WRITE


def run(scale: Scale) -> Outcome:
    """One rank's slots, with all cores, in turn with the limit."""
    size, turns = (16 * MIB, 2) if scale.quick else (GIB // 4, 4)
    hands = spare_hands(Path("/nowhere"))
    _anonymous(size, hands)
    _prepared(size, hands)
    found: dict[str, Any] = {"bytes": _SLOTS * size, "hands": hands, "limit": [], "ours": []}
    for _ in range(turns):
        found["limit"].append(_anonymous(size, hands))
        found["ours"].append(_prepared(size, hands))
    return Outcome([_row(found)], found)


def _anonymous(size: int, hands: int) -> dict[str, float]:
    """Seconds per GiB for so many areas."""
    areas: list[mmap.mmap] = []

    def fault(_: int) -> None:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        area.madvise(_POPULATE)
        areas.append(area)

    def all_of_them() -> None:
        with ThreadPoolExecutor(hands) as pool:
            list(pool.map(fault, range(_SLOTS)))

    return _timed(all_of_them, _SLOTS * size)


def _prepared(size: int, hands: int) -> dict[str, float]:
    """The same for the real thing."""
    with _vault(size, hands) as vault:
        found = _timed(vault.prepare, _SLOTS * size)
        made = vault.used()
    assert made > _SLOTS * size, "all of them were made"
    return found


@contextmanager
def _vault(size: int, hands: int) -> Iterator[Vault]:
    """With its slot for snapshots made, and those for deltas wanted."""
    with scratch() as folder:
        vault = Vault(folder / "memory", (_SLOTS + 1) * (size + MIB), (0,), hands=hands)
        vault.open()
        vault.reserve(0, 4096, size)
        vault.expect(_CADENCE, Room(4096, size))
        yield vault
    for slot in vault._slots.values():  # the mappings, which would keep the memory
        slot.unmap()


def _timed(action: Callable[[], object], total: int) -> dict[str, float]:
    """Seconds per GiB: of the clock, and of the processors."""
    wall, busy = time.perf_counter(), time.process_time()
    action()
    gib = total / GIB
    return {"wall": (time.perf_counter() - wall) / gib, "busy": (time.process_time() - busy) / gib}


def _row(found: dict[str, Any]) -> Figure:
    ours, busy = (min(each[key] for each in found["ours"]) for key in ("wall", "busy"))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return Figure(
        f"slots of {bytes_text(found['bytes'])} made ready, all {found['hands']} cores, per GiB",
        f"{seconds_text(ours)}, {seconds_text(busy)} of a core",
        f"promised {seconds_text(PROMISED)}; zeroing alone: "
        + seconds_text(min(each["wall"] for each in found["limit"])),
        ours / PROMISED,
        1.0,
        note=f"memory that the host has given already; load {load}",
    )
