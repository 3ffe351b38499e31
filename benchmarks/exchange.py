"""How near copies between sidecars come to what plain sockets carry on the same machine in the same minute.

    python -m benchmarks.exchange [--mebibytes 512] [--rounds 5] [--deltas 50]

The limit is iperf3 over loopback with as many streams (Debian: `apt-get install iperf3`): a C program that sends from and
receives into a small buffer that stays in the cache, and looks at no byte, with the congestion control that ours asks for. Ours sends a whole artifact from one process's
memory volume into another's, checks every byte, seals it and acknowledges. Without iperf3 the limit is the same thing in
Python, and says so. Each round measures the limit and then ours, because other work on the machine slows both; figures are
the best of the rounds. GB/s are 10^9 bytes per second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiercheck.protocol.artifact import Artifact, Kind
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState
from tiercheck.protocol.slot import SlotLayout
from tiercheck.protocol.version import Branch, History, Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.config import SidecarConfig
from tiercheck_sidecar.exchange.fetch import Dial, fetch
from tiercheck_sidecar.exchange.frames import CONGESTION_CONTROL, Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.line import Line
from tiercheck_sidecar.exchange.sender import Pushed, push
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.exchange.streams import STREAMS
from tiercheck_sidecar.vault import Seal, Vault

MIB = 1 << 20
_HOLDERS = (1, 2)
_LIMIT_SECONDS = 1.0


def run(mebibytes: int = 512, rounds: int = 5, deltas: int = 50) -> dict[str, Any]:
    """The figures by name: rates in GB/s, ratios to the limit, milliseconds of a delta of 1 MiB."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-exchange-", dir=shared if shared.is_dir() else None))
    token = secrets.token_hex(16)
    limit, carry = _limit()
    try:
        with _holder(folder, token, 1) as first, _holder(folder, token, 2) as second:
            owner = _Worker(folder, token, 0, {1: first, 2: second})
            owner.follow(_HOLDERS)
            rates: dict[str, list[float]] = {"limit": [], "push": [], "fetch": [], "fetch from two": []}
            with owner.line(1) as line, owner.line(2) as other:
                for step in range(1, rounds + 1):
                    seal = owner.save(Version(step * 1000, 1), mebibytes * MIB)
                    rates["limit"].append(carry(STREAMS))
                    rates["push"].append(_rate(seal, lambda seal=seal: _push(owner, seal, line)))
                    _push(owner, seal, other)
                    for name, sources in (("fetch", (1,)), ("fetch from two", _HOLDERS)):
                        owner.forget()
                        rates[name].append(_rate(seal, lambda seal=seal, to=sources: owner.fetch(seal, to)))
                milliseconds = [_delta(owner, line, Version(rounds * 1000 + n + 1, 1)) for n in range(deltas)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = {name: max(values) for name, values in rates.items()}
    return {
        "mebibytes": mebibytes,
        "cores": len(os.sched_getaffinity(0)),
        "streams": STREAMS,
        "limit is": limit,
        **{f"{name}, GB/s": rate for name, rate in best.items()},
        **{f"{name} / limit": rate / best["limit"] for name, rate in best.items() if name != "limit"},
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


# Sidecars


class _Worker:
    """The exchange's part of a sidecar. Every worker listens on an address of its own, as pods do."""

    def __init__(self, folder: Path, token: str, worker: int, addresses: dict[int, tuple[str, int]]) -> None:
        self.worker, self._addresses = worker, addresses
        host = f"127.{os.getpid() % 200 + 20}.{worker}.1"
        memory = folder / f"worker-{worker}"
        self.board = Board(
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
        self.vault = Vault(memory, 1 << 40, self.board.config.ranks, self.board.bump)
        self.vault.open()
        self.identity = Identity("benchmark", worker, token, host)

    def follow(self, holders: tuple[int, ...], hosted: tuple[int, ...] = ()) -> None:
        """Released in attempt 1."""
        peers = {worker: Peer(worker, self._addresses.get(worker, ("", 0))[0]) for worker in range(3)}
        self.board.accept(
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
            )
        )
        self.vault.host(hosted)
        with self.board.lock:
            self.board.restore = RestoreReport(RestoreState.READY, None)

    def save(self, version: Version, size: int, kind: Kind = Kind.SNAPSHOT) -> Seal:
        """An artifact of random bytes, in place of the older ones of its kind."""
        layout = SlotLayout.plan([("weight", "U8", (size,), size)])
        self.vault.free(lambda seal: seal.kind is kind)
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

    def forget(self) -> None:
        """As after the loss of its memory, but for the slots."""
        self.vault.free(lambda _: True)

    def fetch(self, seal: Seal, sources: tuple[int, ...]) -> None:
        """Back from `sources`, verified and sealed."""
        dials = [Dial(worker, lambda worker=worker: self._dial(worker)) for worker in sources]  # type: ignore[misc]
        fetched = fetch(self.vault, Artifact(seal.rank, seal.version, seal.kind), dials)
        assert fetched.seal.digests == seal.digests

    def line(self, worker: int) -> Line:
        return Line(lambda: self._dial(worker))

    def _dial(self, worker: int) -> Wire:
        host, port = self._addresses[worker]
        return dial(self.identity, 1, Peer(worker, host), port)


@contextmanager
def _holder(folder: Path, token: str, worker: int) -> Iterator[tuple[str, int]]:
    """Worker 0's holder, in a process of its own; gives its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, folder, token, worker), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(30)
        process.kill()


def _hold(pipe: Connection, folder: Path, token: str, worker: int) -> None:
    """Keep the newest artifact of each kind, until the other end of `pipe` is closed."""
    holder = _Worker(folder, token, worker, {})
    server = ExchangeServer(holder.board, holder.vault, holder.identity, 0)
    holder.follow((), hosted=(0,))
    server.start()
    threading.Thread(target=_keep_newest, args=(holder,), daemon=True).start()
    pipe.send(server.address)
    try:
        pipe.recv()
    except EOFError:
        server.stop()
        holder.board.stop()


def _keep_newest(holder: _Worker) -> None:
    seen = -1
    while not holder.board.stopping:
        seen = holder.board.wait(seen, 5.0)
        newest = {seal.kind: seal.version for seal in holder.vault.held() if seal.tier is Tier.PEER}  # oldest first
        holder.vault.free(lambda seal, newest=newest: seal.version < newest[seal.kind])


# The limit


def _limit() -> tuple[str, Callable[[int], float]]:
    """Its name, and what measures it for so many streams."""
    if shutil.which("iperf3"):
        version = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[0]
        return version.split(" (")[0].replace("iperf ", "iperf3 "), _iperf
    return "plain Python sockets (iperf3 is not installed)", _python


def _iperf(streams: int) -> float:
    """GB/s that a client and a server of iperf3 carry over loopback."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "--forceflush", "-B", "127.0.0.1", "-p", port], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        extra = ["-C", CONGESTION_CONTROL.decode()]
        client = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, "-J", "-P", str(streams), "-t", str(_LIMIT_SECONDS), *extra],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9
    finally:
        server.kill()
        server.communicate()


def _python(streams: int) -> float:
    """The same with `sendall` and `recv_into` on buffers of 128 KiB."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        context = multiprocessing.get_context("spawn")
        client = context.Process(target=_send_for_a_while, args=(listener.getsockname(), streams), daemon=True)
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
    return sum(counts) / seconds / 1e9


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deltas", type=int, default=50)
    arguments = parser.parse_args()
    figures = run(arguments.mebibytes, arguments.rounds, arguments.deltas)
    rounds = figures.pop("rounds")
    for name, value in figures.items():
        print(f"{name:32}{f'{value:.2f}' if isinstance(value, float) else value}")
    for name, values in rounds.items():
        print(f"{name + ', each round':32}{'  '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()
