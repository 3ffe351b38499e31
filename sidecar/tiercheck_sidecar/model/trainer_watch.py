"""Tracks the training command, from what its launcher and ranks say and from their silence.

A launcher waits for the release of an attempt when it has said so of that attempt: until then, processes of
an earlier one may still be there, and hold on to a GPU.

A launcher that vanishes while the command ran means that the trainer container was restarted: everything in
it is gone, although nobody reported an exit. It is given a moment to come back and say that the command still
runs, because it is also what a restart of the sidecar looks like.
"""

from __future__ import annotations

import dataclasses

from tiercheck.protocol.directive import HangLimits
from tiercheck.protocol.local import LauncherEvent
from tiercheck.protocol.names import COLLECTIVE_FAILED, CONTAINER_RESTARTED, VANISHED
from tiercheck.protocol.report import Exact, RankFailure, ResumeProof, TrainerReport, TrainerState
from tiercheck_sidecar.model.stall_watch import StallWatch

_GONE = "the process was gone without a word, as one is that was killed"
COME_BACK_SECONDS = 3.0
"""How long a launcher may be silent before its command counts as lost."""
_SMOOTHING = 0.2


class TrainerWatch:
    """Not thread-safe: the state's lock guards it."""

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
        """The rank that left first, if it said nothing before."""

    @property
    def report(self) -> TrainerReport:
        return self._report

    @property
    def lost_container(self) -> bool:
        """The attempt ended here unseen; a new launcher must not begin it again."""
        return self._report.reason == CONTAINER_RESTARTED

    def begin_attempt(self, attempt: int, resumed: bool, now: float) -> None:
        """`resumed`: the attempt was released before this process began, so the command should be running."""
        self.attempt = attempt
        self._report = self._not_waiting()
        self._silent_since = None
        self._not_finite = {}
        self._resumes = {}
        self._stall = StallWatch()
        self._mute = None
        if resumed:
            self._stall.started(now)
            self._report = TrainerReport(TrainerState.RUNNING)
            self._silent_since = now
        if self._last is not None and self._last[0].attempt == attempt:
            self.event(*self._last)

    def launcher_connected(self) -> None:
        """It says at once what it is doing."""
        self.connected = True

    def launcher_gone(self, now: float) -> None:
        self.connected = False
        if self._report.state is TrainerState.RUNNING:
            self._silent_since = now
        elif self._report.state in (TrainerState.WAITING, TrainerState.ABSENT):
            self._report = TrainerReport(TrainerState.ABSENT)

    def event(self, event: LauncherEvent, now: float) -> None:
        self._last = (event, now)
        if event.attempt != self.attempt:
            if event.event == "idle" and self._silent_since is not None:
                self._lost(now)  # a launcher that knows nothing of the running attempt is a new one
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
            if event.event == "idle" and self.connected:  # the word of one that has gone since is no word
                self._report = TrainerReport(TrainerState.WAITING)
            elif event.event == "checking":
                self._report = TrainerReport(TrainerState.ABSENT, busy="runs failurePolicy.healthCheck")
            elif event.event == "unhealthy":
                self._report = TrainerReport(TrainerState.ABSENT, unhealthy=event.message)

    def tick(self, now: float, finishing: bool = False) -> bool:
        """Whether the silence of a launcher has just become too long. `finishing`: it is meant to go, and
        says nothing about it."""
        if self._silent_since is None or now - self._silent_since < COME_BACK_SECONDS:
            return False
        if finishing:
            self._silent_since = None
            self._report = dataclasses.replace(self._report, state=TrainerState.ABSENT, stalled_since=None)
        else:
            self._lost(now)
        return True

    def look_for_stall(self, now: float, limits: HangLimits | None) -> bool:
        """Whether it has just become known that a rank has hung, or that none has any more."""
        report = self._report
        running = report.state is TrainerState.RUNNING
        since = self._stall.stalled_since(now, limits, report.step_seconds) if running else None
        if since == report.stalled_since:
            return False
        self._report = dataclasses.replace(report, stalled_since=since)
        return True

    def rank_left(self, rank: int, attempt: int) -> None:
        """Its connection is closed."""
        if attempt != self.attempt:
            return
        self._stall.left(rank)
        if self._mute is None and self._report.failure is None and self._report.state is TrainerState.RUNNING:
            self._mute = rank

    def progress(self, rank: int, step: int, step_seconds: float | None, now: float) -> None:
        """A rank reached `step`, or is still there after it."""
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
        """A rank is about to end. What breaks a collective explains the others' broken collectives, and so
        does a rank that is gone."""
        known, echo = self._report.failure, failure.reason == COLLECTIVE_FAILED
        if echo and self._mute is not None:
            return
        if known is None or (known.reason == COLLECTIVE_FAILED and not echo):
            self._report = dataclasses.replace(self._report, failure=failure)

    def not_finite(self, rank: int, steps: int) -> int:
        """The sanity gate refused the last `steps` steps of `rank`. Returns how many of them are news."""
        before = self._not_finite.get(rank, 0)
        self._not_finite[rank] = steps
        most = max(self._not_finite.values())
        if most != self._report.not_finite:
            self._report = dataclasses.replace(self._report, not_finite=most)
        return steps - before if steps > before else 0

    def resumed(self, proof: ResumeProof, local_ranks: int) -> None:
        """A rank has compared the steps that it trained again. One that could not says nothing about its
        worker before all have answered."""
        self._resumes[proof.rank] = proof
        for exact in (Exact.DIFFERS, Exact.PROVEN, Exact.NOT_COMPARABLE):
            found = next((each for each in self._resumes.values() if each.exact is exact), None)
            if found is not None and (exact is not Exact.NOT_COMPARABLE or len(self._resumes) == local_ranks):
                self._report = dataclasses.replace(self._report, resume=found)
                return

    def _not_waiting(self) -> TrainerReport:
        """Until the launcher says that it waits, by its last word, which was about another attempt."""
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
