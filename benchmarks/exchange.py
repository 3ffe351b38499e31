"""Measures copies between sidecars against plain sockets on the same machine in the same minute.

The limit is iperf3 over loopback with as many streams (Debian: `apt-get install iperf3`): a C program that
sends from and receives into a small buffer that stays in the cache, and looks at no byte, with the congestion
control that ours asks for. Ours sends a whole artifact from one process's memory volume into another's,
checks every byte, seals it and acknowledges; the first two rounds make the holder's slots. Without iperf3 the
limit is the same thing in Python, and says so. Each round measures the limit and then ours, because other
work on the machine slows both; with and without tags are first by turns. Figures are the best of the rounds.
GB/s are 10^9 bytes per second.

Each round also goes over plain connections (no tags, `plain_wire`) and over encrypted ones. Beside the rates
stand the bytes for each second of processor time of both ends together: what a core can do, whatever else the
machine does; medians, and the median of each round's ratio to plain. "seal" is the pass over an artifact
before it is sent, with and without tags.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import resource
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB, Figure, Outcome, Scale, Sense, rate_text, scratch
from benchmarks.plain_wire import plain_wires
from tests.sidecar.stations import Station, Stations
from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.version import Version
from tiercheck_sidecar.exchange.channel import CONGESTION_CONTROL
from tiercheck_sidecar.exchange.fetch import Dial, fetch
from tiercheck_sidecar.exchange.streams import STREAMS, ConnectionPool
from tiercheck_sidecar.replicate.lane import push
from tiercheck_sidecar.tags import Tagger, digest_and_tag
from tiercheck_sidecar.vault import Seal

_LIMIT_SECONDS = 1.0


def run(scale: Scale) -> Outcome:
    """Whole artifacts, verified and sealed, against sockets that carry bytes that nobody looks at."""
    found = measure(64, 2) if scale.quick else measure()
    limit = f"{found['limit is']}: {rate_text(1e9 * found['limit, GB/s'])}"
    rows = [
        Figure(
            f"peer copy throughput, {name}",
            rate_text(1e9 * found[f"{key}, GB/s"]),
            limit,
            found[f"{key} / limit"],
            sense=Sense.AT_LEAST,
            unit="%",
            note=f"{found['mebibytes']} MiB, {found['streams']} streams",
        )
        for name, key in _WAYS
    ]
    rows += [
        Figure(
            f"peer copy {way}, {name}, for each second of a core",
            rate_text(1e9 * found[f"{prefix}{key}, GB for a core-second"]),
            f"without tags: {rate_text(1e9 * found[f'plain {key}, GB for a core-second'])}",
            found[f"{prefix}{key} / plain, for a core-second"],
            bounds.get(key),
            Sense.AT_LEAST,
            unit="%",
            note="processor time of both ends",
        )
        for way, prefix, bounds in (("authenticated", "", _AUTHENTICATED), ("encrypted", "encrypted ", {}))
        for name, key in _WAYS
    ]
    return Outcome(rows, found)


_WAYS = (("sent to a holder", "push"), ("fetched from a holder", "fetch"))
_AUTHENTICATED = {"push": 0.95, "fetch": 0.9}
"""Promised parts of what the same copy does without tags: a file's pages into memory that is there, which is
the limit for whoever keeps what it receives. iperf3's bytes never leave the cache, so that row is a note."""


def measure(mebibytes: int = 512, rounds: int = 11) -> dict[str, Any]:
    """The figures by name: rates in GB/s, and ratios to the limit."""
    limit, carry = _limit()
    with (
        scratch() as folder,
        _holder(folder / "tagged") as tagged,
        _holder(folder / "plain", plain=True) as untagged,
    ):
        job = Stations(folder, limit=1 << 40, here=(0,))
        owner = job.stations[0]
        rates: dict[str, list[float]] = {}
        per_core: dict[str, list[float]] = {}

        def timed(name: str, seal: Seal, holder: _Holder, work: Callable[[], object]) -> None:
            used, began = time.process_time() + holder.ask("cpu"), time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            rates.setdefault(name, []).append(seal.digests.size / seconds / 1e9)
            used = time.process_time() + holder.ask("cpu") - used
            per_core.setdefault(name, []).append(seal.digests.size / used / 1e9)

        def both_ways(way: str, seal: Seal, holder: _Holder) -> None:
            with ConnectionPool(lambda: owner.connect(holder.peer)) as line:
                timed(f"{way}push", seal, holder, lambda: _push(owner, seal, line))
            _forget(owner)
            timed(f"{way}fetch", seal, holder, lambda: _fetch(owner, seal, holder.peer))

        for step in range(1, rounds + 1):
            _forget(owner)
            seal = owner.save(Version(step * 1000, 1), mebibytes * MIB)
            used = _used_here()
            sent, seconds = carry(STREAMS)
            rates.setdefault("limit", []).append(sent / seconds / 1e9)
            per_core.setdefault("limit", []).append(sent / (_used_here() - used) / 1e9)
            for way, tagger in (("plain ", None), ("", owner.state.tagger(seal.artifact))):
                per_core.setdefault(f"{way}seal", []).append(_sealing(owner, seal, tagger))
            for plain in (True, False) if step % 2 else (False, True):
                with plain_wires() if plain else nullcontext():
                    both_ways("plain " if plain else "", seal, untagged if plain else tagged)
            tagged.ask("forget")
            with _encrypting(owner):
                both_ways("encrypted ", seal, tagged)
        job.close()
    best = {name: max(values) for name, values in rates.items()}
    core = {name: statistics.median(values) for name, values in per_core.items()}

    def paired(ours: str, theirs: str) -> float:
        return statistics.median(map(operator.truediv, per_core[ours], per_core[theirs]))

    return {
        "mebibytes": mebibytes,
        "cores": len(os.sched_getaffinity(0)),
        "streams": STREAMS,
        "limit is": limit,
        **{f"{name}, GB/s": rate for name, rate in best.items()},
        **{f"{name} / limit": rate / best["limit"] for name, rate in best.items() if name != "limit"},
        **{f"{name}, GB for a core-second": rate for name, rate in core.items()},
        **{
            f"{name} / limit, for a core-second": paired(name, "limit")
            for name in ("plain push", "plain fetch", "push", "fetch")
        },
        **{
            f"{name} / plain, for a core-second": paired(name, f"plain {name.split()[-1]}")
            for name in ("push", "fetch", "seal", "encrypted push", "encrypted fetch")
        },
        "rounds": rates,
    }


def _push(owner: Station, seal: Seal, line: ConnectionPool) -> None:
    deadline = time.monotonic() + 30
    while not push(
        owner.vault, seal, line
    ):  # the holder frees its older copy a moment after the newer one came
        if time.monotonic() > deadline:
            raise RuntimeError("the holder stays busy")


def _fetch(owner: Station, seal: Seal, peer: Peer) -> None:
    """Back from the holder, verified and sealed."""
    fetched = fetch(owner.vault, seal.artifact, [Dial(peer.worker, lambda: owner.connect(peer))])
    assert fetched.seal.digests == seal.digests


def _forget(station: Station) -> None:
    """As after the loss of its memory, but for the slots."""
    station.vault.evict(lambda _: True)


def _sealing(owner: Station, seal: Seal, tagger: Tagger | None) -> float:
    """GB for a core's second of what is done when `seal`'s artifact is sealed."""
    with owner.vault.pin(seal.artifact, Tier.LOCAL) as slot, slot.mapped() as view:
        began = time.process_time()
        digest_and_tag(view[: seal.digests.size], tagger)
        return seal.digests.size / (time.process_time() - began) / 1e9


@contextmanager
def _encrypting(owner: Station) -> Iterator[None]:
    """New connections are encrypted."""
    before, owner.identity.encrypts = owner.identity.encrypts, lambda: True
    yield
    owner.identity.encrypts = before


# The holder


class _Holder:
    """The worker that keeps what the owner sends, in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.peer: Peer = pipe.recv()

    def ask(self, what: str) -> float:
        """ "cpu": seconds of processor time that it has used. "forget": it has nothing any more."""
        self._pipe.send(what)
        answer: float = self._pipe.recv()
        return answer


@contextmanager
def _holder(folder: Path, plain: bool = False) -> Iterator[_Holder]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, folder, plain), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Holder(ours)
    finally:
        ours.close()
        process.join(30)
        process.kill()


def _hold(pipe: Connection, folder: Path, plain: bool) -> None:
    """Keep the newest artifact, until the other end of `pipe` is closed."""
    with plain_wires() if plain else nullcontext():
        job = Stations(folder, limit=1 << 40, here=(1,))
        holder = job.stations[0]
        threading.Thread(target=_keep_newest, args=(holder,), daemon=True).start()
        pipe.send(job.peer(1))
        try:
            while asked := pipe.recv():
                if asked == "forget":
                    _forget(holder)
                pipe.send(time.process_time())
        except EOFError:
            job.close()


def _keep_newest(holder: Station) -> None:
    seen = -1
    while not holder.state.stopping:
        seen = holder.state.wait(seen, 5.0)
        newest = max((seal.version for seal in holder.vault.held()), default=Version(0, 0))
        holder.vault.evict(lambda seal, newest=newest: seal.version < newest)


# The limit


def _used_here() -> float:
    """Seconds of processor time of this process, and of those of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _limit() -> tuple[str, Callable[[int], tuple[int, float]]]:
    """Its name, and what carries bytes over so many streams; returns how many, and the seconds."""
    if shutil.which("iperf3"):
        version = subprocess.run(
            ["iperf3", "--version"], capture_output=True, text=True, check=True
        ).stdout.split("\n")[0]
        return version.split(" (")[0].replace("iperf ", "iperf3 "), _iperf
    return "plain Python sockets (iperf3 is not installed)", over_sockets


def _iperf(streams: int) -> tuple[int, float]:
    """What a client and a server of iperf3 carry over loopback."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "--forceflush", "-B", "127.0.0.1", "-p", port],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        extra = ["-C", CONGESTION_CONTROL.decode()]
        client = subprocess.run(
            ["iperf3", *f"-c 127.0.0.1 -p {port} -J -P {streams} -t {_LIMIT_SECONDS}".split(), *extra],
            capture_output=True,
            text=True,
            check=True,
        )
        received = json.loads(client.stdout)["end"]["sum_received"]
        server.communicate(timeout=10)
        return int(received["bytes"]), float(received["seconds"])
    finally:
        server.kill()
        server.wait()


def over_sockets(streams: int) -> tuple[int, float]:
    """The same with `sendall` and `recv_into` on buffers of 128 KiB, of a process and this one."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        context = multiprocessing.get_context("spawn")
        client = context.Process(
            target=_send_for_a_while, args=(listener.getsockname(), streams), daemon=True
        )
        client.start()
        connections = [listener.accept()[0] for _ in range(streams)]
        began = time.perf_counter()
        counts: list[int] = []
        threads = [threading.Thread(target=lambda one=one: counts.append(_drain(one))) for one in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        client.join()
    return sum(counts), seconds


def _send_for_a_while(address: tuple[str, int], streams: int) -> None:
    def one() -> None:
        with socket.create_connection(address) as connection:
            end, buffer = time.perf_counter() + _LIMIT_SECONDS, bytes(128 * 1024)
            while time.perf_counter() < end:
                connection.sendall(buffer)

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drain(connection: socket.socket) -> int:
    total, buffer = 0, bytearray(128 * 1024)
    with connection:
        while got := connection.recv_into(buffer):
            total += got
    return total
