"""How long slots for deltas take to be made ready after a start, and who is held up meanwhile.

Beside it the machine's limit: anonymous memory in huge pages, faulted in and so filled with zeros by as many
threads. Memory is touched once before anything is measured: in a virtual machine the host hands it out at the
first touch, whoever makes it, and that takes twenty times as long as all that is measured here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.amounts import GIB, MIB, bytes_text, seconds_text
from benchmarks.figure import Figure, Outcome
from benchmarks.machine import shared_memory
from benchmarks.scale import Scale
from tiercheck.protocol.artifacts.sizing import Room
from tiercheck_sidecar.throttling import spare_hands
from tiercheck_sidecar.vault import Vault

PROMISED = 0.3
"""Seconds per GiB with all cores."""
_CADENCE = 3
_SLOTS = 2 * _CADENCE + 2
_POPULATE = 23  # MADV_POPULATE_WRITE
_MOMENT = 0.001
_STEP = """
import hashlib, sys, time
work = bytes(4 << 20)
print(flush=True)
while True:
    begin = time.perf_counter()
    hashlib.sha256(work)
    print(time.perf_counter() - begin, flush=True)
"""
"""A training of one thread that never waits: prints how long each of its steps took."""


def run(scale: Scale) -> Outcome:
    """One rank's slots, with one core and with all, in turn with the limit."""
    size, turns = (16 * MIB, 2) if scale.quick else (GIB // 4, 4)
    hands = spare_hands(Path("/nowhere"))
    total = _SLOTS * size
    _anonymous(size, hands)
    _prepared(size, hands)
    found: dict[str, Any] = {"bytes": total, "hands": hands}
    for _ in range(turns):
        for name, action in (
            ("limit", lambda: _anonymous(size, hands)),
            ("all cores", lambda: _prepared(size, hands)),
            ("limit of one", lambda: _anonymous(size, 1)),
            ("one core", lambda: _prepared(size, 1)),
        ):
            for key, value in action().items():
                found.setdefault(f"{name}, {key}", []).append(value)
    found["late"] = sorted(found.pop("all cores, late") + found.pop("one core, late"))[-1]
    found |= _beside(size, hands, turns)
    return Outcome(figures(found), found)


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
    """The same for the real thing, and by how many seconds a loop of this process was late at the most."""
    with _vault(size, hands) as vault, _watched() as late:
        found = _timed(vault.prepare, _SLOTS * size)
        made = vault.used()
    assert made > _SLOTS * size, "all of them were made"
    return found | {"late": max(late)}


def _beside(size: int, hands: int, turns: int) -> dict[str, Any]:
    """Seconds of a training's step, alone and while slots are made ready."""
    with subprocess.Popen([sys.executable, "-c", _STEP], stdout=subprocess.PIPE, text=True) as training:
        steps: list[float] = []
        assert training.stdout is not None
        training.stdout.readline()
        reader = threading.Thread(target=lambda: steps.extend(map(float, training.stdout or ())), daemon=True)
        reader.start()
        alone, beside = [], []
        try:
            for _ in range(turns):
                with _vault(size, hands) as vault:
                    begin = len(steps)
                    time.sleep(0.3)
                    middle = len(steps)
                    vault.prepare()
                    alone += steps[begin + 1 : middle]
                    beside += steps[middle + 1 :]
        finally:
            training.kill()
            reader.join()
    return {"step alone": statistics.median(alone), "step beside": statistics.median(beside or alone)}


@contextmanager
def _vault(size: int, hands: int) -> Iterator[Vault]:
    """With its slot for snapshots made, and those for deltas wanted."""
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-bench-", dir=shared_memory()))
    vault = Vault(folder / "memory", (_SLOTS + 1) * (size + MIB), (0,), hands=hands)
    try:
        vault.open()
        vault.reserve(0, 4096, size)
        vault.expect(_CADENCE, Room(4096, size))
        yield vault
    finally:
        shutil.rmtree(folder)
        for slot in vault._slots.values():  # the mappings, which would keep the memory
            slot.unmap()


@contextmanager
def _watched() -> Iterator[list[float]]:
    """By how many seconds a thread that wakes every moment was late."""
    late, over = [0.0], threading.Event()

    def wake() -> None:
        while True:
            begin = time.perf_counter()
            if over.wait(_MOMENT):
                return
            late.append(time.perf_counter() - begin - _MOMENT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()


def _timed(action: Callable[[], object], total: int) -> dict[str, float]:
    """Seconds per GiB: of the clock, and of the processors."""
    wall, busy = time.perf_counter(), time.process_time()
    action()
    gib = total / GIB
    return {"wall": (time.perf_counter() - wall) / gib, "busy": (time.process_time() - busy) / gib}


def figures(found: dict[str, Any]) -> list[Figure]:
    ours, limit = min(found["all cores, wall"]), min(found["limit, wall"])
    one, one_limit = min(found["one core, wall"]), min(found["limit of one, wall"])
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return [
        Figure(
            f"slots of {bytes_text(found['bytes'])} made ready, all {found['hands']} cores, per GiB",
            f"{seconds_text(ours)}, {seconds_text(min(found['all cores, busy']))} of a core",
            f"promised {seconds_text(PROMISED)}; zeroing alone: {seconds_text(limit)}",
            ours / PROMISED,
            1.0,
            note=f"memory that the host has given already; load {load}",
        ),
        Figure(
            f"slots of {bytes_text(found['bytes'])} made ready, one core, per GiB",
            seconds_text(one),
            f"zeroing alone: {seconds_text(one_limit)}",
            one / one_limit,
        ),
        Figure(
            "a training's step while slots are made ready",
            seconds_text(found["step beside"]),
            f"alone: {seconds_text(found['step alone'])}",
            found["step beside"] / found["step alone"],
            note=f"median; a loop of the sidecar is late by {seconds_text(found['late'])} at the most",
        ),
    ]
