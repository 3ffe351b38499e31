"""Plays one row of the matrix: hurts the training, watches, and says whether it was right."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from training import WORKER, Step, Training, gap_around

from tiercheck_operator.model.conditions import Cause

_CAUSES = {cause.value for cause in Cause if not cause.planned}


@dataclass
class Play:
    """Faults of one training, one after the other."""

    training: Training
    report: Report

    def begin(self) -> None:
        """Waits until the training is protected. Where the faults before have left too many workers in one
        rack, they are spread anew, as an owner would do it: suspended, and resumed."""
        training = self.training
        training.wait("training to be protected", lambda _: training.is_protected() or self._crowded())
        if self._crowded() or self._most_in_one_rack() > 2:
            training.suspend()
            training.patch({"suspend": False})
        # The first steps of an attempt are slow, and their copies come a moment later: a fault hits a job
        # that is on its way.
        training.wait("training to be on its way", lambda _: training.is_on_its_way())

    def _most_in_one_rack(self) -> int:
        workers = [pod for pod in self.training.pods() if WORKER in pod["metadata"]["labels"]]
        nodes = [self.training.testbed.node(pod["spec"]["nodeName"]).number for pod in workers]
        return max(Counter((number + 1) // 2 for number in nodes).values(), default=0)

    def _crowded(self) -> bool:
        status, reason = self.training.status, self.training.reason("Protected")
        return (
            status.get("phase") == "Running" and "recovery" not in status and reason == "UnprotectedWorkers"
        )

    def recover(
        self,
        fault: str,
        inject: Callable[[], object] | tuple[str, int],
        *,
        causes: Collection[Cause],
        replaced: Collection[int] = (),
        bound: float | None = None,
        again_at_most: int = 1,
        attempts: Collection[int] = (1,),
        restarted: int | None = None,
    ) -> Row:
        """`inject`: what hurts it, or the word of a fault and a worker. `causes`: any of them may be told.
        `replaced`: the workers that get another pod, and nobody else. `restarted`: how many processes are
        started anew, if that is certain."""
        training = self.training
        training.wait_until_protected()
        before, pods, containers = training.attempt, self._pods(), training.trainers()
        began = time.time()
        if isinstance(inject, tuple):
            training.inject_fault(*inject)
        else:
            inject()
        training.wait("an attempt", lambda _: training.attempt > before)
        training.wait("training to be protected", lambda _: training.is_protected() or self._crowded())
        status, steps = training.status, training.steps
        summary = status["lastRecovery"]
        first = next(entry for entry in steps if entry.attempt > before and entry.time > began)
        told = [event["reason"] for event in training.events(began) if event["reason"] in _CAUSES]
        now = self._pods()
        changed = {worker for worker in now if now[worker] != pods.get(worker)}
        released = training.released_after(began)
        row = Row(
            fault=fault,
            told=", ".join(dict.fromkeys(told)),
            tiers=", ".join(
                f"{count} {tier}" for tier, count in (summary.get("tiers") or {}).items() if count
            ),
            again=trained_again(steps, before),
            lost_told=sum(each["lostSteps"] for each in status["recoveries"] if each["attempt"] > before),
            detect=summary.get("detectSeconds"),
            ours=None if released is None else released - began,
            next_step=first.time - began,
            replaced=len(changed),
            restarted=int(summary["restarted"]),
            pause=gap_around(steps, began),
            bound=bound,
        )
        self.report.add(row)
        spent = training.attempt - before
        assert spent in attempts, f"{spent} attempts were spent: {training.events(began)}"
        assert told, "no Event told a cause"
        assert set(told) <= {cause.value for cause in causes}, training.events(began)
        assert summary["cause"] in {cause.value for cause in causes}, summary
        assert changed == set(replaced), (
            f"other pods were replaced than {sorted(replaced)}: {sorted(changed)}"
        )
        if restarted is not None:
            assert row.restarted == restarted, f"{row.restarted} processes were started anew"
            kept = [pods[worker] for worker in pods if worker not in changed]
            assert [training.trainers()[pod] for pod in kept] == [containers[pod] for pod in kept]
        assert row.again is not None
        assert row.again <= again_at_most * spent, f"{row.again} steps were trained again"
        told_lost = row.lost_told or 0
        assert told_lost >= row.again - spent, f"{told_lost} lost steps were told, {row.again} it was"
        if (
            0 not in changed
        ):  # else its last lines may be lost with it, and the status knows more than the log
            assert told_lost <= row.again + spent, f"{told_lost} lost steps were told, {row.again} it was"
        return row

    def leave_alone(
        self,
        fault: str,
        inject: Callable[[], object],
        *,
        told: Callable[[], str] | None = None,
        pause_at_most: float = 20.0,
    ) -> Row:
        """Training goes on through the fault, whatever fails on our side. `told`: what the job says
        meanwhile; empty: not yet."""
        training = self.training
        training.wait_until_protected()
        before, pods, began = training.attempt, self._pods(), time.time()
        heard: list[str] = []

        def listen() -> None:
            if told is not None and not heard and told():
                heard.append(f"{told()} after {time.time() - began:.0f} s")

        self._listening(inject, listen)
        went = training.step
        training.wait_for_step(went + 5)
        training.wait_until_protected()
        row = Row(
            fault,
            ", ".join(heard) or "–",
            replaced=len(set(self._pods().values()) - set(pods.values())),
            pause=gap_around(training.steps, began),
        )
        self.report.add(row)
        assert training.attempt == before, (
            f"a healthy training was stopped: {training.status.get('lastRecovery')}"
        )
        assert self._pods() == pods, "pods of a healthy training were replaced"
        assert not training.pods_deleted(began)
        if told is not None:
            assert heard, "the job did not tell that something was wrong"
        assert row.pause is not None
        assert row.pause < pause_at_most, f"training stood still for {row.pause:.0f} s"
        return row

    def _pods(self) -> dict[int, str]:
        return {
            int(pod["metadata"]["labels"][WORKER]): pod["metadata"]["name"]
            for pod in self.training.living_pods()
            if WORKER in pod["metadata"]["labels"]
        }

    @staticmethod
    def _listening(inject: Callable[[], object], listen: Callable[[], None]) -> None:
        """Runs `inject` in a thread of its own, and listens until a while after it."""
        thread = threading.Thread(target=inject)
        thread.start()
        end = time.monotonic() + 5
        while thread.is_alive() or time.monotonic() < end:
            listen()
            time.sleep(0.1)
            if thread.is_alive():
                end = time.monotonic() + 5


def trained_again(steps: list[Step], before: int) -> int:
    """Steps that attempts after `before` train once more, whether they have got so far or not."""
    again, newest, attempt = 0, 0, 0
    for entry in steps:
        if entry.attempt > before and entry.attempt != attempt:
            again += max(0, newest - entry.step + 1)
        newest, attempt = max(newest, entry.step), entry.attempt
    return again


# The matrix as a table: one row per fault, with what the job said of it and what the logs say.

HEAD = (
    "| what failed | what the job told | came back from | steps trained again (told) | detect | ours | "
    "next step | "
    "pods replaced | new processes | longest pause |\n" + "| --- " * 10 + "|"
)


@dataclass(frozen=True)
class Row:
    """Seconds are of wall clock; None: there was nothing to measure."""

    fault: str
    told: str
    """Causes, in the order of the Events; or the condition, where training went on."""
    tiers: str = ""
    again: int | None = None
    """Steps that the trainers' log shows twice."""
    lost_told: int | None = None
    detect: float | None = None
    ours: float | None = None
    """From the fault to the release of the trainers, without Python's and torch's start."""
    next_step: float | None = None
    replaced: int = 0
    restarted: int | None = None
    """Processes that were started anew."""
    pause: float | None = None
    """The longest time between two steps."""
    bound: float | None = None
    """Seconds that `ours` may take on an idle cluster."""


class Report:
    """Rows are written down at once, so that a run that is broken off leaves what it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        self.verdicts: list[str] = []
        """Sentences below the table."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"\n{_line(row)}", flush=True)
        with open(self._path.with_suffix(".jsonl"), "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def write(self, root: Path) -> None:
        self._path.write_text(
            "\n".join([_machine(root), "", HEAD, *map(_line, self.rows), "", *self.verdicts, ""])
        )


def _line(row: Row) -> str:
    again = "–" if row.again is None else f"{row.again} ({row.lost_told})"
    ours = _seconds(row.ours)
    if row.bound is not None and row.ours is not None and row.ours > row.bound:
        ours += f" **(over {row.bound:.0f})**"
    cells = (
        row.fault, row.told, row.tiers or "–", again, _seconds(row.detect), ours, _seconds(row.next_step),
        str(row.replaced), "–" if row.restarted is None else str(row.restarted), _seconds(row.pause),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _machine(root: Path) -> str:
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip() or 'unknown'}, {os.cpu_count()} "
        "cores for all nodes and the control "
        f"plane, Linux {platform.release()}, load at the end {load}."
    )
