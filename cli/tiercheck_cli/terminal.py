"""Writes answers to a terminal, a pipe, or a program that reads JSON or YAML.

Names, Events and messages of training scripts are untrusted, so all text passes through here, where control
characters are made visible: none of them moves a cursor, sets a title or fills a clipboard.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any

import typer
from rich import text as rich_text
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from tiercheck.redaction import CONTROLS, escape_controls

_CLUSTER = "Cluster"


class Output(str, Enum):
    """The form in which an answer is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace; default: the context's.", rich_help_panel=_CLUSTER),
]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig.", rich_help_panel=_CLUSTER)
]
Kubeconfig = Annotated[
    str | None,
    typer.Option("--kubeconfig", help="Default: $KUBECONFIG, then ~/.kube/config.", rich_help_panel=_CLUSTER),
]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="How to write the answer.")]


# Okabe and Ito's colours, which colour-blind users can distinguish: one for each meaning, in pictures too.
TIER_COLOURS = {"local": "#009E73", "peer": "#0072B2", "remote": "#CC79A7"}
PHASES = (
    ("detect", "noticed", "#999999"),
    ("restore", "state restored", "#E69F00"),
    ("start", "first new step", "#56B4E9"),
)
"""The parts of a recovery, in order of time: name, label, colour."""

_PIPE_WIDTH = 120
"""The number of columns if there is no terminal, unless $COLUMNS is set."""
_API = "cli.tiercheck.io/v1alpha1"
"""The version of the output for programs: it changes when a name or its meaning does."""


class Text(rich_text.Text):
    """Rich's text, with control characters escaped."""

    def __init__(self, text: str = "", *arguments: Any, **more: Any) -> None:
        super().__init__(escape_controls(text), *arguments, **more)

    def append(self, text: rich_text.Text | str, *arguments: Any, **more: Any) -> Text:
        super().append(escape_controls(text) if isinstance(text, str) else text, *arguments, **more)
        return self


class _Console(Console):
    def render_str(self, text: str, **more: Any) -> rich_text.Text:
        return super().render_str(escape_controls(text), **more)


class _Pipe(_Console):
    """Strips blanks at the ends of lines, so that piped output can be compared and quoted."""

    def print(self, *shown: Any, **how: Any) -> None:
        with self.capture() as captured:
            super().print(*shown, **how)
        self.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def console() -> Console:
    """Returns a console on stdout: colours on a terminal only, without NO_COLOR; "?" for unencodable text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    made = _Console(highlight=False, soft_wrap=False)
    if made.is_terminal:
        return made
    return _Pipe(highlight=False, width=None if "COLUMNS" in made._environ else _PIPE_WIDTH)


def columns(*headings: str | Column, **how: Any) -> Table:
    """Returns a table without lines."""
    return Table(*headings, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", **how)


def right(heading: str) -> Column:
    """Returns a right-aligned column, for numbers."""
    return Column(heading, justify="right")


def folded(heading: str) -> Column:
    """Returns a column for names that may be long."""
    return Column(heading, overflow="fold")


def facts(gap: int = 2) -> Table:
    """Returns a grid with a column of names and one of values."""
    return Table.grid(Column(style="dim", no_wrap=True), Column(ratio=1), padding=(0, gap, 0, 0))


def progress_bar() -> Progress:
    """Returns a progress bar on standard error, which is shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def to_plain_text(shown: RenderableType, width: int) -> str:
    """Renders `shown` as text without colours, for a file."""
    sink = io.StringIO()
    _Console(file=sink, width=width, highlight=False, color_system=None, force_terminal=False).print(shown)
    return "".join(line.rstrip() + "\n" for line in sink.getvalue().splitlines())


def say(sentence: object) -> None:
    """Prints the answer as one line."""
    print(escape_controls(str(sentence)), flush=True)


def remark(sentence: str) -> None:
    """Prints a remark for the user on standard error, beside the answer."""
    print(escape_controls(sentence), file=sys.stderr)


def write(answer: Mapping[str, Any], output: Output) -> None:
    """Writes JSON or YAML on standard output, with the version of its format."""
    answer = {"apiVersion": _API, **to_json_value(answer)}
    if output is Output.YAML:
        import yaml

        text = yaml.safe_dump(answer, sort_keys=False, allow_unicode=True, width=120)
        if CONTROLS.search(text):
            text = yaml.safe_dump(answer, sort_keys=False, width=120)
        print(text, end="")
    else:
        text = json.dumps(answer, indent=2, ensure_ascii=False)
        print(CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def show(
    output: Output, answer: Callable[[], Mapping[str, Any]], screen: Callable[[int], RenderableType]
) -> None:
    """Writes the answer for programs, or the screen for a terminal of its number of columns."""
    if output is not Output.TABLE:
        write(answer(), output)
    else:
        terminal = console()
        terminal.print(screen(terminal.width))


def to_json_value(value: Any) -> Any:
    """Returns `value` for JSON: camelCase fields, rounded numbers; keys that are data (node names) stay."""
    if dataclasses.is_dataclass(value):
        return {
            re.sub(r"_(\w)", lambda found: found[1].upper(), field.name): to_json_value(
                getattr(value, field.name)
            )
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: to_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(entry) for entry in value]
    return (
        (round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")) if isinstance(value, float) else value
    )


def clock(seconds: float) -> str:
    """Formats a time as 2026-11-21 13:05:09, in UTC: clusters and their users are in many places."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def short(seconds: float) -> str:
    """Formats an age or a duration: 40ms, 1.8s, 42s, 3m5s, 2h10m, 3d4h."""
    if seconds <= 0:
        return "0s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= (2 * size if unit == "m" else size):
            rest = whole % size // smaller
            return f"{whole // size}{unit}{f'{rest}{name}' if rest and whole < 10 * size else ''}"
    return f"{whole}s"


def age(seconds: float) -> str:
    """Formats as `short`, but in whole seconds: the clocks of two machines agree no better than that."""
    return short(seconds) if seconds >= 9.95 else f"{max(0, round(seconds))}s"
