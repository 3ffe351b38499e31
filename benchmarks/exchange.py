"""Measures copies between sidecars against plain sockets on the same machine in the same minute.

    python -m benchmarks.exchange [--mebibytes 512] [--rounds 11] [--deltas 50]

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

import argparse
import json
import multiprocessing
import operator
import os
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.plain_wire import plain_wires
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_sidecar.exchange.fetch import fetch
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.network.transport import CONGESTION_CONTROL
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.exchange.sources import Dial
from tiercheck_sidecar.exchange.streams import STREAMS, Line
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.replicate.sender import Pushed, push
from tiercheck_sidecar.tags import Tagger, digest_and_tag
from tiercheck_sidecar.vault import Seal, Vault

MIB = 1 << 20
_HOLDERS = (1, 2)
_LIMIT_SECONDS = 1.0


def run(mebibytes: int = 512, rounds: int = 11, deltas: int = 50) -> dict[str, Any]:
    """The figures by name: rates in GB/s, ratios to the limit, milliseconds of a delta of 1 MiB."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-exchange-", dir=shared if shared.is_dir() else None))
    token = secrets.token_hex(16)
    limit, carry = _limit()
    try:
        with (
            _holder(folder, token, 1) as first,
            _holder(folder, token, 2) as second,
            _holder(folder, token, 3, plain=True) as third,
        ):
            holders = {1: first, 2: second, 3: third}
            owner = _Worker(folder, token, 0, {worker: holder.address for worker, holder in holders.items()})
            owner.follow(_HOLDERS)
            rates: dict[str, list[float]] = {"limit": [], "fetch from two": []}
            per_core: dict[str, list[float]] = {}

            def measure(name: str, seal: Seal, worker: int, work: Callable[[], object]) -> None:
                used = time.process_time() + holders[worker].ask("cpu")
                rates.setdefault(name, []).append(_rate(seal, work))
                used = time.process_time() + holders[worker].ask("cpu") - used
                per_core.setdefault(name, []).append(seal.digests.size / used / 1e9)

            def both_ways(way: str, seal: Seal, worker: int) -> None:
                with owner.line(worker) as line:
                    measure(f"{way}push", seal, worker, lambda: _push(owner, seal, line))
                owner.forget()
                measure(f"{way}fetch", seal, worker, lambda: owner.fetch(seal, (worker,)))

            for step in range(1, rounds + 1):
                seal = owner.save(Version(step * 1000, 1), mebibytes * MIB)
                used = _used_here()
                sent, seconds = carry(STREAMS)
                rates["limit"].append(sent / seconds / 1e9)
                per_core.setdefault("limit", []).append(sent / (_used_here() - used) / 1e9)
                for way, tagger in (("plain ", None), ("", owner.state.tagger(seal.artifact))):
                    per_core.setdefault(f"{way}seal", []).append(owner.sealing(seal, tagger))
                for plain in (True, False) if step % 2 else (False, True):
                    with plain_wires() if plain else nullcontext():
                        both_ways("plain " if plain else "", seal, 3 if plain else 1)
                with owner.line(2) as other:
                    _push(owner, seal, other)
                owner.forget()
                rates["fetch from two"].append(_rate(seal, lambda seal=seal: owner.fetch(seal, _HOLDERS)))
                first.ask("forget")
                with owner.encrypting():
                    both_ways("encrypted ", seal, 1)
            with owner.line(1) as line:
                milliseconds = [_delta(owner, line, Version(rounds * 1000 + n + 1, 1)) for n in range(deltas)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {name: max(values) for name, values in rates.items()}
    core = {name: statistics.median(values) for name, values in per_core.items()}
    return {
        "mebibytes": mebibytes,
        "cores": len(os.sched_getaffinity(0)),
        "streams": STREAMS,
        "limit is": limit,
        **{f"{name}, GB/s": rate for name, rate in best.items()},
        **{f"{name} / limit": rate / best["limit"] for name, rate in best.items() if name != "limit"},
        **{f"{name}, GB for a core-second": rate for name, rate in core.items()},
        **{
            f"{name} / limit, for a core-second": statistics.median(
                map(operator.truediv, per_core[name], per_core["limit"])
            )
            for name in ("plain push", "plain fetch", "push", "fetch")
        },
        **{
            f"{way}{name} / plain, for a core-second": statistics.median(
                map(operator.truediv, per_core[f"{way}{name}"], per_core[f"plain {name}"])
            )
            for way in ("", "encrypted ")
            for name in ("push", "fetch", "seal")
            if f"{way}{name}" in core
        },
        "delta of 1 MiB, median ms": statistics.median(milliseconds),
        "delta of 1 MiB, best ms": min(milliseconds),
        "rounds": rates,
    }


def _rate(seal: Seal, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return seal.digests.size / (time.perf_counter() - began) / 1e9


def _push(owner: _Worker, seal: Seal, line: Line) -> None:
    deadline = time.monotonic() + 30
    while (
        push(owner.vault, seal, line) is not Pushed.KEPT
    ):  # the holder frees its older copy a moment after the newer one came
        if time.monotonic() > deadline:
            raise RuntimeError("the holder stays busy")


def _delta(owner: _Worker, line: Line, version: Version) -> float:
    seal = owner.save(version, MIB, Kind.DELTA)
    began = time.perf_counter()
    _push(owner, seal, line)
    return (time.perf_counter() - began) * 1000


def _layout(size: int) -> SlotLayout:
    return SlotLayout.plan([("weight", "U8", (size,), size)])


# Sidecars


class _Worker:
    """The exchange's part of a sidecar. Every worker listens on an address of its own, as pods do."""

    def __init__(self, folder: Path, token: str, worker: int, addresses: dict[int, tuple[str, int]]) -> None:
        self.worker, self._addresses = worker, addresses
        host = f"127.{os.getpid() % 200 + 20}.{worker}.1"
        memory = folder / f"worker-{worker}"
        self.state = SidecarState(
            SidecarConfig(
                job="default/benchmark",
                job_uid="benchmark",
                worker=worker,
                procs_per_worker=1,
                pod_uid=f"pod-{worker}",
                pod_ip=host,
                memory_dir=memory,
                memory_limit=1 << 40,
                run_dir=memory,
                credentials_dir=memory,
                remote=None,
                token=token,
            )
        )
        self.vault = Vault(memory, 1 << 40, self.state.config.ranks, self.state.bump, self.state.tagger)
        self.vault.open()
        self.identity = Identity("benchmark", worker, token, host)

    def follow(self, holders: tuple[int, ...], hosted: tuple[int, ...] = ()) -> None:
        """Released in attempt 1."""
        peers = {worker: Peer(worker, self._addresses.get(worker, ("", 0))[0]) for worker in range(3)}
        self.state.accept(
            Directive(
                job_uid="benchmark",
                worker=self.worker,
                workers=3,
                procs_per_worker=1,
                attempt=1,
                phase=Phase.RELEASE,
                history=History((Branch(1, 0),)),
                policy=Policy(None, 1_000_000, 5),
                restore=None,
                holders=tuple(peers[worker] for worker in holders),
                hosted=tuple(peers[worker] for worker in hosted),
                coordinator=peers[0],
                master_host="",
                master_port=0,
                pod_uid=self.state.config.pod_uid,
                instance=self.state.instance,
                number=self.state.followed + 1,
            )
        )
        self.vault.host(hosted)
        with self.state.lock:
            self.state.restore = RestoreReport(RestoreState.READY, None)

    def save(self, version: Version, size: int, kind: Kind = Kind.SNAPSHOT) -> Seal:
        """An artifact of random bytes, in place of the older ones of its kind."""
        layout = _layout(size)
        self.vault.evict(lambda seal: seal.kind is kind)
        room = self.vault.reserved(0)
        if kind is Kind.SNAPSHOT and (room is None or room.snapshot != layout.size):
            self.vault.reserve(0, layout.size, 2 * MIB)
            self.vault.prepare()
        path = self.vault.begin(0, version, kind)
        with open(path, "r+b") as file:
            file.write(layout.state_word + layout.header(0, version, 3, {}, kind))
            for _ in range(layout.data_begin, layout.size, MIB):
                file.write(os.urandom(min(MIB, layout.size - file.tell())))
        self.vault.complete(path, 0)
        seal = self.vault.seal(path)
        assert seal is not None
        return seal

    def sealing(self, seal: Seal, tagger: Tagger | None) -> float:
        """GB for a core's second of what is done when `seal`'s artifact is sealed."""
        with self.vault.pin(seal.artifact, Tier.LOCAL) as slot, slot.mapped() as view:
            began = time.process_time()
            digest_and_tag(view[: seal.digests.size], tagger)
            return seal.digests.size / (time.process_time() - began) / 1e9

    def forget(self) -> None:
        """As after the loss of its memory, but for the slots."""
        self.vault.evict(lambda _: True)

    def fetch(self, seal: Seal, sources: tuple[int, ...]) -> None:
        """Back from `sources`, verified and sealed."""
        dials = [Dial(worker, lambda worker=worker: self._dial(worker)) for worker in sources]  # type: ignore[misc]
        fetched = fetch(self.vault, seal.artifact, dials)
        assert fetched.seal.digests == seal.digests

    @contextmanager
    def encrypting(self) -> Iterator[None]:
        """New connections are encrypted."""
        self.identity.encrypts = lambda: True
        yield
        self.identity.encrypts = lambda: False

    def line(self, worker: int) -> Line:
        return Line(lambda: self._dial(worker))

    def _dial(self, worker: int) -> Wire:
        host, port = self._addresses[worker]
        return dial(self.identity, 1, Peer(worker, host), port)


class _Holder:
    """Worker 0's holder, in a process of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.address: tuple[str, int] = pipe.recv()

    def ask(self, what: str) -> float:
        """ "cpu": seconds of processor time that it has used. "forget": it has nothing any more."""
        self._pipe.send(what)
        answer: float = self._pipe.recv()
        return answer


@contextmanager
def _holder(folder: Path, token: str, worker: int, plain: bool = False) -> Iterator[_Holder]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, (folder, token, worker), plain), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Holder(ours)
    finally:
        ours.close()
        process.join(30)
        process.kill()


def _hold(pipe: Connection, place: tuple[Path, str, int], plain: bool) -> None:
    """Keep the newest artifact of each kind, until the other end of `pipe` is closed."""
    with plain_wires() if plain else nullcontext():
        holder = _Worker(*place, {})
        server = ExchangeServer(holder.state, holder.vault, holder.identity, 0)
        holder.follow((), hosted=(0,))
        server.start()
        threading.Thread(target=_keep_newest, args=(holder,), daemon=True).start()
        pipe.send(server.address)
        try:
            while asked := pipe.recv():
                if asked == "forget":
                    holder.forget()
                pipe.send(time.process_time())
        except EOFError:
            server.stop()
            holder.state.stop()


def _keep_newest(holder: _Worker) -> None:
    seen = -1
    while not holder.state.stopping:
        seen = holder.state.wait(seen, 5.0)
        newest = {
            seal.kind: seal.version for seal in holder.vault.held() if seal.tier is Tier.PEER
        }  # oldest first
        holder.vault.evict(lambda seal, newest=newest: seal.version < newest[seal.kind])


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
            [
                "iperf3",
                "-c",
                "127.0.0.1",
                "-p",
                port,
                "-J",
                "-P",
                str(streams),
                "-t",
                str(_LIMIT_SECONDS),
                *extra,
            ],
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


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--deltas", type=int, default=50)
    arguments = parser.parse_args()
    figures = run(arguments.mebibytes, arguments.rounds, arguments.deltas)
    rounds = figures.pop("rounds")
    for name, value in figures.items():
        print(f"{name:44}{f'{value:.2f}' if isinstance(value, float) else value}")
    for name, values in rounds.items():
        print(f"{name + ', each round':44}{'  '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()
