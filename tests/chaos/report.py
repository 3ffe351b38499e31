"""The page about a campaign, and its picture: what struck, what it cost, what was broken."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import harness
from tests.chaos.campaign import Course, Outcome
from tests.chaos.stage import POINTS, WEIGHTS, Injection
from tiercheck_cli.plan.command import new_figure, remove_frame

PAGE, PICTURE = "chaos.md", "chaos"
_FOUND = "## What it found"
"""From here on the page is written by people, and kept."""
_KINDS = {
    name: kind
    for kind, names in {
        "trainers: crash, out of memory, container": ("crash", "out of memory", "container"),
        "pods: evict, delete, every pod": ("evict", "force delete", "every pod"),
        "nodes: one, a rack": ("node", "rack"),
        "network: cut, deaf; kubelet": ("cut", "deaf", "kubelet"),
        "sidecars: one, all": ("sidecar", "all sidecars"),
        "operator: killed, stopped": ("operator", "operator stopped"),
        "store: down, trouble, slow": ("store down", "store trouble", "store slow"),
    }.items()
    for name in names
}
"""Faults from outside, by what they are of."""


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """A row for each kind of place that was struck, failpoints before faults."""
    by_place: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        by_place[place(each.injection)].append(each)
    order = {
        place(Injection(0, name, "", 0, 0)): number
        for number, name in reversed([*enumerate((*POINTS, *WEIGHTS))])
    }
    lines = [
        "| where | strikes | worst pause | steps again | new attempts | well again, worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in sorted(by_place.items(), key=lambda item: order[item[0]]):
        lines.append(
            f"| {name} | {len(found)} | {max(each.pause for each in found):.1f} | "
            f"{sum(each.repeated for each in found)} "
            f"| {sum(each.attempts for each in found)} | {max(each.healed for each in found):.1f} |"
        )
    return lines


def place(injection: Injection) -> str:
    """Whose failpoints, and whether they are passed on the way back only; else what the fault was of."""
    point = injection.point
    if point is None:
        return _KINDS[injection.name]
    return f"{point.role}'s failpoints{', on the way back' if point.provoke else ''}"


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * 95 // 100) - 1)]


def summary(course: Course) -> list[str]:
    """What holds for all of it, in sentences."""
    struck = course.strikes
    missed = len(course.outcomes) - len(struck)
    lives = [each for each in struck if not each.injection.ends]
    hours = course.seconds / 3600
    again = sum(each.repeated for each in struck)
    broken = _counted(course)
    lines = [
        f"- **{len(struck)} strikes in {course.seconds / 60:.0f} minutes**, "
        f"{len(struck) / hours if hours else 0:.0f} an hour, seed "
        f"{course.plan.seed}; {missed} more were armed and not passed.",
        f"- **{len(course.broken)} promises broken**{': ' + broken if broken else ''}.",
        f"- {course.steps} steps in {course.attempts} attempts on {course.plan.workers} workers; {again} "
        "steps of rank 0 were made again. "
        f"{course.compared} losses and states compared.",
    ]
    if lives:
        pauses = [each.pause for each in lives]
        lines.append(
            f"- {len(lives)} strikes may end no training: pause median {statistics.median(pauses):.1f} s, "
            f"p95 {p95(pauses):.1f} s, "
            f"worst {max(pauses):.1f} s; {sum(each.attempts for each in lives)} new attempts."
        )
    ends = [each.pause for each in struck if each.injection.ends]
    if ends:
        lines.append(
            f"- {len(ends)} may: pause median {statistics.median(ends):.1f} s, p95 {p95(ends):.1f} s, "
            f"worst {max(ends):.1f} s."
        )
    return lines


def _counted(course: Course) -> str:
    counted: dict[str, int] = defaultdict(int)
    for each in course.broken:
        counted[each.promise] += 1
    return ", ".join(f"{count} × {promise}" for promise, count in counted.items())


def write(course: Course, folder: Path) -> None:
    """The page and the picture. What people have written at the end of the page stays."""
    page = folder / PAGE
    before = page.read_text() if page.exists() else ""
    rest = before[before.index(_FOUND) :] if _FOUND in before else f"{_FOUND}\n\nNothing yet.\n"
    about = harness.describe()
    lines = [
        "# Strikes on real processes",
        "",
        _INTRODUCTION,
        "",
        f"## The last campaign, {time.strftime('%Y-%m-%d')}, commit {about['commit']}",
        "",
        f"{about['cores']} cores of {about['processor']}, {about['system']}, Python {about['python']}. "
        "Seconds, of rank 0. "
        "A pause in which an attempt began contains the start of Python and torch.",
        "",
        *summary(course),
        "",
        f"![Pauses by what struck]({PICTURE}.svg)",
        "",
        *table(course.strikes),
        "",
        rest,
    ]
    page.write_text("\n".join(lines))
    draw(course, folder)


def draw(course: Course, folder: Path) -> None:
    """Each strike as a dot: its pause, by where it struck."""
    from benchmarks.report import LIMIT, MISSED, OURS  # takes longer to import than all else here

    struck = {each.injection.name for each in course.strikes}
    names = [name for name in reversed((*POINTS, *WEIGHTS)) if name in struck]
    with new_figure(9, 1 + 0.22 * len(names)) as sheet:
        axes = sheet.subplots()
        for each in course.strikes:
            colour, mark = (MISSED, "X") if each.injection.ends else (OURS, "o")
            row = names.index(each.injection.name)
            axes.plot(max(0.05, each.pause), row, mark, color=colour, alpha=0.5, markersize=5)
        axes.axvline(course.plan.pace, color=LIMIT, linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("longest pause between two new steps, seconds; line: the usual one")
        axes.set_title("Dots: must not end training. Crosses: end it", loc="left")
        remove_frame(axes, "x")
        sheet.savefig(folder / f"{PICTURE}.svg", metadata={"Date": None})
        sheet.savefig(folder / f"{PICTURE}.png", dpi=150)


_INTRODUCTION = """\
`make chaos N=500 SEED=0` trains one job on the laptop cluster: real processes, an S3 server, six nodes in
three racks, copies in another rack. A seed draws what strikes. A *failpoint* hits one process at one line:
SIGKILL, SIGSTOP, an exception, ENOSPC, EMFILE, EIO, a delay. A *fault* comes from outside. The next one
waits until the job has healed.

The [simulation's checker](../../tests/simulation/checker.py) reads the history ([what it asks
for](simulation.md#what-is-checked)). Besides, no error of ours may lead to a new attempt, and all must be
well within two minutes. Every loss and state must equal those of an undisturbed run, bit for bit. The exit
code is the number of broken promises."""
