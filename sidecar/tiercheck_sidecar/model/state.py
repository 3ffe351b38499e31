"""Holds the few facts that the sidecar's threads share, and the one condition that they all wait on.

Every loop is level-based: it waits until anything changed, reads the state and the vault, and does what is
missing. So no message between threads can be lost, and a directive sent twice has no second effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping

from tiercheck.clocks import SteadyClock
from tiercheck.protocol.directive import DeltaMode, Directive, Phase, Policy
from tiercheck.protocol.report import (
    SPARE,
    Counters,
    Problem,
    Proof,
    Quarantined,
    RemoteReport,
    RestoreReport,
    RestoreState,
)
from tiercheck.protocol.signing import SignedAttempt, attempt_statement
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.fence import Fence, is_signed
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.model.trainer_watch import TrainerWatch
from tiercheck_sidecar.model.watches import PeerWatch, ProgressMeter
from tiercheck_sidecar.supervision import Threads
from tiercheck_sidecar.tags import Tagger

CANNOT_SAVE = "CannotSave"
"""Reason of the problem that nothing of a rank can be saved."""

log = logging.getLogger(__name__)

_NO_POLICY = Policy(None, 0, 0, delta=DeltaMode.NONE)
_MOMENT = 0.02
"""Seconds between two rounds of a loop that no caller waits for."""


class DirectiveRefused(Exception):
    """A directive that this sidecar must not follow; the message is a sentence."""


class StaleRefused(DirectiveRefused):
    """A directive of an older attempt, of an earlier phase, or decided without the one followed."""


class ReleaseHandshake:
    """Has the coordinator ignore own snapshots before they are freed.

    It may use this worker's last report to announce what rests on one that is newer than the local watermark.
    So a report first leaves the snapshot out; it is freed once that report is accepted. Thread-safe."""

    def __init__(self, lock: threading.RLock, changed: Callable[[], None]) -> None:
        self._lock, self._changed = lock, changed
        self._leaving: frozenset[Artifact] = frozenset()
        self._left_out: frozenset[Artifact] = frozenset()
        """The part of `_leaving` that the newest report leaves out, and so does one that is on its way."""

    def propose(self, leaving: frozenset[Artifact]) -> frozenset[Artifact]:
        """Records the own snapshots that are to be freed; returns those that the coordinator ignores."""
        with self._lock:
            news, self._leaving = self._leaving != leaving, leaving
            left_out = self._left_out
        if news:
            self._changed()
        return left_out

    def begin_report(self) -> frozenset[Artifact]:
        """Returns what the report being made leaves out; the coordinator may use all others again."""
        with self._lock:
            self._left_out &= self._leaving
            return self._leaving

    def report_accepted(self, left_out: frozenset[Artifact]) -> None:
        """Records that the coordinator has accepted a report without these, so that it ignores them."""
        if left_out:
            with self._lock:
                self._left_out = left_out
            self._changed()


class SidecarState:
    """Holds the shared state of one sidecar. Thread-safe.
    Fields that must agree are read under `lock`. Only methods write them, which a test verifies."""

    def __init__(self, config: SidecarConfig, clock: Callable[[], float] | None = None) -> None:
        self.config = config
        """The configuration.
        Its worker changes when a spare gets a number, or a resized job renumbers its workers."""
        self._on_identity: Callable[[SidecarConfig], None] = lambda _: None
        self.clock = clock = clock or SteadyClock()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._generation = 0
        self._listeners: list[Callable[[], None]] = []
        self.threads = Threads(self.bump)
        self.stopping = False
        self.ending = False
        """True once this process was asked to end; a native sidecar is only after its trainer has ended."""
        self.peers = PeerWatch(self.bump, clock)
        self.controller_at = clock()
        self.instance = uuid.uuid4().hex
        """A random ID of this process, new at every start."""
        self.directive: Directive | None = None
        self.followed = 0
        """The number of the newest directive."""
        self.saw_hold = False
        """True if this process has seen the current attempt from its beginning."""
        self.restore = RestoreReport(RestoreState.IDLE, None)
        self.meter = ProgressMeter()
        self.trainer = TrainerWatch()
        self.remote = RemoteReport(configured=config.remote is not None, reachable=None)
        self.verdict: TierVerdict | None = None
        """The coordinator's newest verdict in this attempt; None: none came, so nothing is freed."""
        self.releases = ReleaseHandshake(self.lock, self.bump)
        self.reached: Mapping[int, Version] = {}
        """The newest snapshot that each own rank captured or skipped in this attempt."""
        self.snapshot_every = 0
        """Steps between snapshots that the coordinator named last, in whichever attempt; 0: never yet."""
        self.expected_snapshot = 0
        """Bytes of the largest snapshot of other workers, as the operator reports it; 0: none yet."""
        self.distrusted = ""
        """The reason not to use this worker's deltas while this process lives, as a sentence; or empty."""
        self.no_room = ""
        """The reason for a lack of room for deltas, if known: a sentence with numbers; or empty."""
        self._declined: dict[int, str] = {}
        """The reason why each own rank takes no deltas in this attempt; empty: it takes them."""
        self._lacking: dict[int, str] = {}
        """The reason why nothing of each own rank can be saved in this attempt; empty: it can."""
        self.proofs: tuple[Proof, ...] = ()
        self.counters = Counters()
        self.fence = Fence(lambda: self.count(refused_stale=1))
        self._learned = SignedAttempt(0)
        self._problems: dict[str, Problem] = {}
        self._quarantined: dict[tuple[int, Version, Kind, int], Quarantined] = {}

    # Waiting

    def bump(self) -> None:
        """Wakes every loop after a change."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(RuntimeError):  # an event loop that has just been closed
                listener()

    def wait(self, seen: int, timeout: float) -> int:
        """Waits for a change after generation `seen`, the sidecar's stop, or `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._generation != seen or self.stopping, timeout)
            return self._generation

    def looks(self, timeout: float) -> Iterator[None]:
        """Yields at once, and after each change or `timeout` seconds, until the sidecar stops.

        Changes come in bursts (slot, seal, acknowledgement, of each rank): those of a moment share a round.
        """
        seen, soonest = -1, 0.0
        while not self.stopping:
            seen = self.wait(seen, timeout)
            rest = min(_MOMENT, soonest - self.clock())
            if rest > 0:
                self.threads.pause(rest)
                seen = self._generation
            yield
            soonest = self.clock() + _MOMENT

    def wait_until(self, predicate: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: predicate() or self.stopping, timeout)

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def stop(self) -> None:
        self.stopping = True
        self.threads.stop()
        self.bump()

    # Directives

    @property
    def attempt(self) -> int:
        return self.directive.attempt if self.directive is not None else 0

    @property
    def policy(self) -> Policy:
        """Returns the job's policy; an empty one before the first directive."""
        return self.directive.policy if self.directive is not None else _NO_POLICY

    @property
    def newest_attempt(self) -> SignedAttempt:
        """Returns the newest attempt that is known to have begun, whether or not it is followed here."""
        learned, directive = self._learned, self.directive
        if directive is None or learned.attempt > directive.attempt:
            return learned
        return SignedAttempt(directive.attempt, directive.signature)

    @property
    def fenced(self) -> bool:
        """Returns whether a newer attempt has begun, as far as is known.
        Then nothing is written that others could read."""
        return self.newest_attempt.attempt > self.attempt

    def released(self) -> tuple[Directive | None, TierVerdict | None]:
        """Returns the directive, once what it restores is here (else None), and the verdict."""
        with self.lock:
            is_ready = self.restore.state is RestoreState.READY
            return self.directive if is_ready else None, self.verdict

    def learn(self, newest: SignedAttempt) -> None:
        """Records a newer attempt that a peer or the remote tier reports, if the operator has signed it."""
        if newest.attempt <= self.newest_attempt.attempt:
            return
        if not self._is_signed(newest):
            log.warning("attempt %d is not signed by the operator, and does not count", newest.attempt)
            return
        with self.lock:
            if newest.attempt <= self.newest_attempt.attempt:
                return
            self._learned = newest
        log.warning("attempt %d has begun elsewhere; ours (%d) is over", newest.attempt, self.attempt)
        self.bump()

    def _is_signed(self, begun: SignedAttempt) -> bool:
        return is_signed(
            self.config.operator_public,
            attempt_statement(self.config.job_uid, begun.attempt),
            begun.signature,
        )

    def isolated(self, seconds: float) -> bool:
        """Returns whether neither the controller nor any peer was in contact for `seconds`.
        Never without peers: no other sidecar could report a newer attempt then."""
        return self.clock() - self.controller_at > seconds and self.peers.all_lost(seconds)

    def when_identified(self, callback: Callable[[SidecarConfig], None]) -> None:
        """Sets the callback for the first directive and each change of the worker's number.
        It is called under the lock, before other threads see the directive."""
        self._on_identity = callback

    def note_controller(self) -> None:
        self.controller_at = self.clock()

    def expect_snapshot(self, size: int) -> None:
        """Records the size of other workers' snapshots that the operator names; 0: it names none."""
        if size > 0 and size != self.expected_snapshot:
            self.expected_snapshot = size
            self.bump()

    def begin_ending(self) -> None:
        """Records that this process was asked to end."""
        self.ending = True
        self.bump()

    def accept(self, directive: Directive) -> None:
        """Takes over the wanted state. Raises DirectiveRefused."""
        with self.lock:
            self._check(directive)
            old = self.directive
            if old == directive:
                return
            if old is None or self.config.worker != directive.worker:
                self.config = dataclasses.replace(self.config, worker=directive.worker)
                self._on_identity(self.config)
            if old is None or directive.attempt > old.attempt:
                self.saw_hold = directive.phase is Phase.HOLD
                self.verdict, self.reached, self._declined = None, {}, {}
                self._lacking = {}
                self._problems.pop(CANNOT_SAVE, None)
                self._quarantined = {}
                version = directive.restore.version if directive.restore else None
                self.restore = RestoreReport(RestoreState.RUNNING, version)
                self.meter.begin()
                resumed = directive.phase is Phase.RELEASE and not self.saw_hold
                self.trainer.begin_attempt(directive.attempt, resumed, self.clock())
            elif directive.placement != old.placement:
                # What is complete at other holders need not be at these: until a verdict covers them,
                # nothing is freed.
                self.verdict = None
            self.directive = directive
            self.followed = directive.number
        self.bump()

    def _check(self, directive: Directive) -> None:
        config, old = self.config, self.directive
        if directive.job_uid != config.job_uid:
            raise DirectiveRefused(f"this sidecar belongs to job {config.job_uid}, not {directive.job_uid}")
        if directive.pod_uid != config.pod_uid:
            raise DirectiveRefused(f"this is pod {config.pod_uid}, not {directive.pod_uid}")
        # A worker's number is fixed in an attempt: else it would depend on which directive came last.
        begins = config.worker == SPARE or old is None or directive.attempt > old.attempt
        worker = directive.worker if begins else config.worker
        if (directive.worker, directive.procs_per_worker) != (worker, config.procs_per_worker):
            raise DirectiveRefused(
                f"this is worker {worker} with {config.procs_per_worker} ranks, "
                f"not worker {directive.worker} with {directive.procs_per_worker}"
            )
        late = self.fence.refuse_past(directive.attempt, old)
        if late:
            raise StaleRefused(late)
        if old is not None and directive.attempt == old.attempt and directive.phase.order < old.phase.order:
            raise StaleRefused(
                f"attempt {old.attempt} is in phase {old.phase.value}, past {directive.phase.value}"
            )
        if directive == old:
            return
        # A call that was given up may arrive after the next one, and so may one of an operator that has lost
        # its leadership.
        if directive.instance != self.instance:
            raise StaleRefused("it is meant for a process of this sidecar that was started again since")
        if directive.number <= self.followed:
            raise StaleRefused(f"directive {directive.number} comes too late, {self.followed} is followed")

    # Deltas

    def distrust_deltas(self, why: str) -> None:
        """Rejects this worker's deltas from then on. Wakes no loop: the caller has yet to free them."""
        with self.lock:
            self.distrusted = why

    def decline_deltas(self, rank: int, why: str) -> None:
        """Records why an own rank takes no deltas; empty: it does again.
        Wakes no loop: the caller may have to quarantine some first."""
        with self.lock:
            self._declined[rank] = why

    def lack_room(self, why: str) -> None:
        """Records why there is no room for deltas; empty: there is."""
        self.no_room = why
        self.problem("DeltasOff", why)

    def deltas_off(self, rank: int) -> str:
        """Returns why an own rank takes no deltas, whatever room there is; empty if it does."""
        with self.lock:
            return self.distrusted or self._declined.get(rank, "")

    def tagger(self, artifact: Artifact) -> Tagger | None:
        """Returns the tagger of an artifact that will travel over unencrypted connections, else None."""
        directive = self.directive
        if directive is None or self.policy.peer_encrypted or not (directive.holders or directive.parity):
            return None
        return Tagger(self.config.token, self.config.job_uid, artifact)

    @property
    def every(self) -> int:
        """Returns the steps between snapshots: the user's, or else the coordinator's; 0: not decided yet."""
        return self.policy.snapshot_every or self.snapshot_every

    # Versions

    def follow(self, verdict: TierVerdict) -> None:
        """Follows the coordinator's verdict, unless it is of another attempt or placement."""
        with self.lock:
            known = self.directive
            if self.fence.refuse_other(verdict.attempt, known) or self.verdict == verdict:
                return
            if verdict.placement and known is not None and verdict.placement != known.placement:
                return
            self.verdict = verdict
            if verdict.cadence.every:
                self.snapshot_every = verdict.cadence.every
        self.bump()

    def reach(self, rank: int, version: Version) -> None:
        """Records that an own rank has captured or skipped this snapshot."""
        with self.lock:
            self.reached = {**self.reached, rank: max(version, self.reached.get(rank, version))}
        self.bump()

    def report_restore(self, attempt: int, report: RestoreReport) -> bool:
        """Publishes the restore of `attempt`; returns False if that attempt is over."""
        with self.lock:
            if self.attempt != attempt:
                return False
            self.restore = report
        self.bump()
        return True

    def report_remote(
        self,
        reachable: bool,
        message: str,
        versions: tuple[Version, ...] | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Publishes the state of the remote tier; without `versions`, earlier ones stand."""
        with self.lock:
            before = self.remote
            listed = (
                before if versions is None else dataclasses.replace(before, versions=versions, ranks=ranks)
            )
            self.remote = after = dataclasses.replace(listed, reachable=reachable, message=message)
        if after != before:
            self.bump()

    def show(self, proofs: tuple[Proof, ...]) -> None:
        self.proofs = proofs

    # Small facts

    def count(self, **more: int) -> None:
        """Adds to counters by name."""
        with self.lock:
            now = {name: getattr(self.counters, name) + value for name, value in more.items()}
            self.counters = dataclasses.replace(self.counters, **now)

    def problem(self, reason: str, message: str) -> None:
        """States or, with an empty message, withdraws a problem."""
        with self.lock:
            before = self._problems.get(reason)
            if (before.message if before else "") == message:
                return
            self._problems.pop(reason, None)
            if message:
                self._problems[reason] = Problem(reason, message)
        self.bump()

    def cannot_save(self, rank: int, why: str) -> None:
        """Records why nothing of an own rank can be saved; empty: it can again."""
        with self.lock:
            self._lacking[rank] = why
            found = next((f"rank {rank}: {why}" for rank, why in sorted(self._lacking.items()) if why), "")
        self.problem(CANNOT_SAVE, found)

    def withdraw(self, prefix: str, but: str = "") -> None:
        """Withdraws every problem with a reason that begins with `prefix`, other than `but`."""
        for problem in self.problems:
            if problem.reason.startswith(prefix) and problem.reason != but:
                self.problem(problem.reason, "")

    def quarantine(self, bad: Quarantined) -> None:
        with self.lock:
            self._quarantined[bad.rank, bad.version, bad.kind, bad.worker] = bad
        self.bump()

    @property
    def problems(self) -> tuple[Problem, ...]:
        with self.lock:
            known = tuple(self._problems.values())
        return (*known, *self.threads.problems())

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        with self.lock:
            return tuple(self._quarantined.values())
