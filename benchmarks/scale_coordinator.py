"""What the coordinator costs, by workers of 8 ranks: processor time, how late its word is, how long a push takes.

The coordinator runs in a process of its own, behind the port and the loops of a real sidecar. All other
sidecars of the job, and worker 0's own, are simulated in this process: they send what real ones send, as often,
over TLS. Processor seconds are the kernel's, so that what else runs here hardly matters; times do depend on it.

python -m benchmarks.scale_coordinator 64 512     prints what it finds at these sizes
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import random
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from benchmarks.figure import Figure, Outcome
from benchmarks.scale import ROOT, Scale
from tiercheck.connections import Strangers
from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.manifest import RankArtifact
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.control.api import ControlApi, routes, server_context
from tiercheck_sidecar.control.ports import GuardedPort
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.model.cadence import Needs
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.span import Span
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.versions.coordinator import Coordinator
from tiercheck_sidecar.versions.tiers import pace
from tiercheck_sidecar.versions.watermark import Copy, RankTiers, TierReport, TierVerdict

PROCS = 8
STEP = 1.0
"""Seconds of a training step: each brings every sidecar two pieces of news, what is sealed and what is copied."""
_SPREAD, _COPYING = 0.3, (0.2, 0.5)
"""Seconds in which all ranks seal a step, and until a rank's holder has it as well: at any moment some have
news."""
_CADENCE = 3
_FIRST = 1000
_SERVER = "127.77.0.1"
_UID, _TOKEN = "uid-of-the-job", "token"
_UPLOADING = 12.0
"""Seconds in which all ranks bring a version to the remote tier."""


def run(scale: Scale) -> Outcome:
    """Rows for the table."""
    found = {workers: measure(workers, 4.0 if scale.quick else 12.0) for workers in ((8,) if scale.quick else (64, 512))}
    return Outcome([], {"workers": {str(workers): each for workers, each in found.items()}})


def measure(workers: int, seconds: float) -> dict[str, float]:
    """Figures of one job."""
    with tempfile.TemporaryDirectory(prefix="tcb-") as folder:
        _issue_credentials(Path(folder))
        command = [sys.executable, "-m", "benchmarks.scale_coordinator", "--serve", folder, str(workers)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                assert process.stdout.readline() == b"ready\n"
                fleet = Fleet(Path(folder), workers)
                return asyncio.run(fleet.measure(process, seconds))
            finally:
                process.kill()


# The coordinator's side


def serve(folder: Path, workers: int) -> None:
    """Worker 0's sidecar, as far as the coordinator needs it. On standard input, `upload` asks for a version
    in the remote tier."""
    config = SidecarConfig(
        job="default/gpt",
        job_uid=_UID,
        worker=0,
        procs_per_worker=PROCS,
        pod_uid="pod-0",
        pod_ip=_SERVER,
        memory_dir=folder / "memory",
        memory_limit=1 << 40,
        run_dir=folder,
        credentials_dir=folder,
        remote="{}",
        token=_TOKEN,
    )
    board = SidecarState(config)
    coordinator = Coordinator(board)
    coordinator.stored((Version(10**9, 1),))  # so nothing is owed to the remote tier
    me = Peer(0, _SERVER)
    board.accept(
        Directive(
            _UID, 0, workers, PROCS, 1, Phase.RELEASE, _history(workers), Policy(None, 500, 5), None, (me,), (me,),
            me, _SERVER, 29500, placement="ring",
        )
    )  # fmt: skip
    vault = Vault(config.vault_dir, config.memory_limit, config.ranks, board.bump)

    async def live() -> None:
        control = ControlApi(board, Reporter(board, vault))
        api = control.build(*routes(board, coordinator))
        port = GuardedPort(api, Strangers(lambda: 256 + workers), server_context(config))
        control.on_proof = port.believe
        await port.start(_SERVER, names.CONTROL_PORT)
        board.threads.loop("coordinate", coordinator.run, vital=True)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            coordinator.stored(())

    asyncio.run(live())


def _history(workers: int) -> History:
    return History((Branch(1, 0, workers * PROCS),))


def _issue_credentials(folder: Path) -> None:
    pair = issue_pair("x", [names.TLS_SERVER_NAME], datetime.timedelta(days=1))
    (folder / "ca.crt").write_bytes(pair.ca)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    (folder / "token").write_text(_TOKEN)


def cpu_seconds(pid: int) -> float:
    """Of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The other side


@dataclasses.dataclass
class Simulated:
    """What one sidecar knows."""

    worker: int
    sealed: list[int] = dataclasses.field(default_factory=lambda: [_FIRST] * PROCS)
    """By local rank."""
    copied: list[int] = dataclasses.field(default_factory=lambda: [_FIRST] * PROCS)
    hosted: list[int] = dataclasses.field(default_factory=lambda: [_FIRST] * PROCS)
    uploaded: frozenset[int] = frozenset()
    verdict: TierVerdict | None = None

    @property
    def host(self) -> str:
        number = self.worker + 2
        return f"127.78.{number >> 8}.{number & 255}"

    def report(self, workers: int) -> TierReport:
        wanted = self.verdict.upload if self.verdict else None
        known = self.verdict.received if self.verdict else ()
        first, of = self.worker * PROCS, (self.worker - 1) % workers * PROCS
        ranks, copies = [], []
        for local in range(PROCS):
            rank = first + local
            own, runs = _kept(self.sealed[local], 3)
            there, away = _kept(self.copied[local], 2)
            done = wanted is not None and rank in self.uploaded and rank not in known
            ranks.append(
                RankTiers(
                    rank, runs, own, reached=own[-1], copied=away, copied_snapshots=there,
                    holders=((self.worker + 1) % workers,), needs=Needs(13 << 30, 4 << 30, True),
                    uploaded=(_artifact(rank, wanted),) if done else (),
                )
            )  # fmt: skip
            kept, runs = _kept(self.hosted[local], 2)
            copies.append(Copy((of + local,), kept, runs))
        return TierReport(_UID, 1, self.worker, self.host, tuple(ranks), tuple(copies), "ring")


def _kept(step: int, snapshots: int) -> tuple[tuple[Version, ...], tuple[Span, ...]]:
    """So many snapshots, and the deltas up to the step."""
    base = step - step % _CADENCE
    found = tuple(Version(base - k * _CADENCE, 1) for k in reversed(range(snapshots)))
    return found, (Span(1, found[0].step, step),)


def _artifact(rank: int, version: Version) -> RankArtifact:
    name = f"artifacts/{version.step:012d}-1/{rank:032x}/rank-{rank}.safetensors"
    return RankArtifact(rank, version, name, size=13 << 30, digest=f"{rank:032x}")


class Fleet:
    """All sidecars of a job."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.workers, self.rng = workers, random.Random(7)
        self.sidecars = [Simulated(worker) for worker in range(workers)]
        self.client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self.encode = msgspec.json.Encoder().encode
        self.decode = msgspec.json.Decoder(TierVerdict).decode
        self.complete: dict[int, float] = {}
        """When the last rank had a step."""
        self.known: dict[int, list[float]] = {}
        """When each sidecar heard that it is complete."""
        self.news = [asyncio.Event() for _ in range(workers)]
        self.reports = 0

    async def measure(self, process: Any, seconds: float) -> dict[str, float]:
        for each in self.sidecars:
            await asyncio.start_server(
                lambda r, w, each=each: self._hear(each, r, w), each.host, names.CONTROL_PORT, ssl=self.server
            )
        tasks = [asyncio.create_task(self._train())]
        tasks += [asyncio.create_task(self._report(each)) for each in self.sidecars]
        while not all(each.verdict and each.verdict.watermarks.peer for each in self.sidecars):
            await asyncio.sleep(0.2)
        await asyncio.sleep(3.0)
        quiet = await self._window(process, seconds)
        process.stdin.write(b"upload\n")
        process.stdin.flush()
        while not any(each.verdict and each.verdict.upload for each in self.sidecars):
            await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(self._upload()))
        uploading = await self._window(process, _UPLOADING)
        for task in tasks:
            task.cancel()
        return {**quiet, **{f"uploading, {name}": value for name, value in uploading.items()}}

    async def _window(self, process: Any, seconds: float) -> dict[str, float]:
        began, used, reports = time.monotonic(), cpu_seconds(process.pid), self.reports
        await asyncio.sleep(seconds)
        took, used = time.monotonic() - began, cpu_seconds(process.pid) - used
        late, spread = [], []
        for step, times in self.known.items():
            at = self.complete.get(step, 0.0)
            if began <= at <= began + seconds - 2 * STEP and len(times) > 0.98 * self.workers:
                late += [moment - at for moment in times]
                spread.append(max(times) - min(times))
        late.sort()
        return {
            "CPU seconds per second": used / took,
            "reports per second": (self.reports - reports) / took,
            "staleness, median": statistics.median(late) if late else -1.0,
            "staleness, 99 %": late[int(0.99 * len(late))] if late else -1.0,
            "push, first to last": statistics.median(spread) if spread else -1.0,
        }

    async def _train(self) -> None:
        step, next_at = _FIRST, time.monotonic()
        loop = asyncio.get_running_loop()
        while True:
            step, next_at = step + 1, next_at + STEP
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            last = 0.0
            for each in self.sidecars:
                after = self.sidecars[(each.worker + 1) % self.workers]
                for local in range(PROCS):
                    sealed = self.rng.uniform(0, _SPREAD)
                    copied = sealed + self.rng.uniform(*_COPYING)
                    loop.call_later(sealed, self._set, each, each.sealed, local, step)
                    loop.call_later(copied, self._set, after, after.hosted, local, step)
                    loop.call_later(copied + 0.01, self._set, each, each.copied, local, step)
                    last = max(last, sealed)
            self.complete[step] = time.monotonic() + last

    def _set(self, each: Simulated, steps: list[int], local: int, step: int) -> None:
        steps[local] = step
        self.news[each.worker].set()

    async def _upload(self) -> None:
        ranks = list(range(self.workers * PROCS))
        self.rng.shuffle(ranks)
        for rank in ranks:
            each = self.sidecars[rank // PROCS]
            each.uploaded |= {rank}
            self.news[each.worker].set()
            await asyncio.sleep(_UPLOADING / len(ranks))

    def _follow(self, each: Simulated, body: bytes) -> None:
        before, each.verdict = each.verdict, self.decode(body)
        mark, now = each.verdict.watermarks.local, time.monotonic()
        last = before.watermarks.local if before else None
        for step in range(last.step if last else mark.step if mark else 0, mark.step if mark else 0):
            self.known.setdefault(step + 1, []).append(now)

    async def _report(self, each: Simulated) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.005 * self.workers))
        while True:
            with contextlib.suppress(OSError, EOFError):
                await self._converse(each)
            await asyncio.sleep(self.rng.uniform(0.5, 1.0))

    async def _converse(self, each: Simulated) -> None:
        news = self.news[each.worker]
        reader, writer = await asyncio.open_connection(
            _SERVER, names.CONTROL_PORT, ssl=self.client, server_hostname=names.TLS_SERVER_NAME
        )
        while True:
            body = self.encode(each.report(self.workers))
            head = f"POST /v1/tiers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {_TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, body = await _message(reader)
            self.reports += 1
            if b" 200 " in status:
                self._follow(each, body)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(1.0, pace(self.workers))):
                    await news.wait()
            await asyncio.sleep(pace(self.workers))
            news.clear()

    async def _hear(self, each: Simulated, reader: Any, writer: Any) -> None:
        while True:
            _, body = await _message(reader)
            self._follow(each, body)
            answer = self.encode(each.verdict)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head.partition(b"\r\n")[0], await reader.readexactly(length)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        for count in map(int, sys.argv[1:]):
            print(count, json.dumps(measure(count, 12.0), indent=1))
