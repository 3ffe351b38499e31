"""Simulates the sidecars of one job: the real protocol over TLS on loopback.

They have a process of their own, so that what they cost is not counted. Each line of its standard input
names one more sidecar (`Wanted`), at an address of its own. It answers when that listens, and ends with its
input.

A sidecar trains as soon as it is released: a step each second, which is no news. What it holds is what a
worker of that many ranks holds after a while: three snapshots and eight deltas of its own ranks, two and
eight of a neighbour's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import time
import urllib.parse
import zlib
from asyncio import sslproto
from email.utils import formatdate
from functools import partial
from pathlib import Path

import msgspec

from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import (
    Holding,
    MemoryReport,
    RemoteReport,
    Report,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
    Watermarks,
)
from tiercheck.protocol.version import Kind, Version

sslproto.SSLProtocol.max_size = 8 * 1024  # of memory for each connection, instead of 256 KiB

SAVED = Version(24, 1)
"""The newest version of which everybody has a snapshot."""
_CADENCE, _CHAIN = 3, 8


class _Followed(msgspec.Struct):
    """Of a directive, what a simulated sidecar does anything with."""

    attempt: int
    revision: str
    phase: Phase
    number: int = 0


def holdings(worker: int, workers: int, ranks: int) -> tuple[Holding, ...]:
    """What a worker holds: its own ranks, and those of the one before; of the first worker, those of a worker
    after the last one, who was lost."""
    found = []
    before = worker - 1 if worker else workers
    for tier, whose, snapshots in ((Tier.LOCAL, worker, 3), (Tier.PEER, before, 2)):
        for rank in range(whose * ranks, (whose + 1) * ranks):
            steps = [SAVED.step - number * _CADENCE for number in range(snapshots)]
            found += [Holding(rank, Version(step, 1), tier, 13 << 30) for step in steps]
            deltas = range(SAVED.step + 2 - _CHAIN, SAVED.step + 2)
            found += [Holding(rank, Version(step, 1), tier, 4 << 30, Kind.DELTA) for step in deltas]
    return tuple(found)


class Wanted(msgspec.Struct):
    """A sidecar that is to listen: one line of standard input, as JSON."""

    host: str
    folder: str
    """With tls.crt and tls.key."""
    job_uid: str
    pod_uid: str
    worker: int
    workers: int
    ranks: int


class SimulatedSidecar:
    """One worker's."""

    def __init__(self, wanted: Wanted) -> None:
        self._is = wanted
        self._followed: _Followed | None = None
        self._began = 0.0
        self._held = b""
        self.serial = 1
        self.changed = asyncio.Event()

    @property
    def held(self) -> int:
        """Once it trains, what it holds stays the same."""
        return 2 if self._began else 1

    def obey(self, body: bytes) -> None:
        """Follow a directive: at once and without doubt."""
        wanted = msgspec.json.Decoder(_Followed).decode(body)
        if wanted.phase is Phase.RELEASE and not self._began:
            self._began = time.time()
        self._followed, self.serial = wanted, self.serial + 1
        self.changed.set()
        self.changed = asyncio.Event()

    def report(self, with_holdings: bool) -> bytes:
        """JSON, as a sidecar writes it. What it holds is written once: it is the same each time."""
        me = self._is
        if not self._held:
            self._held = zlib.compress(to_json(holdings(me.worker, me.workers, me.ranks)), 1)
        followed = self._followed or _Followed(0, "", Phase.HOLD)
        trainer = TrainerReport(TrainerState.WAITING)
        if self._began:
            steps = int(time.time() - self._began) + 1
            trainer = TrainerReport(
                TrainerState.RUNNING,
                started_at=self._began,
                first_step_at=self._began,
                step=steps,
                step_seconds=1.0,
            )
        restored = SAVED if followed.attempt > 1 else None
        state = RestoreState.READY if self._followed else RestoreState.IDLE
        report = Report(
            job_uid=me.job_uid, worker=me.worker, pod_uid=me.pod_uid, instance="i", serial=self.serial,
            attempt=followed.attempt, revision=followed.revision, followed=followed.number,
            phase=followed.phase if self._followed else None, restore=RestoreReport(state, restored),
            trainer=trainer, holdings=(), remote=RemoteReport(False, None),
            watermarks=Watermarks(SAVED, SAVED, None, SAVED), memory=MemoryReport(1 << 40, 0, 0),
            snapshot_every=_CADENCE, has_holdings=with_holdings,
            held=self.held,
        )  # fmt: skip
        text = to_json(report)
        if not (with_holdings and self._began):
            return text
        return text.replace(b'"holdings":[]', b'"holdings":' + zlib.decompress(self._held), 1)


class _Connection(asyncio.Protocol):
    """One call after the other, as HTTP/1.1 has them."""

    def __init__(self, sidecar: SimulatedSidecar) -> None:
        self._sidecar, self._heard = sidecar, bytearray()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None:
            self._waiting.cancel()

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, end, rest = self._heard.partition(b"\r\n\r\n")
        if not end:
            return
        method, target, *_ = head.split(b" ", 2)
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(rest) < length:
            return
        self._heard = rest[length:]
        query = dict(urllib.parse.parse_qsl(target.partition(b"?")[2].decode()))
        last = b"\r\nconnection: close" in head.lower()
        if method == b"PUT":
            self._sidecar.obey(bytes(rest[:length]))
            self._answer(query, last)
        else:
            self._waiting = asyncio.create_task(self._when_news(query, last))

    async def _when_news(self, query: dict[str, str], last: bool) -> None:
        sidecar, wait = self._sidecar, float(query["wait"])
        if wait and int(query["after"]) >= sidecar.serial:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await sidecar.changed.wait()
        self._answer(query, last)

    def _answer(self, query: dict[str, str], last: bool) -> None:
        """`last`: the connection ends with it, as a real sidecar's does for who says so."""
        if self._transport is None:
            return
        wanted = query.get("holdings") != "no" and query.get("held") != f"i.{self._sidecar.held}"
        body = self._sidecar.report(with_holdings=wanted)
        head = f"HTTP/1.1 200 OK\r\nDate: {formatdate(usegmt=True)}\r\nContent-Length: {len(body)}"
        end = "\r\nConnection: close" if last else ""
        self._transport.write(f"{head}{end}\r\n\r\n".encode() + body)
        if last:
            self._transport.close()


async def _serve() -> None:
    contexts: dict[str, ssl.SSLContext] = {}
    loop, read = asyncio.get_running_loop(), msgspec.json.Decoder(Wanted)
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = read.decode(line)
        if wanted.folder not in contexts:
            contexts[wanted.folder] = _context(Path(wanted.folder))
        sidecar, tls = SimulatedSidecar(wanted), contexts[wanted.folder]
        await loop.create_server(
            partial(_Connection, sidecar),
            wanted.host,
            names.CONTROL_PORT,
            ssl=tls,
            ssl_shutdown_timeout=1.0,
        )
        print("listens", flush=True)


def _context(folder: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.num_tickets = 0
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return tls


def main() -> None:
    """Until standard input ends."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve())
