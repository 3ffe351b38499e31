"""The report shows every fault with its numbers, and never interprets what a record says.

It needs no network.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.local.demo.made_up_run import made_up_run
from tiercheck_cli.terminal import short
from tiercheck_local.demo.report import (
    HEADINGS,
    count_ranks,
    faults_table,
    page,
    rows,
    verdict_line,
    write_report,
)
from tiercheck_local.demo.result import FaultRecord, RunRecord
from tiercheck_local.demo.training_log import RunVerdict

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class _Reader(HTMLParser):
    """Collects text, and insists that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def in_terminal(record: RunRecord, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(faults_table(record))
    console.print(verdict_line(record))
    return console.export_text()


def test_durations_of_a_fault_add_up_to_its_total() -> None:
    for fault in made_up_run().faults:
        parts = fault.detect_seconds + fault.restore_seconds + fault.start_seconds
        assert parts == pytest.approx(fault.resumed_at - fault.injected_at)
        assert fault.total_seconds == pytest.approx(parts)


def test_clock_that_is_slightly_behind_gives_no_negative_duration() -> None:
    fault = FaultRecord("node", "a node dies", "n", 100.0, 99.9, 101.0, 103.0, 2, 5, 1, {})
    assert (fault.detect_seconds, fault.restore_seconds, fault.start_seconds) == (0.0, 1.0, 2.0)
    assert fault.total_seconds == 3.0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.04, "40ms"),
        (0.0999, "0.1s"),
        (1.84, "1.8s"),
        (9.97, "10s"),
        (12.3, "12s"),
        (119.6, "2m"),
        (185.0, "3m5s"),
    ],
)
def test_durations_are_readable(value: float, said: str) -> None:
    assert short(value) == said


def test_sources_are_named_nearest_first() -> None:
    assert count_ranks({"remote": 1, "local": 3}) == "3 local, 1 remote"
    assert count_ranks({"local": 0}) == "from scratch"


def test_page_parses_and_loads_nothing_from_anywhere() -> None:
    reader = read(page(made_up_run()))
    assert reader.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.addresses == []
    assert not re.search(r"url\((?!#)|xlink:href=\"(?!#)|@import", page(made_up_run()))


def test_page_shows_every_value_of_every_fault() -> None:
    record = made_up_run()
    reader = read(page(record))
    words = " ".join(" ".join(reader.texts).split())
    for row, fault in zip(rows(record.faults), record.faults, strict=True):
        for cell in (" ".join(" ".join(row).split()), fault.name):
            assert cell in words
    assert record.digest is not None
    assert record.digest.value in words
    assert record.verdict.sentence in words
    assert "Bitwise equal" in words


NASTY = '<script>alert("x")</script>&'


class NastyNumber(int):
    """Of a record that somebody else wrote: does arithmetic, and is not what it says."""

    def __str__(self) -> str:
        return NASTY

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else NASTY


def poisoned(value: Any, *, numbers: bool) -> Any:
    """Every text, and if wanted every whole number, within `value` is nasty, in keys as well."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: poisoned(getattr(value, f.name), numbers=numbers) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, list):
        return [poisoned(entry, numbers=numbers) for entry in value]
    if isinstance(value, dict):
        return {key: poisoned(each, numbers=numbers) for key, each in value.items()}
    if type(value) is int and numbers:
        return NastyNumber(value)
    return NASTY if isinstance(value, str) and not value.startswith(("0x", "-0x")) else value


@pytest.mark.parametrize("numbers", [False, True])
def test_whatever_a_record_says_is_escaped_everywhere(numbers: bool) -> None:
    html = page(poisoned(made_up_run(), numbers=numbers))
    assert "<script" not in html
    assert "script" not in read(html).tags
    assert NASTY in " ".join(read(html).texts)


def test_unequal_run_is_said_first_and_in_words() -> None:
    record = dataclasses.replace(made_up_run(), verdict=RunVerdict(False, "the loss of step 41 differs"))
    html = page(record)
    assert "Not equal" in html
    assert "Bitwise equal</b>" not in html
    assert "loss of step 41" in html
    assert in_terminal(record, 100).count("DIFFERENT") == 1


def test_the_folder_holds_the_page_and_all_numbers(tmp_path: Path) -> None:
    record = made_up_run()
    written = write_report(record, tmp_path / "out")
    assert written.name == "index.html"
    assert written.read_text() == page(record)
    told = json.loads((written.parent / "run.json").read_text())
    assert [fault["exact"] for fault in told["faults"]] == [fault.exact for fault in record.faults]
    assert told["steps"][0]["loss_hex"] == record.steps[0].loss_hex


def test_run_that_ended_early_still_gets_its_report() -> None:
    verdict = RunVerdict(False, "the job failed while waiting for step 20")
    record = dataclasses.replace(
        made_up_run(), steps=[], faults=[], reference=[], digest=None, nodes={}, verdict=verdict
    )
    read(page(record))
    assert "the job failed" in in_terminal(record, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_table_keeps_every_number_whole(width: int) -> None:
    record = made_up_run()
    shown = in_terminal(record, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    for row in rows(record.faults):
        for cell in row[3:]:
            assert cell in shown
    for words in ("3 local", "1 peer", "4 remote", "proven", "unproven", "EQUAL"):
        assert words in shown


def test_name_in_square_brackets_is_shown_and_not_interpreted() -> None:
    record = made_up_run()
    record = dataclasses.replace(
        record, faults=[dataclasses.replace(record.faults[0], target="[red]pod[/red]")]
    )
    assert "[red]pod[/red]" in in_terminal(record, 120)


def test_page_fits_a_phone_and_its_wide_parts_scroll_by_keyboard() -> None:
    html = page(made_up_run())
    assert '<meta name="viewport" content="width=device-width' in html
    assert re.search(r'<div class="wide" role="region" aria-label="[^"]+" tabindex="0"><svg', html)
    assert html.count('<th scope="col">') == html.count("<th ") == len(HEADINGS)
    assert "<caption>" in html
    assert html.count('data-of="Steps lost"') == len(made_up_run().faults)
