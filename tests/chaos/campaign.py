"""Strikes a job that trains, one strike after the other, and checks the promises.

Each strike comes after the one before has healed; what it cost is noted.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.record import LifeChecker
from tests.chaos.stage import Injection, StruckStage, drawn, staged
from tests.simulation.checker import Broken

_PASSED_WITHIN = 20.0
"""Seconds in which a point that is armed should be passed."""
_NOTICED_WITHIN = 30.0
"""Seconds in which what ends a training should have led to a new attempt."""


@dataclass(frozen=True)
class Plan:
    seed: int
    injections: int
    seconds: float
    """No injection begins later."""
    workers: int = 3
    pace: float = 0.2
    """Seconds per step."""
    rest: tuple[float, float] = (0.5, 2.0)
    """Seconds between that all is well and the next strike, at least and at most."""
    stopped: float = 30.0
    """Seconds that a process which was stopped stays so."""
    bound: float = 120.0
    """Seconds after the end of a strike in which all must be well again. For machines as busy as those that
    tests run on: nothing is measured."""
    only: str = ""


@dataclass(frozen=True)
class Outcome:
    injection: Injection
    struck: bool
    """Not if the point was never passed."""
    pause: float = 0.0
    """Longest time between two steps that were made for the first time, seconds."""
    repeated: int = 0
    """Steps that were made once more."""
    attempts: int = 0
    """That began because of it."""
    healed: float = 0.0
    """Seconds from the strike until all was well again."""


@dataclass
class Course:
    """What became of a campaign."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    seconds: float = 0.0
    """From the first strike to the last that healed."""
    steps: int = 0
    attempts: int = 0
    compared: int = 0
    """Losses and states that were compared with those of the undisturbed run."""

    @property
    def strikes(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.struck]


def run(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Course:
    """All of it, unattended."""
    course = Course(plan)
    with staged(folder, plan.workers, plan.seed, plan.pace) as stage:
        _Campaign(plan, stage, course, tell).run()
    return course


class _Campaign:
    def __init__(self, plan: Plan, stage: StruckStage, course: Course, tell: Callable[[str], None]) -> None:
        self._plan, self._stage, self._course, self._tell = plan, stage, course, tell
        self._rng = random.Random(plan.seed)
        self._checker = LifeChecker()
        self._known = 0
        self._before = 0
        """The newest step when the last strike came."""

    def run(self) -> None:
        plan, stage = self._plan, self._stage
        if not self._heals(0, ("local", "peer", "remote"), "the start", 2 * plan.bound):
            self._check(all_of_it=True)
            return
        began = time.monotonic()
        for number in range(1, plan.injections + 1):
            if time.monotonic() - began > plan.seconds:
                break
            injection = drawn(number, self._rng, plan.workers, only=plan.only)
            rest = self._rng.uniform(*plan.rest)
            outcome = self._inject(injection)
            self._course.outcomes.append(outcome)
            self._course.seconds = time.monotonic() - began
            self._tell(_line(outcome, self._course))
            if not self._heals_after(outcome):
                break
            stage.rest(rest)
        self._course.attempts, self._course.steps = stage.attempt, stage.reached()
        stage.recorder.record("injection", name="the end", ends=False, costs_copies=False)
        if not stage.finish(plan.bound):
            stage.recorder.record(
                "stuck", why=f"the job did not end within {plan.bound:.0f} s: {stage.status.get('phase')}"
            )
        self._check(all_of_it=True)
        self._compare()

    # One strike

    def _inject(self, injection: Injection) -> Outcome:
        stage, recorder = self._stage, self._stage.recorder
        recorder.record(
            "injection", name=str(injection), ends=injection.ends, costs_copies=injection.costs_copies
        )
        before, reached, at = stage.attempt, stage.reached(), time.time()
        self._before = reached
        struck = self._strike(injection)
        if injection.fault is not None and injection.fault.ends:
            stage.comes(lambda: stage.attempt > before, _NOTICED_WITHIN)
        stage.undo()
        tiers = ("local", "peer", "remote") if injection.name.startswith("store") else ("local", "peer")
        well = self._heals(
            max(reached, stage.reached()) if not injection.ends else reached, tiers, str(injection)
        )
        pause, repeated = self._cost(at, reached)
        return Outcome(
            injection, struck, pause, repeated, stage.attempt - before, time.time() - at if well else -1.0
        )

    def _strike(self, injection: Injection) -> bool:
        stage, recorder = self._stage, self._stage.recorder
        whose = ""
        if injection.point is not None:
            whose = stage.process_of(injection)
            stage.arm(whose, injection)
        fault = injection.fault
        if fault is not None:
            name = injection.point.provoke if injection.point else injection.name
            worker = injection.worker
            if injection.point is not None and name == "crash":
                worker = (worker + 1) % self._plan.workers
            self._note(name, fault.ends)
            stage.inject_fault(name, worker)
            if injection.point is None:
                stage.rest(fault.seconds)
                return True
        strike = stage.struck(whose, _PASSED_WITHIN)
        if strike is None:
            return False
        recorder.record("fault", strike.at, name=injection.action)
        if injection.ends:
            self._note(injection.action, True)
        if injection.action == "stop":
            stage.rest(self._plan.stopped)
            stage.go_on(strike)
        return True

    def _note(self, name: str, ends: bool) -> None:
        recorder = self._stage.recorder
        recorder.record("fault", name=name)
        if ends:
            recorder.record("ended", pod="", attempt=self._stage.attempt, code=1)

    def _cost(self, since: float, reached: int) -> tuple[float, int]:
        """The longest pause since then, in seconds, and how many steps rank 0 made again."""
        made = self._stage.recorder.steps.get(0, [])
        newest, last, pause, repeated = reached - 1, since, 0.0, 0
        for at, step, _ in made:
            if at < since:
                continue
            if step <= newest:
                repeated += 1
                continue
            pause, last, newest = max(pause, at - last), at, step
        return pause, max(0, repeated)

    # Whether all is well

    def _heals(self, beyond: int, tiers: tuple[str, ...], after: str, within: float = 0.0) -> bool:
        stage, within = self._stage, within or self._plan.bound
        well = stage.comes(lambda: not stage.lacks(beyond, tiers), within)
        if not well:
            why = stage.lacks(beyond, tiers)
            stage.recorder.record("stuck", why=f"{within:.0f} s after {after}: {why}")
            self._tell(f"stuck after {after}: {why}\n{json.dumps(stage.status, indent=1)}")
        self._check()
        return well

    def _heals_after(self, outcome: Outcome) -> bool:
        """Whether the campaign may go on: what is stuck gets one more chance."""
        return outcome.healed >= 0 or self._heals(self._before, ("local", "peer"), "more patience")

    def _check(self, all_of_it: bool = False) -> None:
        self._checker.read(self._stage.recorder.take(all_of_it))
        for broken in self._checker.broken[self._known :]:
            self._tell(f"BROKEN {broken}")
        self._known = len(self._checker.broken)
        self._course.broken = list(self._checker.broken)

    # In the end

    def _compare(self) -> None:
        """Every loss and every state that any rank ever told, with those of a run that nothing happened
        to.
        """
        # torch: not before the cluster has what it needs of the processors
        from tests.cluster.trainer import undisturbed

        recorder, course = self._stage.recorder, self._course
        ended = set(recorder.ended.values())
        if len(recorder.ended) != self._plan.workers or len(ended) != 1:
            self._break("bit for bit", f"the ranks ended after steps {recorder.ended}")
        for rank in range(self._plan.workers):
            last = max((step for each, step in recorder.losses if each == rank), default=0)
            for step, (loss, state) in enumerate(undisturbed(rank, last), 1):
                told = recorder.losses.get((rank, step), set())
                course.compared += len(told)
                if not any(each[0] for each in told):
                    self._break("bit for bit", f"rank {rank} never made step {step}")
                elif wrong := told - {(loss, state), ("", state)}:
                    self._break(
                        "bit for bit",
                        f"step {step} of rank {rank} was {sorted(wrong)}, undisturbed {loss}, {state}",
                    )

    def _break(self, promise: str, why: str) -> None:
        broken = Broken(promise, why, time.time())
        self._course.broken.append(broken)
        self._tell(f"BROKEN {broken}")


def _line(outcome: Outcome, course: Course) -> str:
    what = f"{outcome.injection.number:4d} {course.seconds:6.0f} s  {outcome.injection}"
    if not outcome.struck:
        return f"{what}: was not passed"
    cost = f"pause {outcome.pause:.1f} s, {outcome.repeated} steps again, {outcome.attempts} new attempts"
    return f"{what}: {cost}, well after {outcome.healed:.1f} s"
