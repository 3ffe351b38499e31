"""What was found, for a terminal, as a page in markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.amounts import bytes_text
from benchmarks.figure import Figure
from benchmarks.gpu_acceptance.checks import Result, Status


def line(result: Result) -> str:
    """For a terminal, as soon as it is known."""
    told = "; ".join(part for part in (result.text, *map(written, result.figures)) if part)
    return (
        f"{result.status.value:8} {result.name:4}({result.seconds:.1f} s) {result.promise}\n           "
        f"   {told}"
    )


def written(figure: Figure) -> str:
    """In words, with its bound."""
    bound = "" if figure.bound is None else f" (must be {figure.bound_text})"
    about = f" [{figure.against}]" if figure.against else ""
    return f"{figure.name} {figure.ratio_text}{bound}{about}"


def summary(results: Sequence[Result]) -> str:
    """In one sentence."""
    counts = [(sum(result.status is status for result in results), status.value) for status in Status]
    return f"{len(results)} checks: " + ", ".join(f"{count} {name}" for count, name in counts if count) + "."


def numbers(machine: Mapping[str, Any], command: str, results: Sequence[Result]) -> dict[str, Any]:
    """For a file of JSON."""
    return {
        "machine": machine,
        "command": command,
        "checks": {result.name: result.plain() for result in results},
    }


def page(machine: Mapping[str, Any], command: str, results: Sequence[Result]) -> str:
    """Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        "# GPU acceptance",
        "",
        f"Written by `{command}` of commit {machine['commit']}. {summary(results)}",
        "",
        f"Machine: GPU: {machine['gpu']}, {machine['processor']}, {machine['cores']} cores, "
        f"{bytes_text(machine['memory_bytes'])} of memory, {machine['system']}, Python "
        f"{machine['python']}; {packages}.",
        "",
        "| check | promise | result | found | figures | took |",
        "| --- | --- | --- | --- | --- | ---: |",
    ]
    for result in results:
        status = "**FAILED**" if result.status is Status.FAILED else result.status.value
        figures = "; ".join(map(written, result.figures))
        cells = (result.name, result.promise, status, result.text, figures, f"{result.seconds:.0f} s")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
