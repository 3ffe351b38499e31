"""Measures restores: from own memory beside a plain copy, from a peer beside torchft's transport.

Ours ends when a training process has the tensors, verified on the way; torchft's, which verifies nothing,
when model and optimizer have loaded them. A copy goes into memory that is there, and so do the moments of the
local restore. In the peer rows a new process has no memory for moments yet: ours, torchft's and that of the
copy are new. The new sidecar knows how large snapshots are, as it does from the operator while a pod waits or
starts, and has made memory for one; the row's note has the fetch without. Between the fetch and the load a
job releases all ranks and starts their processes; the sidecar makes the rank's other slots then, and is done
before the load here. Plain sockets bring bytes into a small buffer of a Python process; the copy is added."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from benchmarks.exchange import over_sockets
from benchmarks.harness import (
    MIB,
    Figure,
    Outcome,
    Scale,
    Sense,
    bytes_text,
    scratch,
    seconds_text,
)
from benchmarks.job import Job, until
from benchmarks.peers.environment import TORCHFT, CannotInstall
from benchmarks.workload import Training
from tiercheck import Checkpointer
from tiercheck.protocol.artifacts.sizing import OWN_SLOTS
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Version
from tiercheck_sidecar.exchange.streams import STREAMS

LOCAL = "verified local restore"
PEER = "verified peer restore, against torchft's HTTP transport"
PLAIN = "verified peer restore, against plain sockets and a copy"


def run(scale: Scale) -> Outcome:
    """torchft's restores, then local and peer restores in turn."""
    torch.set_num_threads(1)
    rounds = 2 if scale.quick else 4
    training = Training(scale.restore, tokens=0)
    local: dict[str, list[float]] = {"verify": [], "load": [], "load into new memory": [], "copy": []}
    peer: dict[str, list[float]] = {"fetch": [], "fetch into new memory": [], "load": []}
    theirs: list[dict[str, Any]] = []
    plain: list[float] = []
    problem = ""
    size = training.state_bytes
    limit = 6 * size + 256 * MIB
    # Before ours and not between: with the memory of a job in use torchft takes twice the time.
    try:
        theirs += [torchft(size) for _ in range(rounds)]
    except (CannotInstall, RuntimeError) as error:
        problem = str(error)
    with Job(2, limit=limit) as job:
        job.begin()
        version = _save(job, training)
        for _ in range(rounds):
            local["copy"].append(min(training.copy_seconds()))
            local["verify"].append(_hold(job, version, {}))
            local["load"].append(_load(job, training))
            local["load into new memory"].append(_load(job, training, new=True))
            job.lose(0)
            peer["fetch into new memory"].append(_hold(job, version, {0: (job.from_peer(1),)}))
            job.lose(0)
            _make_ready(job)
            peer["fetch"].append(_hold(job, version, {0: (job.from_peer(1),)}))
            until(lambda: job.report(0).memory.used >= OWN_SLOTS * size, "the other slots are there")
            peer["load"].append(_load(job, training, new=True))
            sent, seconds = over_sockets(STREAMS)
            plain.append(size * seconds / sent + min(training.copy_seconds(new_moments=True)))
    return Outcome(
        [_local_row(local, size), *_peer_rows(peer, theirs, problem, size), _plain_row(peer, plain)],
        {
            "state_bytes": size,
            "local": local,
            "peer": peer,
            "plain": plain,
            "torchft": theirs,
            "problem": problem,
        },
    )


def _save(job: Job, training: Training) -> Version:
    """Rank 0 saves the training, rank 1 something small; returns the version once worker 1 holds a copy of
    rank 0's."""
    os.environ |= job.trainer_env(0)
    with Checkpointer(training.model, training.optimizer, every=1) as checkpointer, job.rank(1) as other:
        checkpointer.restore()
        other.reserve(MIB)
        checkpointer.step()
        checkpointer.wait(120)
        other.save(1)
        version = Version(1, job.attempt)
        until(lambda: all(job.holds(worker, 0, version) for worker in (0, 1)), "rank 0 is copied to worker 1")
    return version


def _hold(job: Job, version: Version, sources: dict[int, Any]) -> float:
    """Seconds until every sidecar holds the version, verified, as worker 0 reports them."""
    job.hold(version, sources)
    report = job.report(0).restore
    job.direct(Phase.RELEASE, sources)
    return report.seconds


def _make_ready(job: Job) -> None:
    """Worker 0's sidecar is asked for its report as by the operator, which knows how large snapshots are."""
    (size,) = {holding.bytes for holding in job.report(1).holdings if holding.rank == 0}
    job.call(0, "GET", f"/v1/report?snapshot={size}")
    until(lambda: job.report(0).memory.used >= size, "memory for a snapshot is ready")


def _load(job: Job, training: Training, *, new: bool = False) -> float:
    """Seconds until the tensors are the trainer's. `new`: its moments have no memory yet."""
    os.environ |= job.trainer_env(0)
    if new:
        training.optimizer.state.clear()
    with Checkpointer(training.model, training.optimizer, every=1_000_000) as checkpointer:
        start = time.perf_counter()
        if not checkpointer.restore():
            raise RuntimeError("nothing was restored")
        return time.perf_counter() - start


def torchft(size: int) -> dict[str, Any]:
    """Seconds of one restore between two processes and of its transfer alone, for each number of chunks.
    Raises CannotInstall, RuntimeError."""
    with scratch() as folder:
        answer = folder / "answer.json"
        return TORCHFT.run("benchmarks.peers.torchft_transport", [size, answer], answer)


def _local_row(local: dict[str, list[float]], size: int) -> Figure:
    verify, load, copy = (min(local[key]) for key in ("verify", "load", "copy"))
    return Figure(
        LOCAL,
        seconds_text(verify + load),
        f"copy of {bytes_text(size)}: {seconds_text(copy)}",
        (verify + load) / copy,
        1.3,
        note=f"verified in {seconds_text(verify)}, loaded in {seconds_text(load)}, into new moments "
        f"{seconds_text(min(local['load into new memory']))}",
    )


def _peer_rows(
    peer: dict[str, list[float]], theirs: list[dict[str, Any]], problem: str, size: int
) -> list[Figure]:
    fetch, load = min(peer["fetch"]), min(peer["load"])
    usual = statistics.median(map(sum, zip(peer["fetch"], peer["load"], strict=True)))
    new = seconds_text(min(peer["fetch into new memory"]))
    parts = f"fetch into new memory {new}, load {seconds_text(load)}"
    if not theirs:
        return [
            Figure(
                PEER, seconds_text(fetch + load), bound=1.0, sense=Sense.AT_LEAST, note=problem or "no result"
            )
        ]
    by_chunks = {key: min(each[key][0] for each in theirs) for key in theirs[0]}
    best = min(by_chunks, key=lambda key: by_chunks[key])
    alone = seconds_text(min(each[best][1] for each in theirs))
    return [
        Figure(
            PEER,
            seconds_text(fetch + load),
            f"{seconds_text(by_chunks[best])} ({best}, its transfer {alone})",
            by_chunks[best] / (fetch + load),
            1.0,
            Sense.AT_LEAST,
            note=f"median {seconds_text(usual)}; {parts}; torchft verifies nothing",
        )
    ]


def _plain_row(peer: dict[str, list[float]], plain: list[float]) -> Figure:
    ours, limit = min(peer["fetch"]) + min(peer["load"]), min(plain)
    note = f"medians of the fetch and of the limit {seconds_text(statistics.median(peer['fetch']))} and "
    note += seconds_text(statistics.median(plain))
    return Figure(PLAIN, seconds_text(ours), seconds_text(limit), ours / limit, 1.3, note=note)
