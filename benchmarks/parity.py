"""Measures how near folding and rebuilding parity come to what memory and sockets allow.

    python -m benchmarks.parity [--mebibytes 128] [--rounds 5]

Two limits, measured in the same run and in the same shape:

- **memory**: what must be moved at least. Rebuilding one byte from k parts reads k and writes one, folding
  one byte reads it and the block and writes the block; the bytes moved are divided by the rate at which
  memcpy moves bytes (each copied byte is one read and one written). memcpy may also have to read what it
  overwrites, which is not counted; folding in place has read it anyway, and can be better than this limit.
- **sockets**: the parts sent over loopback by `sendfile` from shared memory and received by `recv_into`, by
  the same number of processes and streams, and nothing else done with them: no coding, no digests, no vault.

"In memory" is the coding alone, chunk by chunk. "Over loopback" is the real thing: sidecars' exchange servers
in processes of their own, handshake, digests, sealed result. Figures are GB/s of artifact (rebuild) or of
members' bytes (fold).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Phase, Policy, Tier
from tiercheck.protocol.version import Artifact, Branch, History, Version
from tiercheck_sidecar.digest import CHUNK
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.exchange.streams import STREAMS, Line
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity import coding
from tiercheck_sidecar.parity.holder import ParityHolder
from tiercheck_sidecar.parity.link import push
from tiercheck_sidecar.parity.rebuild import rebuild
from tiercheck_sidecar.parity.session import serving
from tiercheck_sidecar.parity.unfold import FRAGMENT
from tiercheck_sidecar.tags import Tagger, digest_and_tag
from tiercheck_sidecar.vault import Seal, Vault

CODES = ((4, 1), (4, 2))
"""Members and blocks: XOR, and Reed-Solomon."""
VERSION = Version(10, 1)
_JOB = "benchmark"


def run(mebibytes: int = 128, rounds: int = 5) -> dict[str, Any]:
    """Every figure, in GB/s, with its limits and ratios. `rounds`: the best of so many counts."""
    size = mebibytes << 20
    results: dict[str, Any] = {
        "mebibytes": mebibytes,
        "cores": len(os.sched_getaffinity(0)),
        "streams": STREAMS,
    }
    for data, parity in CODES:
        figures = _in_memory(data, parity, size, rounds) | _over_loopback(data, parity, size, rounds)
        results["XOR 4+1" if parity == 1 else "RS 4+2"] = figures
    return results


def _best(rounds: int, *works: Callable[[], object]) -> list[float]:
    """Seconds of the quickest round of each, taken in turn, so that a busy machine is as bad for one as for
    the other."""
    return [
        min(each) for each in zip(*([_seconds(work) for work in works] for _ in range(rounds)), strict=True)
    ]


def _seconds(work: Callable[[], object]) -> float:
    """`work` may say itself how long it took."""
    began = time.perf_counter()
    said = work()
    return said if isinstance(said, float) else time.perf_counter() - began


def _noise(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


# In memory


def _in_memory(data: int, parity: int, size: int, rounds: int) -> dict[str, float]:
    """Fold the last block; rebuild as many losses as there are blocks, of which one is timed."""
    members = [memoryview(_noise(size, member)) for member in range(data)]
    block = memoryview(np.zeros(size, np.uint8))
    coefficients = coding.row(data, parity - 1)
    chunks = range(0, size, CHUNK)

    def fold() -> None:
        for begin in chunks:
            coding.fold(block[begin : begin + CHUNK], coefficients[1], members[1][begin : begin + CHUNK])

    recipe = coding.recipe(data, 0, set(range(parity)), range(parity))
    weights = (*recipe.members.values(), *recipe.blocks.values())
    parts = [members[member] for member in recipe.members] + [block, *members][: len(recipe.blocks)]
    out = memoryview(np.ones(size, np.uint8))

    def combine() -> None:
        for begin in chunks:
            end = begin + CHUNK
            coding.combine(out[begin:end], weights, [part[begin:end] for part in parts])

    source, target = _noise(size, 9), np.ones(size, np.uint8)
    copied, folded, rebuilt = _best(rounds, lambda: np.copyto(target, source), fold, combine)
    moved = 2 * size / copied / 1e9
    return {
        "memcpy": size / copied / 1e9,
        "fold in memory": size / folded / 1e9,
        "fold in memory / memory": size / folded / 1e9 / (moved / 3),
        "rebuild in memory": size / rebuilt / 1e9,
        "rebuild in memory / memory": size / rebuilt / 1e9 / (moved / (data + 1)),
        "memory limit of a rebuild": moved / (data + 1),
    }


# Over loopback


def _over_loopback(data: int, parity: int, size: int, rounds: int) -> dict[str, float]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-parity-", dir=shared if shared.is_dir() else None))
    job = _Job(folder, data, parity, size)
    try:
        with _process(_members, job) as members, _process(_holders, job) as holders:
            worker = _Worker(job, 0)  # the members' process has a worker 0 too, which is never asked
            folded, raw_fold = _best(
                rounds, lambda: _folding(members, holders), lambda: _raw(job, range(data), parity)
            )
            rebuilt, raw_rebuild = _best(
                rounds, lambda: _rebuilding(worker), lambda: _raw(job, range(data), 1)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "fold over loopback": data * parity * size / folded / 1e9,
        "fold over loopback / sockets": raw_fold / folded,
        "rebuild over loopback": size / rebuilt / 1e9,
        "rebuild over loopback / sockets": raw_rebuild / rebuilt,
        "socket limit of a rebuild": size / raw_rebuild / 1e9,
    }


class _Job:
    """Workers 0..data-1 are members, the next ones holders."""

    def __init__(self, folder: Path, data: int, parity: int, size: int) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        self.network = network = f"127.{os.getpid() % 200 + 20}.77"
        self.data, self.parity, self.size = data, parity, size
        peers = [Peer(worker, f"{network}.{worker + 1}") for worker in range(data + parity)]
        self.group = ParityGroup(tuple(peers[:data]), tuple(peers[data:]))


class _Worker:
    """A sidecar without its trainer's and its operator's side."""

    def __init__(self, job: _Job, worker: int) -> None:
        self.job, self.worker = job, worker
        host = f"{job.network}.{worker + 1}"
        place = job.folder / f"{os.getpid()}-{worker}"
        limit = 8 * job.size + (64 << 20)
        self.state = SidecarState(
            SidecarConfig("b/b", _JOB, worker, 1, "pod", host, place, limit, place, place, None, job.token)
        )
        self.vault = Vault(place, limit, (worker,), self.state.bump)
        self.vault.open()
        self._identity = Identity(_JOB, worker, job.token, host)
        is_holder = worker >= job.data
        self.state.accept(
            Directive(
                job_uid=_JOB,
                worker=worker,
                workers=job.data + job.parity,
                procs_per_worker=1,
                attempt=1,
                phase=Phase.RELEASE,
                history=History((Branch(1, 0),)),
                policy=Policy(1, 1, 1),
                restore=None,
                holders=(),
                hosted=(),
                coordinator=job.group.members[0],
                master_host=host,
                master_port=1,
                folded=(job.group,) if is_holder else (),
                pod_uid="pod",
                instance=self.state.instance,
                number=1,
            )
        )
        self.holder = ParityHolder(self.state, self.vault)
        if is_holder:
            self.vault.host((), job.group.shares(worker - job.data, 1))

    def serve(self) -> None:
        server = ExchangeServer(self.state, self.vault, self._identity, 8471)
        server.language = serving(self.state, self.holder)
        server.start()

    def dial(self, peer: Peer) -> Wire:
        return dial(self._identity, 1, peer, 8471)

    def capture(self) -> Seal:
        """An artifact of random bytes."""
        layout = SlotLayout.plan([("weight", "U8", (self.job.size - 4096,), self.job.size - 4096)])
        content = bytearray(_noise(layout.size, self.worker))
        header = layout.state_word + layout.header(self.worker, VERSION, self.job.data, {})
        content[: len(header)] = header
        tagger = Tagger(self.job.token, _JOB, Artifact(self.worker, VERSION))
        digests, tags = digest_and_tag(memoryview(content), tagger)
        seal = Seal(self.worker, VERSION, self.job.data, Tier.LOCAL, digests, tags=tags)
        draft = self.vault.draft(seal)
        draft.view[:] = content
        draft.keep()
        return seal


@contextmanager
def _process(body: Callable[[Connection, _Job], None], job: _Job) -> Iterator[Connection]:
    """Ends with the block."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=body, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        ours.close()
        process.join()


def _members(pipe: Connection, job: _Job) -> None:
    workers = [_Worker(job, worker) for worker in range(job.data)]
    seals = [worker.capture() for worker in workers]
    threading.Thread(target=_serve_raw, args=(job, workers), daemon=True).start()
    for worker in workers:
        worker.serve()
    lines = {
        (worker.worker, holder): Line(functools.partial(worker.dial, holder))
        for worker in workers
        for holder in job.group.holders
    }
    pipe.send("ready")
    while _heard(pipe):
        began = time.perf_counter()
        with ThreadPoolExecutor(len(lines)) as pool:
            sent = [
                pool.submit(push, workers[member].vault, seals[member], line)
                for (member, _), line in lines.items()
            ]
            said = [each.result() for each in sent]
        assert {each.state for each in said} <= {"in", "have"}, said
        pipe.send(time.perf_counter() - began)


def _holders(pipe: Connection, job: _Job) -> None:
    workers = [_Worker(job, job.data + index) for index in range(job.parity)]
    for worker in workers:
        worker.serve()
    pipe.send("ready")
    while word := _heard(pipe):
        for worker in workers:
            if word == "forget":
                worker.vault.evict(lambda seal: True)
            else:
                worker.state.wait_until(lambda worker=worker: bool(worker.vault.held()), 30.0)  # type: ignore[misc]
        pipe.send("done")


def _heard(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        return ""


def _folding(members: Connection, holders: Connection) -> float:
    """Seconds until all members' bytes are in complete blocks."""
    holders.send("forget")
    holders.recv()
    began = time.perf_counter()
    members.send("push")
    members.recv()
    holders.send("wait")
    holders.recv()
    return time.perf_counter() - began


def _rebuilding(worker: _Worker) -> float:
    """Seconds until an artifact is rebuilt and sealed."""
    began = time.perf_counter()
    rebuild(worker.vault, Artifact(worker.worker, VERSION), worker.job.group, worker.dial)
    seconds = time.perf_counter() - began
    worker.vault.evict(lambda seal: True)
    return seconds


# Plain sockets


def _serve_raw(job: _Job, workers: list[_Worker]) -> None:
    """Send any part of any member's slot, as asked by (member, begin, length)."""
    files = []
    for worker in workers:
        with worker.vault.pin(Artifact(worker.worker, VERSION)) as slot:
            files.append(os.open(slot.path, os.O_RDONLY))

    def serve(connection: socket.socket) -> None:
        with connection:
            while ask := connection.recv(24, socket.MSG_WAITALL):
                member, begin, length = struct.unpack("<QQQ", ask)
                end = begin + length
                while begin < end:
                    begin += os.sendfile(connection.fileno(), files[member], begin, min(CHUNK, end - begin))

    with closing(socket.create_server((f"{job.network}.200", 8472), backlog=64)) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def _raw(job: _Job, parts: range, times: int) -> None:
    """Receive all `parts` over as many streams as a rebuild uses, and drop them."""

    def receive(member: int, begin: int, end: int) -> None:
        buffer = memoryview(bytearray(FRAGMENT))
        with socket.create_connection((f"{job.network}.200", 8472)) as connection:
            connection.sendall(struct.pack("<QQQ", member, begin, end - begin))
            while begin < end:
                begin += connection.recv_into(buffer, min(FRAGMENT, end - begin), socket.MSG_WAITALL)

    step = -(-job.size // STREAMS)
    with ThreadPoolExecutor(len(parts) * STREAMS) as pool:
        pieces = [
            (member, begin) for _ in range(times) for member in parts for begin in range(0, job.size, step)
        ]
        for each in [
            pool.submit(receive, member, begin, min(begin + step, job.size)) for member, begin in pieces
        ]:
            each.result()


def main() -> None:
    """Print the figures, as a table or as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = run(arguments.mebibytes, arguments.rounds)
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"members of {results['mebibytes']} MiB, best of {arguments.rounds}, {results['cores']} cores")
    names = list(results["XOR 4+1"])
    print(f"{'GB/s, or part of the limit':36}" + "".join(f"{code:>10}" for code in ("XOR 4+1", "RS 4+2")))
    for name in names:
        print(f"{name:36}" + "".join(f"{results[code][name]:10.2f}" for code in ("XOR 4+1", "RS 4+2")))


if __name__ == "__main__":
    main()
