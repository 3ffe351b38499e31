"""What a sidecar is to the operator, and its trainer with it: a model in memory, one second at a time.

It plays what the real one promises, no more: it restores what it is told to, only from copies that exist.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tiercheck.protocol.directive import Directive, Phase, Restore, Source, Tier
from tiercheck.protocol.report import (
    SPARE,
    Counters,
    Holding,
    MemoryReport,
    Problem,
    Proof,
    Quarantined,
    RankRestore,
    RemoteReport,
    Report,
    RestoreProgress,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
    Watermarks,
)
from tiercheck.protocol.version import Artifact, Kind, Share, Version
from tiercheck_sidecar.restore.restore_plan import OutOfReach, SourceOffer, plan

if TYPE_CHECKING:
    from tests.operator.world_in_memory import World

_LIVES = itertools.count()


def by_age(artifact: Artifact) -> tuple[str, int, Version]:
    """Orders snapshots and deltas of each rank from the oldest."""
    return artifact.kind.value, artifact.rank, artifact.version


@dataclass
class SidecarModel:
    """One pod's sidecar and trainer, in a world that says what of all else they meet."""

    world: World
    pod: str
    worker: int
    directive: Directive | None = None
    own: set[Artifact] = field(default_factory=set)
    """What it made itself, as whatever worker it was then."""
    hosted: set[Artifact] = field(default_factory=set)
    """Copies of others' artifacts."""
    blocks: set[tuple[Share, Version, Kind]] = field(default_factory=set)
    captured_deltas: int = 0
    restore: RestoreReport = field(default_factory=lambda: RestoreReport(RestoreState.IDLE, None))
    trainer: TrainerReport = field(default_factory=lambda: TrainerReport(TrainerState.WAITING))
    quarantined: tuple[Quarantined, ...] = ()
    problems: tuple[Problem, ...] = ()
    proofs: tuple[Proof, ...] = ()
    uploading: bool = False
    """At the end of the job."""
    settled: bool = False
    reachable: bool = True
    closed: bool = False
    """Its process is gone, its host is well."""
    hung: bool = False
    """Its process is there and answers nobody."""
    serial: int = 0
    instance: str = field(default_factory=lambda: f"life-{next(_LIVES)}")
    followed: int = 0
    learned: int = 0
    """The newest attempt that it heard of elsewhere."""
    flushed_for: int = 0
    holders_lack: bool = False
    killed_at: float | None = None
    """When a command was killed of which something is still there."""
    waiting_since: float | None = None
    """In a restore, for something that does not come."""
    stuck_in: int = 0
    """The attempt in which it gave a mount up."""

    @property
    def told(self) -> Directive:
        """The directive, which there is."""
        assert self.directive is not None
        return self.directive

    @property
    def mine(self) -> set[Artifact]:
        """What it made as the worker that it is now."""
        return {each for each in self.own if each.rank == self.worker}

    def free(self, floor: int) -> None:
        """Drops what is older than the snapshot at `floor`, and what an earlier placement keeps."""
        hosted = {peer.worker for peer in self.told.hosted}
        shares = {tuple(peer.worker for peer in group.members) for group in self.told.folded}

        def stays(version: Version, kind: Kind) -> bool:
            return version.step >= floor + (kind is Kind.DELTA)

        self.own = {each for each in self.own if stays(each.version, each.kind)}
        self.hosted = {e for e in self.hosted if e.rank in hosted and stays(e.version, e.kind)}
        self.blocks = {(of, v, kind) for of, v, kind in self.blocks if of.ranks in shares and stays(v, kind)}

    def fail(self, code: int = 1, reason: str = "Crashed", **more: object) -> None:
        """The training command ends with that exit code."""
        ended = {
            "state": TrainerState.FAILED,
            "exit_code": code,
            "reason": reason,
            "ended_at": self.world.now,
        }
        self.trainer = replace(self.trainer, **ended | more)  # type: ignore[arg-type]

    def accept(self, directive: Directive) -> None:
        old = self.directive
        if directive == old or directive.instance != self.instance or directive.number <= self.followed:
            return
        if self.worker == SPARE:
            self.worker = directive.worker
        if self.worker != directive.worker:
            assert old is None or directive.attempt > old.attempt, (
                "told to be another worker within an attempt"
            )
            assert directive.pod_uid == self.pod, "told what another pod should hear"
            self.worker = directive.worker
        if old is not None and (
            directive.attempt < old.attempt
            or (directive.attempt == old.attempt and directive.phase.order < old.phase.order)
        ):
            return
        if old is None or directive.attempt > old.attempt:
            self.quarantined = ()
            if self.trainer.state is TrainerState.RUNNING and self.pod in self.world.undying:
                self.killed_at = self.world.now
            stays = self.trainer.state is TrainerState.RUNNING and directive.policy.interrupt_seconds > 0
            self.trainer = (
                self._ending()
                if self.killed_at is not None
                else TrainerReport(
                    TrainerState.WAITING,
                    stays=int(stays and self.world.staying and self.worker not in self.world.late),
                    refusal=self.world.late.get(self.worker, ""),
                )
            )
            self.restore = RestoreReport(
                RestoreState.RUNNING, directive.restore.version if directive.restore else None
            )
            self.waiting_since = None
        self.directive, self.followed = directive, directive.number

    def tick(self) -> None:
        directive = self.directive
        if directive is None:
            return
        if self.restore.state is RestoreState.RUNNING:
            self._restore(directive)
        if directive.phase is Phase.HOLD and self.restore.state is RestoreState.READY:
            self._hand_on(directive)
        if (
            directive.policy.health_check is not None
            and self.killed_at is None
            and directive.phase is Phase.HOLD
        ):
            self._check()
        if self.killed_at is not None:
            self.killed_at = self.killed_at if self.pod in self.world.undying else None
            self.trainer = self._ending()
        if directive.phase is Phase.RELEASE and self.trainer.state is TrainerState.WAITING:
            version = directive.restore.version if directive.restore else None
            self.world.started(directive.attempt, self.worker, version, directive)
            step = version.step if version else 0
            self.trainer = TrainerReport(TrainerState.RUNNING, started_at=self.world.now, step=None)
            self.world.position[self.pod] = step
            self._replay(version)
        # Once it has begun, its launcher is gone: a later directive brings nobody back.
        if directive.phase is Phase.FINISH or self.flushed_for:
            self._flush()

    def _hand_on(self, directive: Directive) -> None:
        """Its holders get what they lack of it, and a moment later that is known."""
        self.holders_lack = False
        for peer in directive.holders:
            holder = self.world.live_sidecar(peer.worker)
            if holder is None or holder.directive is None or holder.directive.attempt != directive.attempt:
                continue
            self.holders_lack |= not self.mine <= holder.hosted
            holder.hosted |= self.mine

    def _check(self) -> None:
        """It takes a second, and is repeated while it fails."""
        here = {self.worker, self.world.pods[self.pod].node}
        if here & self.world.unhealthy:
            why = "failurePolicy.healthCheck (sh) ended with exit code 3: no GPU"
            self.trainer = TrainerReport(TrainerState.ABSENT, unhealthy=why)
        elif self.trainer.unhealthy:
            self.trainer = TrainerReport(TrainerState.WAITING)

    def _ending(self) -> TrainerReport:
        if self.killed_at is None:
            return TrainerReport(TrainerState.WAITING)
        stuck = "SIGKILL does not end process 7" if self.world.now - self.killed_at >= 30 else ""
        return TrainerReport(TrainerState.ABSENT, busy="ends the command of attempt 1", stuck=stuck)

    def _flush(self) -> None:
        """The training command stops after the step that it is at; what is owed to the remote tier is brought
        there, and all end."""
        world = self.world
        if self.trainer.state is TrainerState.RUNNING:
            self.trainer = replace(self.trainer, state=TrainerState.FAILED, exit_code=143, ended_at=world.now)
        self.flushed_for += 1
        if self.flushed_for <= world.flush_seconds:
            return
        if (
            world.flush_seconds
            and world.job.spec.remote is not None
            and world.committed is not None
            and world.remote_up
        ):
            world.remote.add(world.committed)
        if self.flushed_for > world.flush_seconds + bool(world.flush_seconds):
            self.settled = not self.uploading
            if self.settled and not world.beside:
                world.finished(self.pod)

    def _restore(self, directive: Directive) -> None:
        if directive.restore is None:
            self.restore = RestoreReport(RestoreState.READY, None)
            return
        version = directive.restore.version
        assert directive.history.accepts(version), "told to restore what the history does not accept"
        here = {self.worker, self.world.pods[self.pod].node}
        if here & (self.world.hanging | self.world.dead_mounts | self.world.slow):
            if self._waits(directive, here):
                return
        else:
            self.waiting_since = None
        if directive.restore.world_size:
            self.restore = self._look_at_others(directive.restore)
            return
        ranks = (self._bring_back(self.worker, directive.restore.table.of_rank(self.worker), version),)
        state = RestoreState.FAILED if any(rank.tier is None for rank in ranks) else RestoreState.READY
        self.restore = RestoreReport(state, version, ranks)

    def _waits(self, directive: Directive, here: set[int | str | None]) -> bool:
        """Whether it still does: for ever if it hangs itself, until it gives the mount up, or as long as
        little by little comes."""
        since = self.waiting_since = self.waiting_since or self.world.now
        waited, bound = self.world.now - since, directive.policy.restore_stall
        place = ("the remote tier",)
        if here & self.world.dead_mounts and (waited >= bound or directive.attempt > self.stuck_in > 0):
            self.stuck_in = self.stuck_in or directive.attempt
            why = ("the remote tier: nothing came from it",)
            ranks = (RankRestore(self.worker, None, None, 0, waited, why),)
            failed = RestoreState.FAILED
            self.restore = replace(self.restore, state=failed, ranks=ranks, progress=None, stalled=place)
            return True
        if here & self.world.slow and waited > self.world.slow_for:
            return False
        idle = 1.0 if here & self.world.slow else waited
        self.restore = replace(self.restore, progress=RestoreProgress(int(waited), 10**6, idle, place))
        return True

    def _look_at_others(self, restore: Restore) -> RestoreReport:
        """Whether something of every old rank can be read; nothing of it becomes an own slot."""
        assert self.world.made[restore.version] == restore.world_size, "told that others made it"

        def nowhere(rank: int) -> bool:
            found = (self.world.offered(source, rank, self) for source in restore.table.of_rank(rank))
            return Artifact(rank, restore.version) not in itertools.chain.from_iterable(found)

        wanting = tuple(f"rank {rank} is nowhere" for rank in range(restore.world_size) if nowhere(rank))
        state = RestoreState.FAILED if wanting else RestoreState.READY
        tier = None if wanting else Tier.PEER
        return RestoreReport(state, restore.version, (RankRestore(self.worker, tier, None, 0, 0.1, wanting),))

    def _bring_back(self, rank: int, sources: tuple[Source, ...], version: Version) -> RankRestore:
        """By a sidecar's own plan, of what the sources really have; a copy found bad is reported, and another
        one used."""
        failures: list[str] = []
        while True:
            places = [
                SourceOffer(each, dict.fromkeys(self.world.offered(each, rank, self), 1)) for each in sources
            ]
            assert self.told.restore is not None
            found = plan(rank, version, self.told.history, {}, places, base=self.told.restore.base)
            if isinstance(found, OutOfReach):
                return RankRestore(rank, None, None, 0, 0.1, (*failures, "no source has a chain"))
            wanted, used = found.artifacts(rank), [need.places[0] for need in found.needs]
            peers = [source.peer.worker if source.peer else -1 for source in used]
            bad = [each for each in zip(peers, wanted, strict=True) if each in self.world.bad_copies]
            if not bad:
                self.own.update(wanted)
                tier = max((source.tier for source in used), key=list(Tier).index)
                peer = next((worker for worker in peers if worker >= 0), None)
                rebuilt = used[0].parity is not None
                return RankRestore(
                    rank, tier, peer, 1, 0.1, tuple(failures), deltas=len(wanted) - 1, rebuilt=rebuilt
                )
            worker, artifact = bad[0]
            failures.append("digest mismatch")
            self.quarantined += (Quarantined(rank, artifact.version, worker, "digest mismatch"),)
            sources = tuple(each for each in sources if each.peer is None or each.peer.worker != worker)

    def _replay(self, version: Version | None) -> None:
        """The rank loads the snapshot and replays the deltas; if a hash differs it says so and ends, and the
        whole chain is bad. So it does if the replicas of the snapshot differ.
        """
        for rank in self.restore.ranks:
            if version is None:
                continue
            base = version.step - rank.deltas
            for unequal in (each for each in self.world.unequal if each.step == base):
                bad = {
                    each
                    for each in self.mine
                    if each.version == unequal or (each.kind is Kind.DELTA and each.version > unequal)
                }
                self._end_with_bad(bad, f"replicas held different bits when {unequal} was saved")
            for of, delta in sorted(self.world.bad_replays):
                if of == rank.rank and base < delta.step <= version.step:
                    why = (
                        f"replaying the delta of step {delta.step} did not give the state that it was "
                        "taken from"
                    )
                    chain = {
                        each
                        for each in self.mine
                        if each.kind is Kind.DELTA and base < each.version.step <= version.step
                    }
                    self._end_with_bad(chain, why)

    def _end_with_bad(self, artifacts: set[Artifact], why: str) -> None:
        self.quarantined += tuple(
            Quarantined(each.rank, each.version, self.worker, why, each.kind, everywhere=True)
            for each in sorted(artifacts, key=by_age)
        )
        self.own -= artifacts
        self.trainer = TrainerReport(TrainerState.WAITING, started_at=self.world.now)
        self.fail(message="the state is not what was saved")

    def report(self) -> Report:
        world = self.world
        self.serial += 1
        directive = self.directive
        absent = self.trainer.state is TrainerState.WAITING and self.worker in world.slow_trainers
        listens = {
            "listens": int(world.staying and not world.refusal),
            "refusal": self.trainer.refusal or world.refusal,
        }
        holdings = [
            Holding(each.rank, each.version, tier, 1, each.kind)
            for tier, held in ((Tier.LOCAL, self.own), (Tier.PEER, self.hosted))
            for each in sorted(held, key=by_age)
        ]
        holdings += [
            Holding(share.ranks[0], version, Tier.PEER, 1, kind, share)
            for share, version, kind in sorted(self.blocks, key=repr)
        ]
        remote = world.job.spec.remote is not None
        return Report(
            job_uid=world.job.uid,
            worker=self.worker,
            pod_uid=self.pod,
            instance=self.instance,
            serial=self.serial,
            attempt=directive.attempt if directive else 0,
            revision=directive.revision if directive else "",
            phase=directive.phase if directive else None,
            restore=self.restore,
            trainer=TrainerReport(TrainerState.ABSENT) if absent else replace(self.trainer, **listens),
            holdings=tuple(holdings),
            remote=RemoteReport(
                remote, world.remote_up if remote else None,
                "" if world.remote_up else world.remote_said,
                tuple(sorted(world.remote)) if world.remote_up else (),
                tuple(world.made.get(version, 0) for version in sorted(world.remote))
                if world.remote_up and self.worker == 0
                else (),
            ),
            watermarks=Watermarks(
                world.committed,
                world.copied.get((directive.attempt, directive.placement)) if directive else None,
                max(world.remote, default=None),
                snapshot=world.committed,
            ),
            memory=MemoryReport(1, 0, 0),
            holders_lack=self.holders_lack and self.trainer.state is not TrainerState.RUNNING,
            quarantined=self.quarantined,
            problems=self.problems,
            proofs=self.proofs,
            settled=self.settled,
            unreachable=world.missed_by(self),
            counters=Counters(deltas=self.captured_deltas),
            followed=self.followed,
            newest_attempt=max(self.learned, self.directive.attempt if self.directive else 0),
        )  # fmt: skip
