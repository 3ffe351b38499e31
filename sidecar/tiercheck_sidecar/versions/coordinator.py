"""Collects the holdings of all ranks, and sends the resulting verdict to all sidecars.

Sidecar 0 is the coordinator. It keeps no state that the sidecars would not report again, so losing it costs
nothing: until a new one has a report of every rank in the current attempt, nothing is freed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.version import Manifest, RankArtifact, Version
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import Cadence, Needs, TierVerdict, decide
from tiercheck_sidecar.versions.report_updates import (
    ReportInterner,
    ReportUpdate,
    TierAnswer,
    UpdateRejected,
    heartbeat,
    min_report_interval,
)
from tiercheck_sidecar.versions.tally import RankTable, WorkerState, validate_report
from tiercheck_sidecar.versions.watermark import (
    WatermarkState,
    compute_watermarks,
    is_hopeless,
    next_upload,
    workers_present,
)

log = logging.getLogger(__name__)

_MOMENT = 0.02
"""Seconds. Batches updates that arrive together."""
_MOST_BYTES, _MOST_VALUES = 4 * 1024 * 1024, 200_000
"""Bytes of one update, and values in it: enough to describe thousands of copies one by one."""
_EXTRA_CLIENTS, _WORKERS_BEFORE_DIRECTIVE = 64, 4000
"""The number of connections beyond the workers' own, and of workers assumed before a directive."""
_LOOK_EVERY = 60.0
"""Seconds. The worker number changes only with a directive, which wakes all loops at once."""


BAD_REPORT = "BadReport"
"""Reason of the problem that a worker's reports are refused."""
_ADVICE = (
    "What it reported before stands, and nothing new of its ranks is complete. Its pod's log says "
    "more; delete the pod if this lasts"
)

_MOST_STORED = 20
"""The number of newest remote versions listed in each verdict; worker 0 has the full list."""


class NotNow(Exception):
    """A report that cannot be accepted at present; the message is a sentence."""


@dataclass(eq=False)
class Caller:
    """A sidecar's connection, which ends with either side's process."""

    send: Callable[[TierAnswer], None] = lambda answer: None
    write: Callable[[bytes], None] = lambda data: None
    """Sends encoded answers, in the thread of the connection's event loop."""
    cut: Callable[[], None] = lambda: None
    """Ends the connection, from any thread."""
    has_update: bool = False
    """True while an update from it waits in the inbox."""
    report: WorkerState | None = None
    """The last report accepted on this connection, to which the next difference applies."""
    number: int = 0
    """The number of that report."""
    sent: TierVerdict | None = None
    """The last verdict that was sent on it."""
    serial: int = 0
    """The number of the connection, by arrival."""


class Coordinator:
    """Computes the job's verdict from all workers' reports. Thread-safe. Idle unless this is worker 0."""

    def __init__(self, state: SidecarState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.RLock()
        self._dirty = threading.Condition(self._lock)
        self._attempt = 0
        self._placement = ""
        self._uploading: Version | None = None
        self._interner = ReportInterner()
        self._table = RankTable()
        self._reports: dict[int, WorkerState] = {}
        self._reported_at: dict[int, float] = {}
        """The time of each worker's last valid report, even if it is of another placement."""
        self._final: set[int] = set()
        self._done: set[int] = set()
        self._watermarks = WatermarkState()
        self._needs: dict[int, Needs] = {}
        """The sizes of each rank.
        They outlive attempts, so a new attempt has its cadence before its ranks reserve."""
        self._cadence: tuple[tuple[int, int | None], Cadence] | None = None
        """The cadence, with the rank count and user setting that gave it; None after `_needs` changed."""
        self._stored: tuple[Version, ...] | None = None
        self._artifacts: dict[int, RankArtifact] = {}
        self._on_record: dict[Version, set[int]] = {}
        """Ranks in `_artifacts`, by version."""
        self._verdict: TierVerdict | None = None
        self._is_dirty = False
        self._sent: TierVerdict | None = None
        """The last verdict that all sidecars connected at that time were sent."""
        self._for_all = TierAnswer()
        """The current verdict as the one message that all sidecars are sent."""
        self._refused: dict[int, str] = {}
        """The reason of the refusal of each worker's newest report."""
        self._callers: dict[Caller, None] = {}
        """The connections, by arrival, so that a simulation runs the same way each time."""
        self._new: dict[Caller, None] = {}
        """The connections that have been sent nothing yet."""
        self._connected = 0
        self._newest: dict[int, Caller] = {}
        """The newest connection on which each worker has reported.
        What arrives later on an older one is outdated: that one is closed, and its sidecar may reconnect."""
        self._inbox: deque[tuple[Caller, bytes]] = deque()
        self._has_updates = False
        """True from an update's arrival until the loop takes it: several connections add to the inbox."""
        self.deliver: Callable[[list[tuple[Caller, list[TierAnswer]]]], None] = _deliver

    def run(self) -> None:
        """Applies updates, recomputes the verdict, and sends it to all sidecars when it changes.
        Begins when this becomes worker 0."""
        while not self._state.wait_until(lambda: self._state.config.worker == 0, _LOOK_EVERY):
            pass
        while not self._state.stopping:
            with self._dirty:
                self._dirty.wait_for(
                    lambda: self._has_updates or self._is_dirty or self._state.stopping, timeout=1.0
                )
            self._state.wait_until(lambda: False, _MOMENT)  # batches updates of other sidecars
            self._has_updates, answers = False, dict[Caller, TierAnswer]()
            for _ in range(len(self._inbox)):
                caller, text = self._inbox.popleft()
                caller.has_update = False
                answers[caller] = self.handle_update(caller, text)
            verdict = self.next_verdict()
            self.deliver(self._to_send(answers))
            if verdict is not None:
                self.record_sent(verdict)
            self._state.wait_until(lambda: False, min_report_interval(len(self._callers)) / 2)

    def handle_update(self, caller: Caller, text: bytes) -> TierAnswer:
        """Applies an update from a connected sidecar, and returns the answer."""
        base, caller.report, number = caller.report, None, 0
        try:
            update = decode(text, ReportUpdate, _MOST_BYTES, _MOST_VALUES)
            number = update.number
            if update.base and (base is None or update.base != caller.number):
                return TierAnswer(number, "the difference is to something else", whole=True)
            with self._lock:
                report = self._interner.updated(base if update.base else None, update)
                if report.head.job_uid != self._state.config.job_uid:
                    raise NotNow(f"this sidecar belongs to job {self._state.config.job_uid}")
                newest = self._newest.get(report.head.worker, caller)
                if caller.serial < newest.serial:
                    caller.cut()
                    raise NotNow("this sidecar has reported on a newer connection since")
                self._accept(report)
                self._newest[report.head.worker] = caller
                if newest is not caller:
                    newest.cut()
                upload = self._verdict.upload if self._verdict else None
                there = self._on_record.get(upload, set()) if upload is not None else set()
                received = tuple(rank for rank in report.own if rank in there)
                answer = TierAnswer(number, upload=upload, received=received)
        except (UpdateRejected, Malformed) as error:
            return TierAnswer(number, f"it is not understood: {error}", whole=base is not None)
        except NotNow as error:
            return TierAnswer(number, str(error))
        caller.report, caller.number = report, number
        return answer

    def _accept(self, report: WorkerState) -> None:
        """Checks and accepts a report, under the lock. Raises NotNow."""
        directive, head = self._state.directive, report.head
        if self._state.config.worker != 0:
            raise NotNow("this sidecar is not the coordinator")
        early = self._state.fence.refuse_future(head.attempt, directive)
        if early or directive is None:
            raise NotNow(early)
        late = self._state.fence.refuse_past(head.attempt, directive)
        if late:
            raise NotNow(late)
        self._enter(directive)
        wrong = validate_report(report, directive, self._reports.get(head.worker))
        if wrong:
            self._refuse(head.worker, wrong)
            raise NotNow(f"the report is refused: {wrong}")
        if self._refused.pop(head.worker, None) is not None:
            self._publish_refusals()
        # A worker with refused reports is not waited for at the end.
        self._reported_at[head.worker] = self._clock()
        if head.placement and head.placement != directive.placement:
            raise NotNow("holders change, and not every sidecar follows yet")
        self._merge(report)
        self._is_dirty = True
        if self._verdict is None or len(self._table.ranks) <= directive.procs_per_worker:
            self._recompute(directive)

    def _enter(self, directive: Directive) -> None:
        same = directive.attempt == self._attempt
        if same and directive.placement == self._placement:
            return
        self._attempt, self._placement = directive.attempt, directive.placement
        self._table, self._reports, self._verdict = RankTable(), {}, None
        if self._refused:
            self._refused = {}
            self._publish_refusals()
        if same:
            # The new holders have to be filled first, and reports under the old placement do not count.
            self._final = set(self._done)  # these may have ended, and add nothing under any placement
            self._watermarks = WatermarkState(snapshot=self._watermarks.snapshot)
            return
        self._reported_at, self._newest, self._final, self._done = {}, {}, set(), set()
        self._watermarks, self._uploading = WatermarkState(), None
        self._artifacts, self._on_record = {}, {}

    def _merge(self, report: WorkerState) -> None:
        worker = report.head.worker
        known, self._reports[worker] = self._reports.get(worker), report
        (self._final.add if report.head.final else self._final.discard)(worker)
        (self._done.add if report.head.done else self._done.discard)(worker)
        was = known.own if known is not None else {}
        for rank, each in report.own.items() if report.own is not was else ():
            before = was.get(rank)
            if before is each:
                continue
            if before is not None and before.holders != each.holders:
                # The new holders have to be filled first.
                self._watermarks = dataclasses.replace(self._watermarks, peer=None, anchor=None, copy=None)
            needed = self._needs.get(rank)
            if each.needs is not None and each.needs is not needed and each.needs != needed:
                self._needs[rank], self._cadence = each.needs, None
            for artifact in each.uploaded:
                self._record(rank, artifact)
        self._table.put(report)

    def _record(self, rank: int, artifact: RankArtifact) -> None:
        """Records a rank's newest upload."""
        before = self._artifacts.pop(rank, None)
        if before is not None:
            there = self._on_record[before.version]
            there.discard(rank)
            if not there:
                del self._on_record[before.version]
        self._artifacts[rank] = artifact
        self._on_record.setdefault(artifact.version, set()).add(rank)

    def _refuse(self, worker: int, why: str) -> None:
        if self._refused.get(worker) != why:
            log.warning("the report of worker %d is refused: %s", worker, why)
        self._refused[worker] = why
        self._state.count(refused_reports=1)
        self._publish_refusals()

    def _publish_refusals(self) -> None:
        """Publishes refused reports as a problem."""
        refused = sorted(self._refused.items())
        more = f", and so are those of {len(refused) - 1} other workers" if len(refused) > 1 else ""
        sentence = "".join(
            f"the report of worker {worker} is refused: {why}{more}. {_ADVICE}" for worker, why in refused[:1]
        )
        self._state.problem(BAD_REPORT, sentence)

    def next_verdict(self) -> TierVerdict | None:
        """Returns the verdict to send to all sidecars; None if it has not changed."""
        with self._lock:
            directive = self._state.directive
            # At the end of the job, a worker's silence changes the verdict as well.
            if directive is None or not (self._is_dirty or directive.phase is Phase.FINISH):
                return None
            self._enter(directive)
            self._recompute(directive)
            return None if self._verdict == self._sent else self._verdict

    def _recompute(self, directive: Directive) -> None:
        """Recomputes the verdict.
        An error leaves it as it was, because the end of this thread would end the sidecar."""
        try:
            world = directive.workers * directive.procs_per_worker
            self._watermarks, verdict = compute_watermarks(
                world, self._table, directive.history, self._watermarks, directive.policy.prove_steps
            )
            stored = [version for version in self._stored or () if directive.history.accepts(version)]
            upload = None
            if self._state.config.remote is not None:
                upload = next_upload(
                    self._watermarks,
                    directive.history,
                    self._table.shapes,
                    stored=stored,
                    every=directive.policy.remote_every,
                    current=self._uploading,
                    finishing=directive.phase is Phase.FINISH,
                )
            self._uploading, sizes = upload, (world, directive.policy.snapshot_every)
            if self._cadence is None or self._cadence[0] != sizes:
                self._cadence = sizes, decide(world, self._needs, sizes[1])
            verdict = dataclasses.replace(
                verdict,
                watermarks=dataclasses.replace(verdict.watermarks, remote=max(stored, default=None)),
                upload=upload,
                placement=directive.placement,
                stored=None if self._stored is None else tuple(sorted(stored)[-_MOST_STORED:]),
                cadence=self._cadence[1],
                over=self._is_over(directive, upload),
            )
            if verdict != self._verdict:
                self._verdict = verdict
        except Exception:
            log.exception("the verdict cannot be computed from the reports")
        self._is_dirty = False

    def _is_over(self, directive: Directive, upload: Version | None) -> bool:
        if directive.phase is not Phase.FINISH:
            return False
        there, procs = self._present(directive), directive.procs_per_worker
        if there - self._final:
            return False
        if upload is None:
            return True
        uploaded = self._on_record.get(upload, set())
        ranks = {rank: shape for rank, shape in self._table.ranks.items() if rank // procs in there}
        return is_hopeless(upload, directive.workers * procs, ranks, uploaded)

    def _present(self, directive: Directive) -> set[int]:
        now = self._clock()
        quiet = {
            worker: now - self._reported_at.setdefault(worker, now) for worker in range(directive.workers)
        }
        return workers_present(quiet, heartbeat(directive.workers))

    def _to_send(self, answers: dict[Caller, TierAnswer]) -> list[tuple[Caller, list[TierAnswer]]]:
        """Returns the messages of each connection. All of them get a new verdict."""
        with self._lock:
            some = [caller for caller in self._new | dict.fromkeys(answers) if caller in self._callers]
            callers, self._new = some if self._verdict == self._sent else self._callers, {}
            sent = [(caller, self.replies(caller, answers.get(caller))) for caller in callers]
        return [each for each in sent if each[1]]

    def replies(self, caller: Caller, answer: TierAnswer | None) -> list[TierAnswer]:
        """Returns what to send to a caller: the verdict if it is new to it, and the answer."""
        verdict = self._verdict
        before, caller.sent = caller.sent, verdict
        found = [] if answer is None else [answer]
        if verdict is not None and before is not verdict:
            if self._for_all.verdict is not verdict:  # one object for all, so that it is encoded once
                self._for_all = TierAnswer(verdict=verdict)
            found.insert(0, self._for_all)
        return found

    def record_sent(self, verdict: TierVerdict) -> None:
        """Records that this verdict was sent to all connected sidecars."""
        with self._lock:
            self._sent = verdict
        self._state.bump()

    def connect(self, caller: Caller) -> None:
        """Registers a connection, which may send updates from then on."""
        with self._lock:
            self._callers[caller] = self._new[caller] = None
            self._connected += 1
            caller.serial = self._connected

    def disconnect(self, caller: Caller) -> None:
        with self._lock:
            self._callers.pop(caller, None)
            self._new.pop(caller, None)

    def enqueue(self, caller: Caller, text: bytes) -> None:
        """Queues a `ReportUpdate` for the next batch. Raises Malformed if the last one is unanswered.
        It takes no lock while others are queued, because the caller must not be kept waiting."""
        if caller.has_update:
            raise Malformed("the answer to the last one has not come yet")
        caller.has_update = True
        self._inbox.append((caller, text))
        if not self._has_updates:
            self._has_updates = True
            with self._lock:
                self._dirty.notify_all()

    @property
    def most_callers(self) -> int:
        """Returns the limit of connections; 0 unless this is worker 0.

        It allows two per worker, because one may reconnect before its old connection is closed. All may
        connect before the first directive, which gives their number.
        """
        directive = self._state.directive
        there = directive.workers if directive is not None else _WORKERS_BEFORE_DIRECTIVE
        return 2 * there + _EXTRA_CLIENTS if self._state.config.worker == 0 else 0

    def stored(self, versions: tuple[Version, ...]) -> None:
        with self._lock:
            self._stored = versions
            self._is_dirty = True
            self._dirty.notify_all()

    def manifest(self) -> Manifest | None:
        """Returns the manifest to write: every rank has uploaded its version, and it has none yet."""
        with self._lock:
            directive, verdict = self._state.directive, self._verdict
            if (
                directive is None
                or verdict is None
                or verdict.attempt != directive.attempt
                or verdict.upload is None
            ):
                return None
            world = directive.workers * directive.procs_per_worker
            there = self._on_record.get(verdict.upload, set())
            if len(there) < world or verdict.upload in (self._stored or ()) or there != set(range(world)):
                return None
            return Manifest(
                job=self._state.config.job,
                job_uid=directive.job_uid,
                version=verdict.upload,
                world_size=world,
                artifacts=tuple(self._artifacts[rank] for rank in range(world)),
                created=time.time(),
            )

    @property
    def may_go(self) -> bool:
        """Returns whether the job is over and all connected sidecars were sent that verdict."""
        with self._lock:
            return self._sent is not None and self._sent.over and self._sent.attempt == self._attempt

    def waits_for(self) -> list[int]:
        """Returns the present workers that may still add something at the end of the job."""
        directive = self._state.directive
        with self._lock:
            return [] if directive is None else sorted(self._present(directive) - self._final)


def _deliver(sent: list[tuple[Caller, list[TierAnswer]]]) -> None:
    for caller, answers in sent:
        for answer in answers:
            caller.send(answer)
