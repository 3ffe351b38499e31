"""The benchmark command names every miss, and the results page shows no number that was not run.

`python -m benchmarks --table` writes it anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import ROOT, Figure, Sense
from benchmarks.report import Entry, Run, explain, page, publish, summary

REACHED = Figure("copy", "1 s", "2 s", 0.5, 1.0)
MISSED = Figure("rate", "1 GB/s", "2 GB/s", 0.5, 0.85, Sense.AT_LEAST, "the sockets were slow", "%")
NOT_RUN = Figure("gpu", bound=0.02, unit="%", note="not run: no GPU")
FOR_INFORMATION = Figure("delta", "2 ms", "step 1 s", 0.002, unit="%")
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 4 << 30,
    "gpu": "none",
    "system": "Linux",
    "python": "3.11",
    "packages": {"torch": "2.13"},
    "commit": "abc",
}

CURVE = {"at this size": [0.99, 0.9], "measured": [0.99, 0.95], "store": [0.9, 0.5]}
ETTR = {"nodes": [64, 512], "curves": {"llama-3": CURVE, "rsc-1": CURVE, "one": CURVE, "another": CURVE}}


def run() -> Run:
    figures = [REACHED, MISSED, NOT_RUN, FOR_INFORMATION]
    when, commit = "2026-01-01T00:00", "abc"
    entries = [
        Entry("blocked", "about blocked", figures, {}, when, commit, 1.0, 0.5),
        Entry("ettr", "about ettr", [], ETTR, when, commit, 1.0, 0.5),
    ]
    return Run(MACHINE, "make bench", entries)


@pytest.mark.parametrize(
    ("figure", "reached", "verdict"),
    [
        (REACHED, True, "yes"),
        (MISSED, False, "MISSED"),
        (NOT_RUN, None, "not run"),
        (FOR_INFORMATION, None, ""),
    ],
)
def test_verdict_follows_ratio_and_bound(figure: Figure, reached: bool | None, verdict: str) -> None:
    assert figure.reached is reached
    assert figure.verdict == verdict


def test_bound_itself_is_reached_from_either_side() -> None:
    assert Figure("a", ratio=1.0, bound=1.0).reached
    assert Figure("a", ratio=1.0, bound=1.0, sense=Sense.AT_LEAST).reached


@pytest.mark.parametrize("figure", [REACHED, MISSED, NOT_RUN, FOR_INFORMATION])
def test_figure_survives_the_file_of_results(figure: Figure) -> None:
    assert Figure.read(json.loads(json.dumps(figure.plain()))) == figure


def test_a_miss_is_explained_or_said_to_be_unexplained() -> None:
    assert "- rate: not profiled." in page(run(), {})
    explained = explain(
        ["peer copy authenticated, sent to a holder", "peer copy authenticated, fetched from a holder"]
    )
    assert len(explained) == 1
    assert explained[0].startswith("- peer copy authenticated: a core tags")


def test_a_miss_is_told_in_its_row_with_its_numbers() -> None:
    (row,) = [line for line in page(run(), {}).splitlines() if "**MISSED**" in line]
    for part in ("rate", "50.00 %", "≥ 85.00 %", "the sockets were slow"):
        assert part in row


def test_what_was_not_run_is_counted_apart() -> None:
    assert summary(run()) == "1 of 3 promised figures reached, 1 missed, 1 not run."


def test_everything_is_written_and_each_picture_is_shown(tmp_path: Path) -> None:
    publish(run(), tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    text = (tmp_path / "results.md").read_text()
    assert written == {"results.json", "results.md", "overview.svg", "ettr.svg"}
    for picture in ("overview", "ettr"):
        assert f"({picture}.svg)" in text
    assert json.loads((tmp_path / "results.json").read_text())["machine"] == MACHINE


def test_no_picture_is_made_up_where_nothing_was_measured(tmp_path: Path) -> None:
    publish(Run(MACHINE, "make bench", []), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}


def measured(name: str, ratio: float, machine: str, when: str = "2026-01-01T00:00") -> Entry:
    figure = replace(REACHED, name=f"{name} figure", ratio=ratio)
    return Entry(name, f"about {name}", [figure], {}, when, "abc", 1.0, 0.5, machine)


def test_one_benchmark_again_leaves_the_rest_of_the_page_as_it_was() -> None:
    before = Run(MACHINE, "make bench", [measured("a", 0.1, "m"), measured("b", 0.2, "m")])
    after = before.take_in([measured("b", 0.3, "m", "2026-01-02T00:00")], MACHINE, ["a", "b"])
    assert [figure.ratio for figure in after.figures] == [0.1, 0.3]


def test_older_result_that_lies_about_takes_no_newer_ones_place() -> None:
    before = Run(MACHINE, "make bench", [measured("a", 0.1, "m", "2026-01-02T00:00")])
    assert before.take_in([measured("a", 0.9, "m")], MACHINE, ["a"]).figures[0].ratio == 0.1


def test_result_of_another_machine_says_so(tmp_path: Path) -> None:
    before = Run(MACHINE, "make bench", [measured("a", 0.125, "another, 2 cores"), measured("b", 0.2, "m")])
    publish(before.take_in([measured("b", 0.25, "m", "2026-01-02T00:00")], MACHINE, ["a", "b"]), tmp_path)
    again = Run.read(tmp_path)
    assert [entry.machine for entry in again.entries] == ["another, 2 cores", "m"]
    assert "a 2026-01-01 (0.5, abc, another, 2 cores)" in page(again, {})


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


def test_page_names_the_machine_that_most_of_it_ran_on() -> None:
    other, here = {**MACHINE, "processor": "another"}, "a processor, 2 cores"
    before = Run(MACHINE, "make bench", [measured("a", 0.1, here), measured("b", 0.2, here)])
    after = before.take_in([measured("c", 0.3, "another, 2 cores")], other, ["a", "b", "c"])
    assert after.machine == MACHINE
    assert "c 2026-01-01 (0.5, abc, another, 2 cores)" in page(after, {})
    newer = [measured(name, 0.3, "another, 2 cores", "2026-01-02T00:00") for name in ("a", "b")]
    assert after.take_in(newer, other, ["a", "b", "c"]).machine == other
