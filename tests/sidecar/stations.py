"""Real sidecars in this process, on loopback, with the loops that a test asks for.

The plain values that tests of the sidecar begin with are built here too.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests import operator_key
from tests.sidecar.world import JOB_UID, content, flip, until
from tiercheck.protocol import names
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import Quarantined, RestoreReport, RestoreState, Watermarks
from tiercheck.protocol.version import Artifact, Branch, History, Kind, Share, Version
from tiercheck_sidecar.app import Sidecar
from tiercheck_sidecar.artifact_source import BoundedCall, SourceFailed
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.addresses import OwnAddress
from tiercheck_sidecar.exchange.channel import TcpChannel
from tiercheck_sidecar.exchange.fetch import Dial
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import dial
from tiercheck_sidecar.exchange.streams import ConnectionPool
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.parity.rebuild import ParitySource
from tiercheck_sidecar.replicate.lane import push
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.vault import Seal
from tiercheck_sidecar.vault.stock import NOTHING

TOKEN = "token"


def config_of(folder: Path = Path(), **changes: Any) -> SidecarConfig:
    """The only worker of a job without a remote tier, with all its files in `folder`, but for `changes`."""
    plain = SidecarConfig(
        job="default/gpt", job_uid=JOB_UID, worker=0, procs_per_worker=1, pod_uid="pod-0", pod_ip="127.0.0.1",
        memory_dir=folder, memory_limit=1 << 20, run_dir=folder, credentials_dir=folder, remote=None,
        token=TOKEN, operator_public=operator_key.PUBLIC,
    )  # fmt: skip
    return replace(plain, **changes)


def directive_of(**changes: Any) -> Directive:
    """The release of a job's only worker in attempt 1, with nothing to restore, but for `changes`."""
    plain = Directive(
        job_uid=JOB_UID, worker=0, workers=1, procs_per_worker=1, attempt=1, phase=Phase.RELEASE,
        history=History((Branch(1, 0),)), policy=Policy(None, 1_000_000, 5), restore=None, holders=(),
        hosted=(), coordinator=Peer(0, "127.0.0.1"), master_host="127.0.0.1", master_port=29500,
        pod_uid="pod-0",
    )  # fmt: skip
    return replace(plain, **changes)


def image(
    rank: int, version: Version, plan: SlotLayout, kind: Kind = Kind.SNAPSHOT, world_size: int = 8
) -> bytes:
    """A whole artifact as a trainer would have written it."""
    body = content(rank, version.step, plan.size - plan.data_begin)
    return plan.state_word + plan.header(rank, version, world_size, {}, kind) + body


MakeStations = Callable[..., "Stations"]
_NETWORKS = itertools.count(1)


class Stations:
    """The workers of one job, in attempt 1. Worker w + 1 keeps the copies of worker w."""

    port = names.EXCHANGE_PORT
    loops: tuple[str, ...] = ()
    """Of the sidecar, which run from the start."""

    def __init__(
        self,
        memory: Path,
        workers: int = 2,
        procs: int = 1,
        limit: int = 256 << 20,
        rails: int = 0,
        *,
        here: Iterable[int] | None = None,
    ) -> None:
        """`here`: the workers that live in this process; without it all."""
        self.memory, self.workers, self.procs, self.limit = memory, workers, procs, limit
        self.rails = rails
        """Interfaces of each worker beside its pod's: net1, net2."""
        self.network = f"127.{os.getpid() % 200 + 20}.{next(_NETWORKS) % 250}"
        self.attempt = 0
        self.history = History()
        self.lives = [0] * workers
        self.stations = [Station(self, worker) for worker in (range(workers) if here is None else here)]
        self.next_attempt()

    def __getitem__(self, worker: int) -> Station:
        return self.stations[worker]

    def host(self, worker: int) -> str:
        return f"{self.network}.{worker + 101}"

    def rail(self, number: int, worker: int) -> str:
        """The worker's address on interface net`number`."""
        return f"{self.network}.{worker + 101 + 40 * number}"

    def own(self, worker: int) -> list[OwnAddress]:
        """What the worker would find on its interfaces."""
        rails = [OwnAddress(f"net{n}", self.rail(n, worker)) for n in range(1, self.rails + 1)]
        return [OwnAddress("eth0", self.host(worker)), *rails]

    def peer(self, worker: int) -> Peer:
        return Peer(worker, self.host(worker))

    def next_attempt(self, base_step: int = 0, policy: Policy | None = None) -> None:
        self.attempt += 1
        self.history = self.history.after(self.attempt, base_step)
        for station in self.stations:
            station.follow(self.directive(station.worker, policy or Policy(None, 1_000_000, 5)))

    def directive(self, worker: int, policy: Policy) -> Directive:
        """Restored and released in the job's attempt."""
        after, before = (worker + 1) % self.workers, (worker - 1) % self.workers
        return directive_of(
            worker=worker,
            workers=self.workers,
            procs_per_worker=self.procs,
            attempt=self.attempt,
            history=self.history,
            policy=policy,
            holders=(self.peer(after),) if self.workers > 1 else (),
            hosted=(self.peer(before),) if self.workers > 1 else (),
            coordinator=self.peer(0),
            master_host=self.host(0),
            pod_uid=f"pod-{worker}",
            signature=operator_key.sign_attempt(JOB_UID, self.attempt).signature,
        )

    def name(self, version: Version | None, **more: Any) -> None:
        """All hear which snapshot to copy."""
        for station in self.stations:
            station.name(version, **more)

    def close(self) -> None:
        for station in self.stations:
            station.stop()


class Station:
    """One worker's sidecar, wired as its process wires it. Its exchange answers; `run` begins other loops."""

    def __init__(self, job: Stations, worker: int) -> None:
        self.job, self.worker = job, worker
        self.directory = job.memory / f"worker-{worker}-{job.lives[worker]}"
        self.sidecar = Sidecar(
            config_of(
                self.directory,
                worker=worker,
                procs_per_worker=job.procs,
                pod_uid=f"pod-{worker}",
                pod_ip=job.host(worker),
                memory_limit=job.limit,
            ),
            lambda: job.own(worker),
        )
        self.state, self.vault, self.identity = self.sidecar.state, self.sidecar.vault, self.sidecar.identity
        self.server, self.replicator = self.sidecar.exchange, self.sidecar.replicator
        self.sender, self.holder = self.sidecar.parity, self.sidecar.parity_holder
        self.vault.open()
        self.server.start()
        self.run(*job.loops)

    def run(self, *loops: str) -> None:
        for name, body in self.sidecar._loops():
            if name in loops:
                self.state.threads.loop(name, body)

    def accept(self, directive: Directive) -> None:
        """As the next one that its operator sends."""
        state = self.state
        state.accept(replace(directive, instance=state.instance, number=state.followed + 1))

    def follow(self, directive: Directive) -> None:
        """With nothing to restore."""
        self.accept(directive)
        hosted = [
            peer.worker * self.job.procs + each for peer in directive.hosted for each in range(self.job.procs)
        ]
        folded = [
            share
            for group in directive.folded
            for share in group.shares(group.holders.index(self.job.peer(self.worker)), self.job.procs)
        ]
        self.vault.host(hosted, folded)
        with self.state.lock:
            self.state.restore = RestoreReport(RestoreState.READY, None)
        self.state.bump()

    def replicate(self, version: Version | None = None) -> None:
        """Begin to bring what is sealed here to the holder, and name the snapshot to copy."""
        self.run("replicate")
        if version is not None:
            self.name(version)

    def name(self, version: Version | None, **more: Any) -> None:
        """The coordinator names the snapshot to copy."""
        with self.state.lock:
            self.state.verdict = TierVerdict(self.state.attempt, Watermarks(), copy=version, **more)
        self.state.bump()

    def save(self, version: Version, size: int, kind: Kind = Kind.SNAPSHOT, rank: int | None = None) -> Seal:
        """Capture an artifact of about `size` bytes of an own rank."""
        rank = self.state.config.ranks[0] if rank is None else rank
        layout = SlotLayout.plan([("weight", "U8", (size,), size)])
        room = self.vault.reserved(rank)
        if kind is Kind.SNAPSHOT and (room is None or room.snapshot != layout.size):
            self.vault.reserve(rank, layout.size, 2 * layout.size)
        path = until(lambda: self._begin(rank, version, kind), "a free slot")
        with open(path, "r+b") as file:
            file.write(
                layout.state_word + layout.header(rank, version, self.job.workers * self.job.procs, {}, kind)
            )
            numbers = random.Random(str((rank, version, kind)))
            while (left := layout.size - file.tell()) > 0:
                file.write(numbers.randbytes(min(left, 1 << 26)))
        self.vault.complete(path, 0)
        seal = self.vault.seal(path)
        assert seal is not None
        self.state.bump()
        return seal

    def _begin(self, rank: int, version: Version, kind: Kind) -> Path | None:
        self.vault.prepare()
        return self.vault.begin(rank, version, kind)

    def connect(self, worker: int | Peer) -> Wire:
        peer = worker if isinstance(worker, Peer) else self.job.peer(worker)
        return dial(self.identity, self.state.attempt, peer, self.job.port)

    def line(self, worker: int) -> ConnectionPool:
        return ConnectionPool(lambda: self.connect(worker))

    def push(self, seal: Seal, worker: int) -> bool:
        """Bring the worker a copy, on a line of its own."""
        with self.line(worker) as line:
            return push(self.vault, seal, line) is not None

    def dials(self, *workers: int) -> list[Dial]:
        return [Dial(worker, lambda worker=worker: self.connect(worker)) for worker in workers]  # type: ignore[misc]

    def content(self, seal: Seal, tier: Tier) -> bytes:
        with self.vault.pin(seal.artifact, tier) as slot, slot.mapped() as view:
            return bytes(view[: seal.digests.size])

    def flip(self, seal: Seal, tier: Tier, *chunks: int) -> None:
        """A bit of each of `chunks` of what is held here turns, behind the vault's back."""
        with self.vault.pin(seal.artifact, tier) as slot, open(slot.path, "r+b") as file:
            for chunk in chunks:
                file.seek(chunk * seal.digests.chunk + length_of(seal.digests, chunk) - 1)
                octet = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([octet[0] ^ 4]))

    def holds(self, artifact: Artifact, tier: Tier = Tier.PEER) -> bool:
        return self.vault.find(artifact, tier) is not None

    def copied(self, rank: int, kind: Kind = Kind.SNAPSHOT) -> list[Version]:
        """Versions of an own rank's artifacts that are complete at every holder of the group's blocks."""
        assert self.state.directive is not None
        told = self.sender.acknowledged(self.state.directive)
        versions = [stocks.get(rank, NOTHING).of(kind) for _, stocks in told]
        return sorted(frozenset.intersection(*versions)) if versions else []

    def blocks(self) -> list[Seal]:
        return [seal for seal in self.vault.held() if seal.share is not None]

    def block_path(self, share: Share, version: Version, kind: Kind = Kind.SNAPSHOT) -> Path:
        with self.vault.pin(Artifact(share.ranks[0], version, kind), share=share) as slot:
            return slot.path

    def rebuild(
        self,
        rank: int,
        version: Version,
        group: ParityGroup,
        kind: Kind = Kind.SNAPSHOT,
        bad: list[Quarantined] | None = None,
    ) -> bytes:
        """An own rank's artifact, from parity into memory. `bad`: takes what proves to be so."""
        source = ParitySource(group, self.job.procs, self.connect)
        found: list[Quarantined] = [] if bad is None else bad
        try:
            filled = source.fill(self.vault, Artifact(rank, version, kind), BoundedCall())
        except SourceFailed as error:
            found += error.bad
            raise
        found += filled.bad
        seal = filled.seal
        assert (seal.rank, seal.version, seal.kind, seal.tier) == (rank, version, kind, Tier.LOCAL)
        return self.content(seal, Tier.LOCAL)

    def reach(self, remote: object) -> RestoreSources:
        """What its restores read from, with another remote tier."""
        return RestoreSources(self.state, self.vault, self.identity, self.job.port, remote)  # type: ignore[arg-type]

    def stop(self) -> None:
        """The process ends; nothing answers any more."""
        self.server.stop()
        self.state.stop()


MakeJob = Callable[..., "Group"]


class Group(Stations):
    """Workers 0..data-1 are its members, the next ones its holders."""

    loops = ("parity", "parity-blocks")

    def __init__(self, memory: Path, data: int, parity: int, procs: int = 1, limit: int = 256 << 20) -> None:
        self.data = data
        super().__init__(memory, data + parity, procs, limit)

    @property
    def group(self) -> ParityGroup:
        peers = [self.peer(worker) for worker in range(self.workers)]
        return ParityGroup(tuple(peers[: self.data]), tuple(peers[self.data :]))

    def directive(self, worker: int, policy: Policy | None = None) -> Directive:
        plain = super().directive(worker, policy or Policy(1, 1_000_000, 5))
        parity, folded = (self.group, ()) if worker < self.data else (None, (self.group,))
        return replace(plain, holders=(), hosted=(), parity=parity, folded=folded)

    @property
    def members(self) -> list[Station]:
        return self.stations[: self.data]

    @property
    def holders(self) -> list[Station]:
        return self.stations[self.data :]

    def save_rank(self, rank: int, version: Version, size: int, kind: Kind = Kind.SNAPSHOT) -> bytes:
        """One rank captures `version`. Returns its bytes."""
        station = self.stations[rank // self.procs]
        seal = station.save(version, size, kind, rank)
        return station.content(seal, seal.tier)

    def save(self, version: Version, *sizes: int, kind: Kind = Kind.SNAPSHOT) -> dict[int, bytes]:
        """Every rank captures `version`, with these sizes in turn. Returns the bytes of each."""
        ranks = [rank for station in self.members for rank in station.state.config.ranks]
        return {rank: self.save_rank(rank, version, sizes[rank % len(sizes)], kind) for rank in ranks}

    def protect(self, version: Version, *sizes: int) -> dict[int, bytes]:
        """The same, and wait until every block is complete and every member knows."""
        saved = self.save(version, *sizes)
        self.name(version)
        for rank in saved:
            member = self.stations[rank // self.procs]
            until(
                lambda rank=rank, member=member: version in member.copied(rank),
                f"rank {rank} {version} is protected",
            )
        return saved

    def spoil(self, rank: int, version: Version, offset: int) -> None:
        """One bit of a rank's own snapshot is not what it was."""
        with self.stations[rank // self.procs].vault.pin(Artifact(rank, version)) as slot:
            flip(slot.path, offset)

    def lose(self, *workers: int, back_to: Version | None = None) -> None:
        """Workers end, and others, with empty memory, take their place. Then the job goes `back_to`."""
        for worker in workers:
            self.stations[worker].stop()
        for worker in workers:
            self.lives[worker] += 1
            self.stations[worker] = until(partial(self._restart, worker), "the address is free")
        if back_to is not None:
            self.next_attempt(back_to.step)

    def _restart(self, worker: int) -> Station | None:
        try:
            return Station(self, worker)
        except OSError:
            return None


def send_bytes(wire: Wire, index: int, content: bytes, *, bare: bool = False) -> None:
    """As chunk `index`, whatever is held here."""
    with open(os.memfd_create("chunk"), "wb+", buffering=0) as file:
        file.write(content)
        wire.send_chunk(file.fileno(), index, 0, len(content), bare=bare)


class MeddledChannel:
    """A connection on which somebody changes what arrives, as `meddle` does, given what one call brought."""

    def __init__(self, channel: TcpChannel, meddle: Callable[[memoryview], None]) -> None:
        self._channel, self._meddle = channel, meddle

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)

    def receive_into(self, view: memoryview) -> int:
        got = self._channel.receive_into(view)
        self._meddle(view[:got])
        return got
