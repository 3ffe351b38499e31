"""Hears which ranks have what where, and tells all sidecars what that adds up to.

Sidecar 0 is the coordinator. It keeps nothing that the sidecars would not tell it again, so losing it costs
nothing: until a new one has heard every rank in the current attempt, nothing is freed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.manifest import Manifest, RankArtifact
from tiercheck.protocol.version import Version
from tiercheck.supervised import describe
from tiercheck_sidecar.control.control_client import CallFailed, ControlClient
from tiercheck_sidecar.model.cadence import Needs, decide
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.versions.ending import is_hopeless, workers_present
from tiercheck_sidecar.versions.sound_reports import find_objection
from tiercheck_sidecar.versions.tiers import seconds_apart
from tiercheck_sidecar.versions.watermark import (
    Copy,
    RankTiers,
    TierReport,
    TierStanding,
    TierVerdict,
    judge,
    next_upload,
)

log = logging.getLogger(__name__)

_PUSHERS = 8
_LOOK_EVERY = 60.0
"""Seconds; who this is changes with a directive, and that wakes everybody."""


BAD_REPORT = "BadReport"
"""Reason of the problem that a worker's reports are refused."""
_ADVICE = (
    "What it reported before stands, and nothing new of its ranks is complete. Its pod's log says "
    "more; delete the pod if this lasts"
)

_TOLD = 20
"""Versions in the remote tier that everybody is told of, every second; worker 0 knows all."""


class NotNow(Exception):
    """A tier report that cannot be taken; the message is a sentence."""


class StaleReport(NotNow):
    """It is of an older attempt."""


class BadReport(NotNow):
    """It cannot be true, or cannot be reckoned with."""


class Coordinator:
    """Thread-safe. Idle unless this is worker 0."""

    def __init__(self, state: SidecarState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._lock = threading.RLock()
        self._dirty = threading.Condition(self._lock)
        self._attempt = 0
        self._placement = ""
        self._uploading: Version | None = None
        self._ranks: dict[int, RankTiers] = {}
        self._hosts: dict[int, str] = {}
        self._copies: dict[int, tuple[Copy, ...]] = {}
        self._heard: dict[int, float] = {}
        """When each worker said something last, whether or not it could be taken."""
        self._final: set[int] = set()
        self._done: set[int] = set()
        self._standing = TierStanding()
        self._needs: dict[int, Needs] = {}
        """Sizes are of the job, not of an attempt: so a new attempt knows its cadence before its ranks
        reserve."""
        self._stored: tuple[Version, ...] | None = None
        self._artifacts: dict[int, RankArtifact] = {}
        self._verdict: TierVerdict | None = None
        self._is_dirty = False
        self._told: TierVerdict | None = None
        self._proved: dict[int, TierReport] = {}
        """Each worker's newest report that all could be reckoned with."""
        self._unproved: dict[int, TierReport] = {}
        """What came since, the newest in the end."""
        self._refused: dict[int, str] = {}
        """By worker whose newest report was refused: why."""

    @property
    def may_go(self) -> bool:
        """Whether the job is over, and everybody who could be reached has been told."""
        with self._lock:
            return self._told is not None and self._told.over and self._told.attempt == self._attempt

    def waits_for(self) -> list[int]:
        """Workers of a job that is over that may still add something."""
        directive = self._state.directive
        with self._lock:
            return [] if directive is None else sorted(self._present(directive) - self._final)

    def hear(self, report: TierReport) -> TierVerdict:
        """Take a sidecar's word, and answer the newest verdict. Raises NotNow."""
        directive = self._state.directive
        if self._state.config.worker != 0:
            raise NotNow("this sidecar is not the coordinator")
        early = self._state.fence.refuse_future(report.attempt, directive)
        if early or directive is None:
            raise NotNow(early)
        late = self._state.fence.refuse_past(report.attempt, directive)
        if late:
            raise StaleReport(late)
        wrong = find_objection(report, directive)
        with self._lock:
            self._enter(directive)
            if wrong:
                self._refuse(report.worker, wrong)
            else:
                self._take(report, directive)
                wrong = "" if report.worker in self._unproved else self._refused.get(report.worker, "")
            verdict = self._verdict
            self._dirty.notify_all()
        self._tell_refusals()
        if wrong:
            raise BadReport(f"the report is refused: {wrong}")
        if verdict is None:
            raise NotNow("what is known cannot be reckoned with")
        return verdict

    def _take(self, report: TierReport, directive: Directive) -> None:
        """Raises NotNow."""
        worker = report.worker
        if worker not in self._refused:  # who is refused again and again is not waited for at the end
            self._heard[worker] = self._clock()
        if report.placement and report.placement != directive.placement:
            raise NotNow("holders change, and not everybody has heard of it")
        self._unproved.pop(worker, None)
        self._unproved[worker] = report
        self._merge(report)
        self._is_dirty = True
        if self._verdict is None or len(self._ranks) <= directive.procs_per_worker:
            self._reckon(directive)

    def _merge(self, report: TierReport) -> None:
        worker = report.worker
        self._hosts[worker] = report.host
        self._copies[worker] = report.copies
        self._final = self._final | {worker} if report.final else self._final - {worker}
        self._done = self._done | {worker} if report.done else self._done - {worker}
        for tiers in report.ranks:
            before = self._ranks.get(tiers.rank)
            if before is not None and before.holders != tiers.holders:
                # Protection begins anew.
                self._standing = dataclasses.replace(self._standing, peer=None, anchor=None, copy=None)
            self._ranks[tiers.rank] = tiers
            if tiers.needs is not None:
                self._needs[tiers.rank] = tiers.needs
            for artifact in tiers.uploaded:
                self._artifacts[tiers.rank] = artifact

    def _take_back(self, worker: int, directive: Directive) -> None:
        """The worker's unproved report. Whatever else it told before, it tells again within a second."""
        del self._unproved[worker]
        self._hosts.pop(worker, None)
        self._copies.pop(worker, None)
        self._final, self._done = self._final - {worker}, self._done - {worker}
        for rank in range(worker * directive.procs_per_worker, (worker + 1) * directive.procs_per_worker):
            self._ranks.pop(rank, None)
            self._artifacts.pop(rank, None)
        if worker in self._proved:
            self._merge(self._proved[worker])

    def _reckon(self, directive: Directive) -> None:
        """Judge. Where that fails, the newest reports are taken back until it does not, those of workers that
        were refused before first: nobody's report stops the others."""
        suspects = sorted(reversed(self._unproved), key=lambda worker: worker not in self._refused)
        blamed: tuple[int, str] | None = None
        while True:
            try:
                self._judge(directive)
                break
            except Exception as error:
                self._is_dirty = False
                if not suspects:
                    log.exception("what is known cannot be reckoned with")
                    return
                blamed = suspects.pop(0), f"it cannot be reckoned with ({describe(error)})"
                self._take_back(blamed[0], directive)
        self._proved |= self._unproved
        for worker in self._unproved:
            self._refused.pop(worker, None)
        self._unproved = {}
        if blamed is not None:
            self._refuse(*blamed)

    def _refuse(self, worker: int, why: str) -> None:
        if self._refused.get(worker) != why:
            log.warning("the report of worker %d is refused: %s", worker, why)
        self._refused[worker] = why
        self._state.count(refused_reports=1)

    def _tell_refusals(self) -> None:
        """Not under the lock."""
        with self._lock:
            refused = sorted(self._refused.items())
        more = f", and so are those of {len(refused) - 1} other workers" if len(refused) > 1 else ""
        told = "".join(
            f"the report of worker {worker} is refused: {why}{more}. {_ADVICE}" for worker, why in refused[:1]
        )
        self._state.problem(BAD_REPORT, told)

    def stored(self, versions: tuple[Version, ...]) -> None:
        """What the remote tier holds."""
        with self._lock:
            self._stored = versions
            self._is_dirty = True
            self._dirty.notify_all()

    def manifest(self) -> Manifest | None:
        """The manifest to write now: every rank's object is uploaded and no manifest names the version
        yet.
        """
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
            mine = {rank: each for rank, each in self._artifacts.items() if each.version == verdict.upload}
            if set(mine) != set(range(world)) or verdict.upload in (self._stored or ()):
                return None
            return Manifest(
                job=self._state.config.job,
                job_uid=directive.job_uid,
                version=verdict.upload,
                world_size=world,
                artifacts=tuple(mine[rank] for rank in sorted(mine)),
                created=time.time(),
            )

    def run(self) -> None:
        """Judge when something was heard, and tell everybody when the verdict changed. Begins when this
        becomes worker 0."""
        while not self._state.wait_until(lambda: self._state.config.worker == 0, _LOOK_EVERY):
            pass
        clients: dict[str, ControlClient] = {}
        with ThreadPoolExecutor(_PUSHERS, thread_name_prefix="verdict") as pool:
            while not self._state.stopping:
                with self._dirty:
                    self._dirty.wait_for(lambda: self._is_dirty or self._state.stopping, timeout=1.0)
                word = self.news()
                if word is None:
                    continue
                verdict, hosts = word
                clients = {
                    host: clients.get(host) or ControlClient(self._state.config, host) for host in hosts
                }
                list(pool.map(lambda client, word=verdict: _tell(client, word), clients.values()))
                self.announced(verdict)
                self._state.wait_until(lambda: False, seconds_apart(len(hosts)))

    def news(self) -> tuple[TierVerdict, list[str]] | None:
        """The verdict that everybody shall be told, and where they are; None: they have been."""
        with self._lock:
            directive = self._state.directive
            # At the end, that somebody says nothing is news too.
            if directive is None or not (self._is_dirty or directive.phase is Phase.FINISH):
                return None
            self._enter(directive)
            self._reckon(directive)
            verdict = self._verdict
            news = None if verdict is None or verdict == self._told else (verdict, self._audience(directive))
        self._tell_refusals()
        return news

    def announced(self, verdict: TierVerdict) -> None:
        """Everybody who could be reached has been told."""
        with self._lock:
            self._told = verdict
        self._state.bump()

    def _audience(self, directive: Directive) -> list[str]:
        """Where verdicts are sent to: at the end not to those who have gone."""
        ending = directive.phase is Phase.FINISH
        there = {0} | (self._present(directive) - self._done) if ending else set(self._hosts)
        return sorted({host for worker, host in self._hosts.items() if worker in there})

    def _present(self, directive: Directive) -> set[int]:
        now = self._clock()
        quiet = {worker: now - self._heard.setdefault(worker, now) for worker in range(directive.workers)}
        return workers_present(quiet, seconds_apart(directive.workers))

    def _is_over(self, directive: Directive, upload: Version | None) -> bool:
        if directive.phase is not Phase.FINISH:
            return False
        there, procs = self._present(directive), directive.procs_per_worker
        if there - self._final:
            return False
        if upload is None:
            return True
        uploaded = [rank for rank, each in self._artifacts.items() if each.version == upload]
        ranks = {rank: tiers for rank, tiers in self._ranks.items() if rank // procs in there}
        return is_hopeless(upload, directive.workers * procs, ranks, uploaded)

    def _enter(self, directive: Directive) -> None:
        if directive.attempt == self._attempt and directive.placement != self._placement:
            # Protection begins anew, and nothing counts that was said under the old placement.
            self._ranks, self._copies, self._verdict = {}, {}, None
            self._proved, self._unproved, self._refused = {}, {}, {}
            self._final = set(self._done)  # those may have gone, and add nothing under any placement
            self._standing = TierStanding(snapshot=self._standing.snapshot)
        self._placement = directive.placement
        if directive.attempt != self._attempt:
            self._attempt, self._ranks, self._hosts, self._copies = directive.attempt, {}, {}, {}
            self._heard, self._final, self._done = {}, set(), set()
            self._proved, self._unproved, self._refused = {}, {}, {}
            self._standing, self._verdict, self._artifacts = TierStanding(), None, {}
            self._uploading = None

    def _judge(self, directive: Directive) -> None:
        world = directive.workers * directive.procs_per_worker
        copies = [copy for each in self._copies.values() for copy in each]
        self._standing, verdict = judge(world, self._ranks, directive.history, self._standing, copies)
        stored = [version for version in self._stored or () if directive.history.accepts(version)]
        upload = None
        if self._state.config.remote is not None:
            upload = next_upload(
                self._standing,
                directive.history,
                self._ranks,
                stored=stored,
                every=directive.policy.remote_every,
                current=self._uploading,
                finishing=directive.phase is Phase.FINISH,
            )
        self._uploading = upload
        received = tuple(sorted(rank for rank, each in self._artifacts.items() if each.version == upload))
        self._verdict = dataclasses.replace(
            verdict,
            watermarks=dataclasses.replace(verdict.watermarks, remote=max(stored, default=None)),
            upload=upload,
            placement=directive.placement,
            received=received,
            stored=None if self._stored is None else tuple(sorted(stored)[-_TOLD:]),
            cadence=decide(world, self._needs, directive.policy.snapshot_every),
            over=self._is_over(directive, upload),
        )
        self._is_dirty = False


def _tell(client: ControlClient, verdict: TierVerdict) -> None:
    try:
        client.call("PUT", "/v1/watermarks", to_json(verdict))
    except CallFailed as error:
        log.debug("the verdict did not reach %s", error)  # it is asked for again within a second
    except Exception:  # of one of them: the others are told all the same
        log.exception("the verdict did not reach %s", client.host)
