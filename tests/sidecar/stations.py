"""Runs sidecars' ends of the exchange in this process, without operator or trainer."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState, Watermarks
from tiercheck.protocol.version import Artifact, History, Kind, Version
from tiercheck_local.addresses import free_ports
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.fetch import Dial
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.replicate.replicate import Replicator
from tiercheck_sidecar.replicate.streams import Line
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.versions.watermark import TierVerdict

JOB = "uid-of-the-job"
TOKEN = "token"
_NETWORKS = itertools.count(1)


class Stations:
    """The workers of one job, in attempt 1. Worker w + 1 keeps the copies of worker w."""

    def __init__(self, memory: Path, workers: int = 2, procs: int = 1, limit: int = 256 << 20) -> None:
        self.memory, self.workers, self.procs, self.limit = memory, workers, procs, limit
        self.network = f"127.{os.getpid() % 200 + 20}.{next(_NETWORKS) % 250}"
        (self.port,) = free_ports(1)
        self.attempt = 0
        self.history = History()
        self.stations = [Station(self, worker) for worker in range(workers)]
        self.next_attempt()

    def __getitem__(self, worker: int) -> Station:
        return self.stations[worker]

    def host(self, worker: int) -> str:
        return f"{self.network}.{worker + 101}"

    def peer(self, worker: int) -> Peer:
        return Peer(worker, self.host(worker))

    def next_attempt(self, base_step: int = 0, policy: Policy | None = None) -> None:
        self.attempt += 1
        self.history = self.history.after(self.attempt, base_step)
        for station in self.stations:
            station.follow(policy or Policy(None, 1_000_000, 5))

    def close(self) -> None:
        for station in self.stations:
            station.stop()


class Station:
    """One worker's sidecar, as far as the exchange needs it."""

    def __init__(self, job: Stations, worker: int) -> None:
        self.job, self.worker = job, worker
        folder = job.memory / f"worker-{worker}"
        self.state = SidecarState(
            SidecarConfig(
                job="default/gpt",
                job_uid=JOB,
                worker=worker,
                procs_per_worker=job.procs,
                pod_uid=f"pod-{worker}",
                pod_ip=job.host(worker),
                memory_dir=folder,
                memory_limit=job.limit,
                run_dir=folder,
                credentials_dir=folder,
                remote=None,
                token=TOKEN,
            )
        )
        self.vault = Vault(folder, job.limit, self.state.config.ranks, self.state.bump, self.state.tagger)
        self.vault.open()
        self.identity = Identity(JOB, worker, TOKEN, job.host(worker))
        self.server = ExchangeServer(self.state, self.vault, self.identity, job.port)
        self.server.start()
        self.replicator = Replicator(self.state, self.vault, self.identity, job.port)

    def follow(self, policy: Policy) -> None:
        """Restored and released in the job's attempt."""
        job = self.job
        after, before = (self.worker + 1) % job.workers, (self.worker - 1) % job.workers
        self.state.accept(
            Directive(
                job_uid=JOB,
                worker=self.worker,
                workers=job.workers,
                procs_per_worker=job.procs,
                attempt=job.attempt,
                phase=Phase.RELEASE,
                history=job.history,
                policy=policy,
                restore=None,
                holders=(job.peer(after),) if job.workers > 1 else (),
                hosted=(job.peer(before),) if job.workers > 1 else (),
                coordinator=job.peer(0),
                master_host=job.host(0),
                master_port=29500,
            )
        )
        self.vault.host(range(before * job.procs, (before + 1) * job.procs) if job.workers > 1 else ())
        with self.state.lock:
            self.state.restore = RestoreReport(RestoreState.READY, None)
        self.state.bump()

    def replicate(self) -> None:
        """Begin to bring what is sealed here to the holder."""
        self.state.threads.loop("replicate", self.replicator.run)

    def name(self, version: Version | None) -> None:
        """The coordinator names the snapshot to copy."""
        with self.state.lock:
            self.state.verdict = TierVerdict(self.state.attempt, Watermarks(), copy=version)
        self.state.bump()

    def save(self, version: Version, size: int, kind: Kind = Kind.SNAPSHOT, rank: int | None = None) -> Seal:
        """Capture an artifact of about `size` bytes of an own rank."""
        rank = self.state.config.ranks[0] if rank is None else rank
        layout = SlotLayout.plan([("weight", "U8", (size,), size)])
        room = self.vault.reserved(rank)
        if kind is Kind.SNAPSHOT and (room is None or room.snapshot != layout.size):
            self.vault.reserve(rank, layout.size, layout.size)
            self.vault.prepare()
        path = self.vault.begin(rank, version, kind)
        with open(path, "r+b") as file:
            file.write(
                layout.state_word + layout.header(rank, version, self.job.workers * self.job.procs, {}, kind)
            )
            file.write(random.Random(str((rank, version, kind))).randbytes(layout.size - layout.data_begin))
        self.vault.complete(path, 0)
        seal = self.vault.seal(path)
        assert seal is not None
        self.state.bump()
        return seal

    def connect(self, worker: int) -> Wire:
        return dial(self.identity, self.state.attempt, self.job.peer(worker), self.job.port)

    def line(self, worker: int) -> Line:
        return Line(lambda: self.connect(worker))

    def dials(self, *workers: int) -> list[Dial]:
        return [Dial(worker, lambda worker=worker: self.connect(worker)) for worker in workers]  # type: ignore[misc]

    def content(self, seal: Seal, tier: Tier) -> bytes:
        with self.vault.pin(seal.rank, seal.version, tier, seal.kind) as slot, slot.mapped() as view:
            return bytes(view[: seal.digests.size])

    def flip(self, seal: Seal, tier: Tier, *chunks: int) -> None:
        """A bit of each of `chunks` of what is held here turns, behind the vault's back."""
        with self.vault.pin(seal.rank, seal.version, tier, seal.kind) as slot, open(slot.path, "r+b") as file:
            for chunk in chunks:
                file.seek(chunk * seal.digests.chunk + length_of(seal.digests, chunk) - 1)
                octet = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([octet[0] ^ 4]))

    def holds(self, artifact: Artifact, tier: Tier = Tier.PEER) -> bool:
        return self.vault.find(artifact.rank, artifact.version, tier, artifact.kind) is not None

    def stop(self) -> None:
        self.server.stop()
        self.state.stop()


def send_bytes(wire: Wire, index: int, content: bytes, *, bare: bool = False) -> None:
    """As chunk `index`, whatever is held here."""
    with open(os.memfd_create("chunk"), "wb+", buffering=0) as file:
        file.write(content)
        wire.send_chunk(file.fileno(), index, 0, len(content), bare=bare)
