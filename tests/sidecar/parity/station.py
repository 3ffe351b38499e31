"""Runs sidecars in this process as far as parity needs them, on loopback."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState, Watermarks
from tiercheck.protocol.version import Artifact, Branch, History, Kind, Share, Version
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.exchange.handshake import Identity, dial
from tiercheck_sidecar.exchange.server import ExchangeServer
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.parity.coding import shares
from tiercheck_sidecar.parity.holder import ParityHolder
from tiercheck_sidecar.parity.rebuild import rebuild
from tiercheck_sidecar.parity.sender import ParitySender
from tiercheck_sidecar.parity.session import serving
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.versions.watermark import TierVerdict

T = TypeVar("T")
DEADLINE = 30.0
_NETWORKS = itertools.count(1)
JOB = "uid"
PORT = 8471


def until(condition: Callable[[], T], what: str) -> T:
    """Wait for a condition. Fails with `what` at the deadline."""
    end = time.monotonic() + DEADLINE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.01)


class Station:
    """One worker's sidecar."""

    def __init__(self, job: Job, worker: int, limit: int) -> None:
        self.job, self.worker = job, worker
        self.directory = job.memory / f"worker-{worker}-{job.lives[worker]}"
        self.state = SidecarState(
            SidecarConfig(
                job="default/gpt",
                job_uid=JOB,
                worker=worker,
                procs_per_worker=job.procs,
                pod_uid=f"pod-{worker}",
                pod_ip=job.host(worker),
                memory_dir=self.directory,
                memory_limit=limit,
                run_dir=self.directory,
                credentials_dir=self.directory,
                remote=None,
                token=job.token,
            )
        )
        self.vault = Vault(self.directory, limit, self.state.config.ranks, self.state.bump, self.state.tagger)
        self.vault.open()
        self.identity = Identity(JOB, worker, job.token, job.host(worker))
        self.holder = ParityHolder(self.state, self.vault)
        self.server = ExchangeServer(self.state, self.vault, self.identity, PORT)
        self.server.languages["parity"] = serving(self.state, self.vault, self.holder)
        self.server.start()
        self.sender = ParitySender(self.state, self.vault, self.identity, PORT)
        for name, body in {"parity-blocks": self.holder.run, "parity": self.sender.run}.items():
            self.state.threads.loop(name, body)

    def follow(self, directive: Directive) -> None:
        self.state.accept(directive)
        group_shares = [
            share
            for group in directive.folded
            for share in shares(group, group.holders.index(self.job.peer(self.worker)), self.job.procs)
        ]
        self.vault.host([], group_shares)
        with self.state.lock:
            self.state.restore = RestoreReport(RestoreState.READY, None)
        self.state.bump()

    def name(self, version: Version | None, **more: Any) -> None:
        """The coordinator names the snapshot to copy."""
        verdict = TierVerdict(self.state.attempt, Watermarks(), copy=version, **more)
        with self.state.lock:
            self.state.verdict = verdict
        self.state.bump()

    def save(self, rank: int, version: Version, size: int, kind: Kind = Kind.SNAPSHOT) -> bytes:
        """Capture an artifact of about `size` bytes; returns its bytes."""
        layout = SlotLayout.plan([("weight", "U8", (size,), size)])
        room = self.vault.reserved(rank)
        if kind is Kind.SNAPSHOT and (room is None or room.snapshot != layout.size):
            self.vault.reserve(rank, layout.size, 2 * layout.size)
            self.vault.prepare()
        path = until(lambda: self._begin(rank, version, kind), "a free slot")
        header = layout.header(rank, version, self.job.workers * self.job.procs, {}, kind)
        body = random.Random(str((rank, version, kind))).randbytes(layout.size - layout.data_begin)
        with open(path, "r+b") as file:
            file.write(layout.state_word + header + body)
        self.vault.complete(path, 0)
        assert self.vault.seal(path) is not None
        self.state.bump()
        return layout.state_word + header + body

    def _begin(self, rank: int, version: Version, kind: Kind) -> Path | None:
        self.vault.prepare()
        return self.vault.begin(rank, version, kind)

    def copied(self, rank: int, kind: Kind = Kind.SNAPSHOT) -> list[Version]:
        """Versions of an own rank's artifacts that are complete at every holder."""
        assert self.state.directive is not None
        acknowledged = [artifacts for _, artifacts in self.sender.acknowledged(self.state.directive)]
        common = frozenset.intersection(*acknowledged) if acknowledged else frozenset()
        return sorted(each.version for each in common if (each.rank, each.kind) == (rank, kind))

    def protects(self, rank: int, version: Version) -> bool:
        return version in self.copied(rank)

    def blocks(self) -> list[Seal]:
        return [seal for seal in self.vault.held() if seal.share is not None]

    def block_path(self, share: Share, version: Version, kind: Kind = Kind.SNAPSHOT) -> Path:
        with self.vault.pin_share(share, version, kind) as slot:
            return slot.path

    def connect(self, peer: Peer) -> Wire:
        return dial(self.identity, self.state.attempt, peer, PORT)

    def rebuild(
        self, rank: int, version: Version, group: ParityGroup, kind: Kind = Kind.SNAPSHOT, **more: Any
    ) -> bytes:
        seal = rebuild(self.vault, Artifact(rank, version, kind), group, self.connect, **more)
        assert (seal.rank, seal.version, seal.kind, seal.tier) == (rank, version, kind, Tier.LOCAL)
        with self.vault.pin(rank, version, Tier.LOCAL, kind) as slot, slot.mapped() as view:
            return bytes(view[: seal.digests.size])

    def stop(self) -> None:
        """The process ends; nothing answers any more."""
        self.server.stop()
        self.state.stop()


class Job:
    """Workers 0..data-1 are the members of one group, the next ones its holders."""

    def __init__(self, memory: Path, data: int, parity: int, procs: int = 1, limit: int = 256 << 20) -> None:
        self.memory, self.procs, self.limit = memory, procs, limit
        self.workers = data + parity
        self.lives = [0] * self.workers
        self.token = secrets.token_hex(16)
        self._network = f"127.{os.getpid() % 200 + 20}.{next(_NETWORKS) % 200 + 50}"
        self.group = ParityGroup(
            tuple(self.peer(worker) for worker in range(data)),
            tuple(self.peer(worker) for worker in range(data, data + parity)),
        )
        self.attempt = 1
        self.history = History((Branch(1, 0),))
        self.stations = [Station(self, worker, limit) for worker in range(self.workers)]

    def host(self, worker: int) -> str:
        return f"{self._network}.{worker + 1}"

    def peer(self, worker: int) -> Peer:
        return Peer(worker, self.host(worker))

    def directive(self, worker: int) -> Directive:
        member = self.peer(worker) in self.group.members
        holder = self.peer(worker) in self.group.holders
        return Directive(
            job_uid=JOB,
            worker=worker,
            workers=self.workers,
            procs_per_worker=self.procs,
            attempt=self.attempt,
            phase=Phase.RELEASE,
            history=self.history,
            policy=Policy(1, 1_000_000, 5),
            restore=None,
            holders=(),
            hosted=(),
            coordinator=self.peer(0),
            master_host=self.host(0),
            master_port=29500,
            parity=self.group if member else None,
            folded=(self.group,) if holder else (),
        )

    def begin(self) -> None:
        for station in self.stations:
            station.follow(self.directive(station.worker))

    def name(self, version: Version | None, **more: Any) -> None:
        for station in self.stations:
            station.name(version, **more)

    @property
    def members(self) -> list[Station]:
        return self.stations[: len(self.group.members)]

    @property
    def holders(self) -> list[Station]:
        return self.stations[len(self.group.members) :]

    def save(self, version: Version, *sizes: int, kind: Kind = Kind.SNAPSHOT) -> dict[int, bytes]:
        """Every rank captures `version`, with these sizes in turn. Returns the bytes of each."""
        ranks = [rank for station in self.members for rank in station.state.config.ranks]
        return {
            rank: self.stations[rank // self.procs].save(rank, version, sizes[rank % len(sizes)], kind)
            for rank in ranks
        }

    def protect(self, version: Version, *sizes: int) -> dict[int, bytes]:
        """The same, and wait until every block is complete and every member knows."""
        saved = self.save(version, *sizes)
        self.name(version)
        for rank in saved:
            member = self.stations[rank // self.procs]
            until(partial(member.protects, rank, version), f"rank {rank} {version} is protected")
        return saved

    def spoil(self, rank: int, version: Version, offset: int) -> None:
        """One bit of a rank's own snapshot is not what it was."""
        with self.stations[rank // self.procs].vault.pin(rank, version) as slot:
            flip(slot.path, offset)

    def lose(self, *workers: int) -> None:
        """Workers end, and others, with empty memory, take their place."""
        for worker in workers:
            self.stations[worker].stop()
        for worker in workers:
            self.lives[worker] += 1
            self.stations[worker] = until(partial(self._restart, worker), "the address is free")

    def _restart(self, worker: int) -> Station | None:
        try:
            return Station(self, worker, self.limit)
        except OSError:
            return None

    def next_attempt(self, version: Version) -> None:
        self.attempt += 1
        self.history = self.history.after(self.attempt, version.step)
        self.begin()

    def close(self) -> None:
        for station in self.stations:
            station.stop()


def flip(path: Path, offset: int) -> None:
    """One bit of a file is not what it was."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (value,) = struct.unpack("B", file.read(1))
        file.seek(offset)
        file.write(struct.pack("B", value ^ 4))
