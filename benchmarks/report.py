"""The table, for a terminal and for a page, and the numbers behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.amounts import bytes_text
from benchmarks.causes import explain
from benchmarks.figure import Figure
from benchmarks.plots import draw

COLUMNS = ("figure", "ours", "limit or peer", "ratio", "must reach", "reached?")


@dataclass(frozen=True)
class Entry:
    """What one benchmark found, and when."""

    name: str
    title: str
    figures: list[Figure]
    data: dict[str, Any]
    when: str
    commit: str
    seconds: float
    load: float
    """Of the machine, before it began."""
    machine: str = ""
    """Which it ran on, in words. Empty: that of the page."""

    @staticmethod
    def read(file: Path) -> Entry | None:
        """None if it was never run to its end."""
        if not file.exists():
            return None
        plain = json.loads(file.read_text())
        return Entry.of(plain) if "name" in plain else None

    @staticmethod
    def of(plain: dict[str, Any]) -> Entry:
        """Inverse of `plain`."""
        return Entry(**{**plain, "figures": [Figure.read(each) for each in plain["figures"]]})

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.__dict__, "figures": [figure.plain() for figure in self.figures]}


@dataclass(frozen=True)
class Run:
    """Everything that is published together."""

    machine: dict[str, Any]
    """Of the newest entries."""
    command: str
    entries: list[Entry]

    @staticmethod
    def read(folder: Path) -> Run:
        """What `publish` wrote there."""
        plain = json.loads((folder / "results.json").read_text())
        named = name_machine(plain["machine"])
        entries = [Entry.of(each) for each in plain["benchmarks"]]
        return Run(
            plain["machine"],
            plain["command"],
            [entry if entry.machine else replace(entry, machine=named) for entry in entries],
        )

    def take_in(self, found: Iterable[Entry], machine: dict[str, Any], order: Iterable[str]) -> Run:
        """With newer entries in the place of those of their names."""
        entries = {entry.name: entry for entry in self.entries}
        for entry in found:
            former = entries.get(entry.name)
            if former is None or former.when <= entry.when:
                entries[entry.name] = entry
        return Run(machine, self.command, [entries[name] for name in order if name in entries])

    @property
    def figures(self) -> list[Figure]:
        return [figure for entry in self.entries for figure in entry.figures]

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.reached is False]

    @property
    def not_run(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.ratio is None]


def name_machine(machine: dict[str, Any]) -> str:
    """In short, so that figures of two can stand beside each other."""
    return f"{machine['processor']}, {machine['cores']} cores"


def cells(figure: Figure) -> tuple[str, ...]:
    """One row, in the order of COLUMNS."""
    return figure.name, figure.ours, figure.against, figure.ratio_text, figure.bound_text, figure.verdict


def print_table(run: Run) -> None:
    """To the terminal, misses in words below."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    table = Table(title="TierCheck benchmarks", title_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(
            column, justify="right" if column in ("ratio", "must reach") else "left", overflow="fold"
        )
    for entry in run.entries:
        for figure in entry.figures:
            style = {True: "", False: "bold", None: "dim"}[figure.reached]
            table.add_row(*cells(figure), style=style)
        table.add_section()
    console.print(table)
    console.print(summary(run))
    for figure in run.missed:
        console.print(
            f"  missed: {figure.name}: {figure.ratio_text}, promised {figure.bound_text}. {figure.note}"
        )


def summary(run: Run) -> str:
    """In one sentence."""
    promised = [figure for figure in run.figures if figure.bound is not None]
    reached = sum(figure.reached is True for figure in promised)
    return (
        f"{reached} of {len(promised)} promised figures reached, {len(run.missed)} missed, "
        f"{sum(figure.ratio is None for figure in promised)} not run."
    )


def publish(run: Run, folder: Path) -> None:
    """results.json, results.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "machine": run.machine,
        "command": run.command,
        "benchmarks": [entry.plain() for entry in run.entries],
    }
    (folder / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    pictures = draw({entry.name: entry.data for entry in run.entries}, run.figures, folder)
    (folder / "results.md").write_text(page(run, pictures))


def page(run: Run, pictures: dict[str, str]) -> str:
    """Markdown. `pictures`: caption by file name, without its ending."""
    machine = run.machine
    here = name_machine(machine)
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{run.command}`. {summary(run)}",
        "",
        f"Machine: {machine['processor']}, {machine['cores']} cores, "
        f"{bytes_text(machine['memory_bytes'])} of memory, "
        f"GPU: {machine['gpu']}, {machine['system']}, Python {machine['python']};",
        ", ".join(f"{name} {version}" for name, version in machine["packages"].items()) + ".",
        "",
        "Ours and the other ran in turn on the same work. Figures are the best of several turns, for "
        "everybody: other work only adds.",
        "",
        "| figure | ours | limit or peer | ratio | promised | note |",
        "| --- | --- | --- | ---: | --- | --- |",
        *(
            _row(*cells(figure)[:4], _promised(figure), figure.note)
            for figure in run.figures
            if figure.bound is not None
        ),
        "",
        "Figures without a promise are in [results.json](results.json).",
    ]
    for name, caption in pictures.items():
        lines += ["", f"![{caption}]({name}.svg)"]
    if run.missed:
        lines += ["", "## Why missed", "", *explain(figure.name for figure in run.missed)]
    lines += ["", "## When (load before, commit)", ""]
    for entry in run.entries:
        on = f", {entry.machine}" if entry.machine not in ("", here) else ""
        lines.append(f"{entry.name} {entry.when[:10]} ({entry.load}, {entry.commit}{on}),")
    lines[-1] = lines[-1].removesuffix(",") + "."
    return "\n".join(lines) + "\n"


def _promised(figure: Figure) -> str:
    """The bound, and whether it was kept where it was not."""
    return f"{figure.bound_text} **MISSED**" if figure.reached is False else figure.bound_text


def _row(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
