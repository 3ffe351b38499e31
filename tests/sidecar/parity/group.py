"""A group of parity: stations that fold their artifacts into blocks, which others of them hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.sidecar.stations import Station, Stations
from tests.sidecar.world import flip, until
from tiercheck.protocol.directive import Directive, ParityGroup, Policy
from tiercheck.protocol.version import Artifact, Kind, Version

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
