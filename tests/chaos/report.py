"""The page about a campaign, and its picture: what struck, what it cost, what was broken."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import machine
from tests.chaos.campaign import Course, Outcome
from tests.chaos.injections import FAULTS, POINTS

PAGE, PICTURE = "chaos.md", "chaos"
_FOUND = "## What it found"
"""From here on the page is written by people, and kept."""


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """A row for each thing that struck, points before faults."""
    by_what: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        by_what[each.injection.name, each.injection.action].append(each)
    order = {name: place for place, name in enumerate((*POINTS, *FAULTS))}
    lines = [
        "| where | what | times | pause: median | p95 | worst | steps again, in all | new attempts | well again: median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, action), found in sorted(by_what.items(), key=lambda item: (order[item[0][0]], item[0][1])):
        pauses, healed = [each.pause for each in found], [each.healed for each in found if each.healed >= 0]
        lines.append(
            f"| {name} | {action or '–'} | {len(found)} | {statistics.median(pauses):.1f} | {p95(pauses):.1f} | {max(pauses):.1f} "
            f"| {sum(each.repeated for each in found)} | {sum(each.attempts for each in found)} "
            f"| {statistics.median(healed) if healed else -1:.1f} | {max(healed, default=-1):.1f} |"
        )
    return lines


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
        f"- **{len(struck)} strikes in {course.seconds / 60:.0f} minutes**, {len(struck) / hours if hours else 0:.0f} an hour, seed "
        f"{course.plan.seed}; {missed} more were armed at points that were not passed within 20 s.",
        f"- **{len(course.broken)} promises broken**{': ' + broken if broken else ''}.",
        f"- {course.steps} steps in {course.attempts} attempts on {course.plan.workers} workers; {again} steps of rank 0 were made once more. "
        f"{course.compared} losses and states were compared with those of an undisturbed run.",
    ]
    if lives:
        pauses = [each.pause for each in lives]
        lines.append(
            f"- {len(lives)} strikes were such as may end no training: pause median {statistics.median(pauses):.1f} s, p95 {p95(pauses):.1f} s, "
            f"worst {max(pauses):.1f} s; {sum(each.attempts for each in lives)} new attempts."
        )
    ends = [each.pause for each in struck if each.injection.ends]
    if ends:
        lines.append(
            f"- {len(ends)} were such as may: pause median {statistics.median(ends):.1f} s, p95 {p95(ends):.1f} s, worst {max(ends):.1f} s."
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
    about = machine.describe()
    lines = [
        "# Strikes on real processes",
        "",
        _INTRODUCTION,
        "",
        f"## The last campaign, {time.strftime('%Y-%m-%d')}, commit {about['commit']}",
        "",
        f"{about['cores']} cores of {about['processor']}, {about['system']}, Python {about['python']}. Seconds, of rank 0. Starting Python and torch, "
        "three at once, is part of every pause in which an attempt began.",
        "",
        *summary(course),
        "",
        f"![Pauses by what struck]({PICTURE}.svg)",
        "",
        *table(course.strikes),
        "",
        *(f"- Broken: {each}" for each in course.broken),
        *([""] if course.broken else []),
        rest,
    ]
    page.write_text("\n".join(lines))
    draw(course, folder)


def draw(course: Course, folder: Path) -> None:
    """Each strike as a dot: its pause, by where it struck."""
    import matplotlib as mpl  # takes longer to import than all else here

    from benchmarks.plots import LIMIT, MISSED, OURS, plt

    names = [name for name in (*POINTS, *FAULTS) if any(each.injection.name == name for each in course.strikes)]
    style = {"svg.fonttype": "none", "svg.hashsalt": "tiercheck", "font.size": 9, "figure.constrained_layout.use": True}
    with mpl.rc_context(style):
        sheet, axes = plt.subplots(figsize=(9, 1 + 0.22 * len(names)))
        for each in course.strikes:
            row = len(names) - 1 - names.index(each.injection.name)
            colour = MISSED if each.injection.ends else OURS
            axes.plot(
                max(0.05, each.pause), row, "X" if each.injection.ends else "o", color=colour, alpha=0.5, markersize=5
            )
        axes.axvline(course.plan.pace, color=LIMIT, linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yticks(range(len(names)), list(reversed(names)))
        axes.set_xlabel("longest pause between two new steps, seconds; line: the usual one")
        axes.set_title("Dots: must not end training. Crosses: end it", loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        sheet.savefig(folder / f"{PICTURE}.svg", metadata={"Date": None})
        sheet.savefig(folder / f"{PICTURE}.png", dpi=150)
        plt.close(sheet)


_INTRODUCTION = """`make chaos N=500 SEED=0` trains one job on the laptop cluster: the operator's process, sidecars, launchers and trainers as processes, an S3 server, six nodes in three racks with room for one worker each, copies in another rack. Every few seconds something strikes that a seed has drawn, and only
once the job has healed from what struck before: every rank has made a step beyond, newer versions are complete in own and peer memory, and the job says Protected. There are two kinds. A *failpoint* strikes one process at one line, where it hurts most
(`tiercheck/failpoints.py`): SIGKILL, SIGSTOP for 30 s, an exception that no code knows, ENOSPC, EMFILE, EIO, two seconds of nothing. A *fault* comes from outside: processes, containers, pods, nodes, racks, links, the store. Points that are passed only on the way back are
armed before a fault that leads there, so they are two failures at once.

A history is written from the outside: every status, every pod, every step that a rank makes with its loss and a digest of its state, every object in the store. The [simulation's checker](../../tests/simulation/checker.py) reads it ([what it asks for](simulation.md#what-is-checked)),
with these differences: whose memory holds what is not seen, so *committed is kept* means that no attempt goes back behind a version that was told to be complete in peer memory or in the store (in the store only, where a rack or every pod was lost); what strikes sidecars, the
operator, the store or the library by an error must lead to no new attempt at all; and all must be well within two minutes. In the end the job is told to finish, and every loss and every state that any rank ever told is compared with a run to which nothing happened, bit for bit. The exit
code is the number of broken promises."""
