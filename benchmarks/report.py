"""The table, for a terminal and a page, the numbers behind it, why a figure is missed, and pictures.

Pictures have Okabe and Ito's colours, and marks that differ in shape too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure as Sheet
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Figure, Sense, bytes_text

mpl.use("agg")


OURS, LIMIT, MISSED = "#0072B2", "#000000", "#D55E00"
SECOND, THIRD = "#56B4E9", "#E69F00"
_STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "svg.fonttype": "none",
    "svg.hashsalt": "tiercheck",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}
Data = dict[str, Any]


def draw(data: dict[str, Data], figures: list[Figure], folder: Path) -> dict[str, str]:
    """Draws every picture that there are numbers for, as SVG. Returns captions by file name."""
    drawn = {}
    with mpl.rc_context(_STYLE):
        for name, caption, sheet in (
            ("overview", "Promised figures: better (right) or worse (left).", overview(figures)),
            ("ettr", "Simulated ETTR.", ettr(data.get("ettr", {}))),
        ):
            if sheet is not None:
                sheet.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(sheet)
                drawn[name] = caption
    return drawn


def overview(figures: list[Figure]) -> Sheet | None:
    """One mark per promise, on a scale on which 1 is just what was promised."""
    judged = [figure for figure in figures if figure.ratio is not None and figure.bound]
    if not judged:
        return None
    sheet, axes = plt.subplots(figsize=(10, 1.2 + 0.34 * len(judged)))
    for row, figure in enumerate(reversed(judged)):
        assert figure.ratio is not None
        assert figure.bound is not None
        better = (
            figure.bound / max(figure.ratio, 1e-9)
            if figure.sense is Sense.AT_MOST
            else figure.ratio / figure.bound
        )
        better = min(max(better, 1e-2), 1e3)
        colour = OURS if figure.reached else MISSED
        axes.plot([1, better], [row, row], color=colour, linewidth=2, alpha=0.5)
        axes.plot(better, row, marker="o" if figure.reached else "X", markersize=8, color=colour)
        axes.annotate(
            f"{figure.ratio_text} ({figure.bound_text})",
            (better, row),
            xytext=(10 if better >= 1 else -10, 0),
            textcoords="offset points",
            va="center",
            ha="left" if better >= 1 else "right",
            fontsize=9,
        )
    axes.axvline(1, color=LIMIT, linewidth=1)
    axes.set_yticks(range(len(judged)), [figure.name for figure in reversed(judged)], fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.25) / 12, max(high, 4) * 12)
    axes.set_title("Better than promised →", loc="left")
    axes.set_xlabel("times better than promised; dot: reached, cross: missed")
    axes.tick_params(axis="y", length=0)
    return sheet


def ettr(data: Data) -> Sheet | None:
    """By nodes and whose failures, peers as stars."""
    curves, nodes = data.get("curves"), data.get("nodes")
    if not curves or not nodes:
        return None
    sheet, sizes = plt.subplots(figsize=(8, 5.2))
    for (name, each), colour in zip(curves.items(), (OURS, SECOND, THIRD, MISSED), strict=True):
        sizes.semilogx(nodes, each["at this size"], marker="o", color=colour, label=f"failures as {name}")
        sizes.semilogx(nodes, each["measured"], linestyle="--", color=colour, linewidth=1)
        sizes.semilogx(nodes, each["store"], linestyle=":", color=colour, linewidth=1)
    for peer in data.get("peers", ()):
        left = peer["nodes"] > 500
        sizes.plot(peer["nodes"], peer["theirs"], "*", color=LIMIT, markersize=11)
        sizes.annotate(
            f"{peer['name']} {peer['theirs']:.2f} (ours {peer['ours']:.3f})", (peer["nodes"], peer["theirs"]),
            xytext=(-8 if left else -40, -9), textcoords="offset points", va="top", fontsize=8.5,
            ha="right" if left else "left",
        )  # fmt: skip
    sizes.minorticks_off()
    sizes.set_xticks(nodes, [f"{count:,}" for count in nodes])
    sizes.set_ylim(0.3, 1.01)
    sizes.set_xlabel(
        "nodes of 8 GPUs. Dashed: collectives start at once, small states.\n"
        "Dotted: everything from a store, every half hour (Daly)"
    )
    sizes.set_title("ETTR, simulated with recoveries measured on real kubelets")
    sizes.legend(loc="lower left", fontsize=9)
    return sheet


_THREAD = "Python in the training thread"

CAUSES = {
    _THREAD: "tensors are read one by one and have left the cache; torch's counters alone take 26 to 38 %",
    "peer copy authenticated": "a core tags 37 GB/s in its cache, 8 from memory",
    "verified local restore": "what is copied is read once more, to verify it",
    "verified peer restore": "new memory for slot and moments (what these cost: local restore's note)",
    "S3 restore over https": "Python's lock is taken for each TLS record",
    "S3": "each byte is digested on the way (0.06 to 0.13 s/GB); an upload begins with four calls",
    "peak memory of the operator": "48 KiB for each worker's connection, half of it OpenSSL's; 62 MiB idle",
    "restore of another size": "for each worker a handshake (11 %), its reports (19 %), 436 KB enciphered",
    "fault to all ranks' next step": "four ranks that load and replay share two cores, with imports of torch",
    "coordinator, 4000": "words of uploads are decoded one by one",
}
"""By the beginning of a figure's name."""


def explain(missed: Iterable[str]) -> list[str]:
    """A line for each kind of these figures."""
    found = dict.fromkeys(_kind(name) for name in missed)
    return [f"- {kind}: {CAUSES.get(kind, 'not profiled')}." for kind in found]


def _kind(name: str) -> str:
    known = _THREAD if name.startswith("the same with") else name
    return next((begin for begin in CAUSES if known.startswith(begin)), name)


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
    """That most entries ran on."""
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
        """With newer entries in the place of those of their names. `machine`: that of `found`."""
        entries = {entry.name: entry for entry in self.entries}
        for entry in found:
            former = entries.get(entry.name)
            if former is None or former.when <= entry.when:
                entries[entry.name] = entry
        before = [self.machine] if self.machine else []
        names = [entry.machine for entry in entries.values()]
        # `before` first: the page's machine changes only when most entries ran on another.
        most = max([*before, machine], key=lambda each: names.count(name_machine(each)))
        return Run(most, self.command, [entries[name] for name in order if name in entries])

    @property
    def figures(self) -> list[Figure]:
        return [figure for entry in self.entries for figure in entry.figures]

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.reached is False]


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
