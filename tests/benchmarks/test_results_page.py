"""docs/benchmarks/results.md shows the numbers of results.json, in short rows.

`python -m benchmarks --table` writes it anew.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.harness import ROOT, Figure
from benchmarks.report import Entry, Run, page

FOLDER = ROOT / "docs" / "benchmarks"
RUN = Run.read(FOLDER)


def test_the_page_shows_the_numbers() -> None:
    written = (FOLDER / "results.md").read_text()
    pictures = {
        name: caption for caption, name in re.findall(r"^!\[(.*)\]\((.*)\.svg\)$", written, re.MULTILINE)
    }
    assert list(pictures) == ["overview", "ettr"]
    assert page(RUN, pictures) == written


def test_a_note_is_short() -> None:
    assert [figure.note for figure in RUN.figures if len(figure.note.split()) > 15] == []


@pytest.mark.parametrize(
    ("ratio", "shown"), [(0.5, "| ≤ 1x |"), (2.0, "| ≤ 1x **MISSED** |"), (None, "| not measured |")]
)
def test_a_row_says_what_was_promised_and_whether_it_was_missed(ratio: float | None, shown: str) -> None:
    figure = Figure("waiting", ratio=ratio, bound=1.0)
    run = Run(
        RUN.machine, "make bench", [Entry("one", "One", [figure], {}, "2026-01-01T00:00", "abc", 1.0, 0.1)]
    )
    row = next(line for line in page(run, {}).splitlines() if line.startswith("| waiting"))
    assert shown in row
