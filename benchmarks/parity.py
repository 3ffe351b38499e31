"""Measures rebuilding an artifact from parity against the machine's own limits.

In memory the limit is `memcpy` of the same bytes, in the same minute: a rebuild of one of `data` members
reads `data` parts and writes one, so it cannot be faster than (read + written) / memcpy's own traffic (each
copied byte is one read and one written). memcpy may also have to read what it overwrites, which is not
counted.

Over loopback it is the real thing: exchange servers of members and holders in another process, handshake,
digests, a sealed result. Figures are GB/s of artifact.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIB, Figure, Outcome, Scale, Sense, rate_text, scratch
from tests.sidecar.stations import Group, Station, Stations
from tiercheck.protocol.directive import ParityGroup
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.artifact_source import BoundedCall
from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.parity.rebuild import ParitySource

CODES = {"XOR 4+1": (4, 1), "RS 4+2": (4, 2)}
"""Members and blocks."""
VERSION = Version(10, 1)


def run(scale: Scale) -> Outcome:
    """Coding against memory is promised; the whole way over sockets stands beside it."""
    size, rounds = (16 * MIB, 2) if scale.quick else (128 * MIB, 5)
    rows: list[Figure] = []
    found: dict[str, Any] = {"bytes": size, "cores": len(os.sched_getaffinity(0))}
    for code, (data, parity) in CODES.items():
        figures = _in_memory(data, parity, size, rounds)
        with _members_and_holders(data, parity, size) as group:
            figures["rebuild over loopback"] = size / min(_rebuilding(group, size, rounds))
        found[code] = figures
        rows += [
            Figure(
                f"rebuild from parity, {code}, in memory",
                rate_text(figures["rebuild in memory"]),
                f"memory: {rate_text(figures['memory limit of a rebuild'])}",
                figures["rebuild in memory"] / figures["memory limit of a rebuild"],
                0.7,
                Sense.AT_LEAST,
                unit="%",
                note="memory: read and written at the rate of memcpy",
            ),
            Figure(
                f"rebuild from parity, {code}, over loopback, verified",
                rate_text(figures["rebuild over loopback"]),
            ),
        ]
    return Outcome(rows, found)


def _in_memory(data: int, parity: int, size: int, rounds: int) -> dict[str, float]:
    """Bytes per second. As many members are lost as there are blocks, of which one is rebuilt and timed, in
    turn with the limit: a busy machine is as bad for one as for the other."""
    noise = [np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in range(data + 1)]
    members = [memoryview(each) for each in noise[:data]]
    block = memoryview(np.zeros(size, np.uint8))
    recipe = coding.recipe(data, 0, set(range(parity)), range(parity))
    weights = (*recipe.members.values(), *recipe.blocks.values())
    parts = [members[member] for member in recipe.members] + [block, *members][: len(recipe.blocks)]
    out, target = memoryview(np.ones(size, np.uint8)), np.ones(size, np.uint8)

    def combine() -> None:
        for begin in range(0, size, CHUNK):
            end = begin + CHUNK
            coding.combine(out[begin:end], weights, [part[begin:end] for part in parts])

    turns = [(_seconds(lambda: np.copyto(target, noise[data])), _seconds(combine)) for _ in range(rounds)]
    copied, rebuilt = map(min, zip(*turns, strict=True))
    return {
        "memcpy": size / copied,
        "rebuild in memory": size / rebuilt,
        "memory limit of a rebuild": 2 * size / copied / (data + 1),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def _members_and_holders(data: int, parity: int, size: int) -> Iterator[ParityGroup]:
    """In a process of their own, with what all members have saved in complete blocks."""
    ours, theirs = multiprocessing.Pipe()
    with scratch() as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, folder, data, parity, size), daemon=True
        )
        process.start()
        theirs.close()
        try:
            yield ours.recv()
        finally:
            ours.close()
            process.join()


def _serve(pipe: Connection, folder: Path, data: int, parity: int, size: int) -> None:
    """Until the other end of `pipe` is closed."""
    job = Group(folder, data, parity, limit=8 * size + 64 * MIB)
    job.protect(VERSION, size - 4096)
    pipe.send(job.group)
    pipe.poll(None)
    job.close()


def _rebuild(worker: Station, group: ParityGroup) -> None:
    ParitySource(group, 1, worker.connect).fill(worker.vault, Artifact(0, VERSION), BoundedCall())


def _rebuilding(group: ParityGroup, size: int, rounds: int) -> list[float]:
    """Seconds of each round until the first member's artifact is rebuilt and sealed at a new one that has
    nothing but its slot, which the first round makes."""
    with scratch() as folder:
        job = Stations(folder, 1, limit=8 * size + 64 * MIB)
        worker, found = job.stations[0], []
        for _ in range(rounds):
            found.append(_seconds(lambda: _rebuild(worker, group)))
            worker.vault.evict(lambda seal: True)
        job.close()
    return found
