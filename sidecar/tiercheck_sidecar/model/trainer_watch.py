"""Tracks the training command by the messages of its launcher and ranks, and by their silence.

A launcher waits for the release of an attempt once it has reported so for that attempt: until then, processes
of an earlier one may still be there, and hold a GPU.

A launcher that vanishes while the command ran means that the trainer container was restarted: everything in
it is gone, although no exit was reported. It is given a moment to reconnect and report that the command still
runs, because a restart of the sidecar has the same symptoms.

A rank that makes no step has hung if that is unusual for this job, not by a guessed limit. The limit grows
with the job's own step time and with the longest pause that was seen between two of its steps (an evaluation,
a checkpoint of the user's own), so that what happened once without harm is no hang the next time. A rank that
has closed its connection is not watched: it has closed its Checkpointer or ended, as is detected elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from tiercheck.protocol.directive import HangLimits
from tiercheck.protocol.local import LauncherEvent
from tiercheck.protocol.names import COLLECTIVE_FAILED, CONTAINER_RESTARTED, VANISHED
from tiercheck.protocol.report import Exact, RankFailure, ResumeProof, TrainerReport, TrainerState

_PAUSES = 3.0
"""The limit, in multiples of the longest pause that was seen."""
_ASLEEP = 10.0
"""Seconds between two checks that mean that this process was suspended; then all limits start over."""


@dataclass
class _Rank:
    step: int
    at: float
    """The time of its last sign of life."""
    here: bool = True


class StallWatch:
    """Detects hung local ranks in one attempt. Not thread-safe: the state's lock guards it.
    Times are unix seconds by one clock."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._started: float | None = None
        self._pause = 0.0
        """Seconds of the longest pause between two signs of life of a rank."""
        self._looked: float | None = None
        self._awake = 0.0

    def started(self, now: float) -> None:
        """Records that the command runs, or was found running."""
        self._started = now

    def progress(self, rank: int, step: int, now: float) -> None:
        """Records a sign of life of a rank that has reached `step`."""
        self._notice_sleep(now)
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(step, now)
            return
        if known.here:
            self._pause = max(self._pause, now - max(known.at, self._awake))
        known.step, known.at, known.here = max(step, known.step), now, True

    def _notice_sleep(self, now: float) -> None:
        if self._looked is not None and now - self._looked > _ASLEEP:
            self._awake = self._looked = now

    def left(self, rank: int) -> None:
        if rank in self._ranks:
            self._ranks[rank].here = False

    def slowest(self) -> tuple[int, int] | None:
        """Returns (rank, step) of the rank that is furthest behind; None: none has made a step."""
        found = min(((entry.step, rank) for rank, entry in self._ranks.items()), default=None)
        return None if found is None else (found[1], found[0])

    def stalled_since(
        self, now: float, limits: HangLimits | None, step_seconds: float | None
    ) -> float | None:
        """Returns the last sign of life of the longest silent rank, if that is too long ago."""
        self._notice_sleep(now)
        self._looked = now
        if limits is None:
            return None
        if not self._ranks:
            since, limit = self._started, limits.first_step
        else:
            since = min((entry.at for entry in self._ranks.values() if entry.here), default=None)
            limit = max(limits.seconds, limits.steps * (step_seconds or 0.0), _PAUSES * self._pause)
        if since is None or limit is None or now - max(since, self._awake) <= limit:
            return None
        return since


_GONE = "the process was gone without a word, as one is that was killed"
_WAITS = "its collective failed, and it waits for a new attempt"
_LATE = "it did not leave its step within spec.recovery.interruptSeconds"
COME_BACK_SECONDS = 3.0
"""Seconds of a launcher's silence after which its command counts as lost."""
_SMOOTHING = 0.2


@dataclass
class _Listener:
    """The second connection of a rank."""

    connection: object
    """None once it is closed, which is also how a process ends that was killed."""
    refusal: str
    """The reason why its process must end with its attempt; empty: it can stay."""
    left: int = 0
    """The attempt for which it has left its step; 0: none."""


class TrainerWatch:
    """Tracks one trainer container. Not thread-safe: the state's lock guards it."""

    def __init__(self) -> None:
        self.attempt = 0
        self.connected = False
        self._report = TrainerReport(TrainerState.ABSENT)
        self._last: tuple[LauncherEvent, float] | None = None
        self._silent_since: float | None = None
        self._not_finite: dict[int, int] = {}
        self._resumes: dict[int, ResumeProof] = {}
        self._stall = StallWatch()
        self._mute: int | None = None
        """The rank that disconnected first, if it had reported no failure."""
        self._listeners: dict[int, _Listener] = {}
        """The second connection of each rank."""
        self._listened: dict[int, str] = {}
        """Ranks that had such a connection as the attempt began, with the refusal."""

    @property
    def report(self) -> TrainerReport:
        if not self._listeners:
            return self._report
        refusals = [each.refusal for each in self._listeners.values() if each.refusal and each.connection]
        listens = sum(not each.refusal for each in self._listeners.values())
        return dataclasses.replace(
            self._report, listens=listens, refusal=self._report.refusal or next(iter(refusals), "")
        )

    @property
    def lost_container(self) -> bool:
        """Returns whether the attempt ended here unseen; a new launcher must not begin it again."""
        return self._report.reason == CONTAINER_RESTARTED

    def begin_attempt(self, attempt: int, resumed: bool, now: float) -> None:
        """Starts an attempt.
        `resumed`: it was released before this process began, so the command should be running."""
        self.attempt = attempt
        self._report = self._not_waiting()
        self._listeners = {rank: each for rank, each in self._listeners.items() if each.connection}
        self._listened = {rank: each.refusal for rank, each in self._listeners.items()}
        self._silent_since = self._mute = None
        self._not_finite, self._resumes, self._stall = {}, {}, StallWatch()
        if resumed:
            self._stall.started(now)
            self._report = TrainerReport(TrainerState.RUNNING)
            self._silent_since = now
        if self._last is not None and self._last[0].attempt == attempt:
            self.event(*self._last)

    def launcher_connected(self) -> None:
        """Records that a launcher has connected, which reports its state at once."""
        self.connected = True

    def launcher_gone(self, now: float) -> None:
        self.connected = False
        if self._report.state is TrainerState.RUNNING:
            self._silent_since = now
        elif self._report.state in (TrainerState.WAITING, TrainerState.ABSENT):
            self._report = TrainerReport(TrainerState.ABSENT)

    def listener_connected(self, rank: int, connection: object, refusal: str) -> None:
        """Records that the process of a rank may stay after its attempt, unless there is a `refusal`."""
        self._listeners[rank] = _Listener(connection, refusal)

    def step_left(self, rank: int, connection: object, attempt: int, failed: bool = False) -> None:
        """Records that a rank waits for the release of `attempt`.
        If a collective of that has `failed`, it waits for a newer one."""
        known = self._listeners.get(rank)
        if known is None or known.connection is not connection:
            return
        if not failed:
            known.left = attempt
        elif attempt == self.attempt and self._report.state is TrainerState.RUNNING:
            self.failing(RankFailure(rank, COLLECTIVE_FAILED, _WAITS, 0))
            self._report = dataclasses.replace(self._report, state=TrainerState.FAILED)

    def listener_gone(self, rank: int, connection: object) -> None:
        """Records that the process of a rank ends with its attempt, unless it reconnects.

        Until the next attempt it is reported as before: that it is gone says nothing about its loop."""
        known = self._listeners.get(rank)
        if known is not None and known.connection is connection:
            known.connection = None

    def listeners(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Returns those of the local `ranks` with processes that may stay."""
        known = {rank for rank, each in self._listeners.items() if each.connection and not each.refusal}
        return tuple(rank for rank in ranks if rank in known)

    def left(self, ranks: Iterable[int], attempt: int) -> tuple[int, ...]:
        """Returns those that have left their step for this attempt."""
        return tuple(rank for rank in self.listeners(ranks) if self._listeners[rank].left == attempt)

    def _why_ended(self, attempt: int) -> str:
        """Returns why the process of a rank that was there did not stay for this attempt, as a clause."""
        ended = set(self._listened).difference(self.left(self._listened, attempt))
        return next((f"rank {rank}: {self._listened[rank] or _LATE}" for rank in sorted(ended)), "")

    def event(self, event: LauncherEvent, now: float) -> None:
        self._last = (event, now)
        if event.attempt != self.attempt:
            if event.event == "idle" and self._silent_since is not None:
                self._lost(now)  # a launcher without the running attempt is a new one
            elif self._report.state is TrainerState.ABSENT:
                self._report = self._not_waiting()
            return
        self._report = dataclasses.replace(
            self._report, stuck=event.message if event.event == "stuck" else ""
        )
        if event.event == "started" and self._report.state is not TrainerState.FAILED:
            self._silent_since = None
            if self._report.state is not TrainerState.RUNNING:
                self._report = TrainerReport(TrainerState.RUNNING, started_at=now)
                self._stall.started(now)
            elif self._report.started_at is None:
                self._report = dataclasses.replace(self._report, started_at=now)
        elif event.event == "exited":
            self._silent_since = None
            state = TrainerState.SUCCEEDED if event.exit_code == 0 else TrainerState.FAILED
            failure = self._report.failure
            if failure is None and self._mute is not None and state is TrainerState.FAILED:
                failure = RankFailure(self._mute, VANISHED, _GONE, 0)
            self._report = dataclasses.replace(
                self._report,
                state=state,
                exit_code=event.exit_code,
                reason=event.reason,
                message=event.message,
                ended_at=now,
                failure=failure,
            )
        elif event.event == "idle" and self._silent_since is not None:
            self._lost(now)
        elif self._report.state in (TrainerState.ABSENT, TrainerState.WAITING):
            if event.event == "idle" and self.connected:  # not if it has gone since
                self._report = TrainerReport(
                    TrainerState.WAITING, stays=event.stays, refusal=self._why_ended(event.attempt)
                )
            elif event.event == "checking":
                self._report = TrainerReport(TrainerState.ABSENT, busy="runs failurePolicy.healthCheck")
            elif event.event == "unhealthy":
                self._report = TrainerReport(TrainerState.ABSENT, unhealthy=event.message)

    def tick(self, now: float, finishing: bool = False) -> bool:
        """Returns whether the silence of a launcher has just become too long.
        `finishing`: it is expected to end, and sends no report of that."""
        if self._silent_since is None or now - self._silent_since < COME_BACK_SECONDS:
            return False
        if finishing:
            self._silent_since = None
            self._report = dataclasses.replace(self._report, state=TrainerState.ABSENT, stalled_since=None)
        else:
            self._lost(now)
        return True

    def look_for_stall(self, now: float, limits: HangLimits | None) -> bool:
        """Returns whether a hang was just detected or has just ended."""
        report = self._report
        running = report.state is TrainerState.RUNNING
        since = self._stall.stalled_since(now, limits, report.step_seconds) if running else None
        if since == report.stalled_since:
            return False
        self._report = dataclasses.replace(report, stalled_since=since)
        return True

    def rank_left(self, rank: int, attempt: int) -> None:
        """Records that the connection of a rank is closed."""
        if attempt != self.attempt:
            return
        self._stall.left(rank)
        if self._mute is None and self._report.failure is None and self._report.state is TrainerState.RUNNING:
            self._mute = rank

    def progress(self, rank: int, step: int, step_seconds: float | None, now: float) -> None:
        """Records that a rank reached `step`, or is still there after it."""
        report = self._report
        if self._mute == rank:
            self._mute = None  # it only had to connect anew
        self._stall.progress(rank, step, now)
        slowest = self._stall.slowest() or (None, None)
        average = report.step_seconds
        if step_seconds is not None:
            average = step_seconds if average is None else average + _SMOOTHING * (step_seconds - average)
        self._report = dataclasses.replace(
            report,
            step=max(step, report.step or 0),
            step_seconds=average,
            first_step_at=now if report.first_step_at is None else report.first_step_at,
            stalled_since=None,
            slowest_rank=slowest[0],
            slowest_step=slowest[1],
        )

    def failing(self, failure: RankFailure) -> None:
        """Records that a rank is about to end.
        What breaks a collective explains the others' broken collectives, and so does a rank that is gone."""
        known, echo = self._report.failure, failure.reason == COLLECTIVE_FAILED
        if echo and self._mute is not None:
            return
        if known is None or (known.reason == COLLECTIVE_FAILED and not echo):
            self._report = dataclasses.replace(self._report, failure=failure)

    def not_finite(self, rank: int, steps: int) -> int:
        """Records that the sanity gate refused the last `steps` steps of `rank`; returns how many are new."""
        before = self._not_finite.get(rank, 0)
        self._not_finite[rank] = steps
        most = max(self._not_finite.values())
        if most != self._report.not_finite:
            self._report = dataclasses.replace(self._report, not_finite=most)
        return steps - before if steps > before else 0

    def resumed(self, proof: ResumeProof, local_ranks: int) -> None:
        """Records how a rank compared the steps that it trained again.
        One that could not compare decides for its worker only after all have answered."""
        self._resumes[proof.rank] = proof
        for exact in (Exact.DIFFERS, Exact.PROVEN, Exact.NOT_COMPARABLE):
            alike = [each for each in self._resumes.values() if each.exact is exact]
            found = max(alike, key=lambda each: each.suspected, default=None)  # the first of equals
            if found is not None and (exact is not Exact.NOT_COMPARABLE or len(self._resumes) == local_ranks):
                self._report = dataclasses.replace(self._report, resume=found)
                return

    def _not_waiting(self) -> TrainerReport:
        """Returns the state before the launcher waits, by its last message, about another attempt."""
        event = self._last[0] if self.connected and self._last is not None else None
        if event is None or event.event not in ("started", "stuck"):
            return TrainerReport(TrainerState.ABSENT)
        stuck = event.message if event.event == "stuck" else ""
        return TrainerReport(
            TrainerState.ABSENT, busy=f"ends the command of attempt {event.attempt}", stuck=stuck
        )

    def _lost(self, now: float) -> None:
        silent_since, self._silent_since = self._silent_since, None
        self._report = dataclasses.replace(
            self._report,
            state=TrainerState.FAILED,
            reason=CONTAINER_RESTARTED,
            message="the trainer container ended without saying so, and was restarted or is gone",
            ended_at=now if silent_since is None else silent_since,
        )
