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
from matplotlib.image import imread
from rich.console import Console

from tests.cli.report.made_up_run import made_up_run
from tiercheck_cli.report import FaultRecord, RunRecord, StepRecord, faults_table, render, style, verdict_line
from tiercheck_cli.report.__main__ import main
from tiercheck_cli.report.page import page
from tiercheck_cli.report.record import RecordError
from tiercheck_cli.report.series import attempt_curves, fault_marks, reference_curve, thin, watermark_curve
from tiercheck_cli.report.words import TIER_WORDS, rows, seconds, tier_counts

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


def test_record_survives_being_saved_and_loaded(tmp_path: Path) -> None:
    record = made_up_run()
    record.write(tmp_path / "run.json")
    assert RunRecord.read(tmp_path / "run.json") == record


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "run.json"),
        ("{}", "title: missing"),
        ("[]", "not a run's record"),
        ('{"steps": [{}]}', "not a run's"),
    ],
)
def test_file_that_is_no_record_is_refused_with_its_name(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RecordError, match=said):
        RunRecord.read(tmp_path / "run.json")


def test_durations_of_a_fault_add_up_to_its_total() -> None:
    for fault in made_up_run().faults:
        parts = fault.detect_seconds + fault.restore_seconds + fault.start_seconds
        assert parts == pytest.approx(fault.resumed_at - fault.injected_at)
        assert fault.total_seconds == pytest.approx(parts)


def test_clock_that_is_slightly_behind_gives_no_negative_duration() -> None:
    fault = FaultRecord("node", "a node dies", "n", 100.0, 99.9, 101.0, 103.0, 2, 5, 1)
    assert (fault.detect_seconds, fault.restore_seconds, fault.start_seconds) == (0.0, 1.0, 2.0)
    assert fault.total_seconds == 3.0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.04, "40 ms"),
        (0.0999, "0.1 s"),
        (1.84, "1.8 s"),
        (9.97, "10 s"),
        (12.3, "12 s"),
        (119.6, "2 min 0 s"),
        (185.0, "3 min 5 s"),
    ],
)
def test_durations_are_readable(value: float, said: str) -> None:
    assert seconds(value) == said


def test_sources_are_named_nearest_first() -> None:
    assert tier_counts({"remote": 1, "local": 3}) == "3 × own memory, 1 × remote store"
    assert tier_counts({"local": 0}) == "from scratch"


def test_page_parses_and_loads_nothing_from_anywhere() -> None:
    reader = read(page(made_up_run()))
    assert reader.tags.count("svg") == 3
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.addresses == []
    assert not re.search(r"url\((?!#)|xlink:href=\"(?!#)|@import", page(made_up_run()))


def test_page_shows_every_value_of_every_fault() -> None:
    record = made_up_run()
    reader = read(page(record))
    words = " ".join(" ".join(reader.texts).split())
    for row, fault in zip(rows(record.faults), record.faults, strict=True):
        for cell in (row.what, row.target, *row.cells[3:], fault.name, fault.reason, *fault.rank_sources):
            assert cell in words
    assert record.digests["run"] in words
    assert record.sentence in words
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
        kept = {"run", "reference", *TIER_WORDS}
        return {
            key if key in kept else poisoned(key, numbers=False): poisoned(v, numbers=numbers)
            for key, v in value.items()
        }
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
    record = dataclasses.replace(made_up_run(), bitwise_equal=False, first_difference=41)
    html = page(record)
    assert "Not equal" in html
    assert "Bitwise equal</strong>" not in html
    assert "loss of step 41" in html
    assert in_terminal(record, 100).count("DIFFERENT") == 1


def test_pictures_are_drawn_and_not_blank(tmp_path: Path) -> None:
    rendered = render(made_up_run(), tmp_path / "out")
    for path in (rendered.loss, rendered.recovery):
        pixels = imread(path)
        assert pixels.shape[0] > 400
        assert pixels.shape[1] > 1000
        assert (pixels[:, :, :3].min(axis=2) < 0.9).mean() > 0.02
        edge = pixels[:, [0, -1], :3].min()
        assert edge > 0.95, "something is cut off at the picture's side"
    assert rendered.page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(rendered.record.read_text())["workers"] == 4


def test_run_that_ended_early_still_gets_its_report(tmp_path: Path) -> None:
    record = dataclasses.replace(
        made_up_run(), steps=[], faults=[], samples=[], reference_losses={}, run_losses={}, digests={},
        nodes={},
        bitwise_equal=False, verdict="the job failed while waiting for step 20",
    )  # fmt: skip
    rendered = render(record, tmp_path)
    assert "No step was recorded" in rendered.page.read_text()
    assert rendered.loss.stat().st_size > 0
    read(rendered.page.read_text())
    assert "the job failed" in in_terminal(record, 80)


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_table_keeps_every_number_whole(width: int) -> None:
    record = made_up_run()
    shown = in_terminal(record, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    for row in rows(record.faults):
        for cell in row.cells[3:]:
            assert cell in shown
    for words in ("3 local", "1 peer", "4 remote", "EQUAL"):
        assert words in shown


def test_name_in_square_brackets_is_shown_and_not_interpreted() -> None:
    record = made_up_run()
    record = dataclasses.replace(
        record, faults=[dataclasses.replace(record.faults[0], target="[red]pod[/red]")]
    )
    assert "[red]pod[/red]" in in_terminal(record, 120)


def test_each_attempt_is_a_curve_of_its_own_and_marks_show_what_was_lost() -> None:
    record = made_up_run()
    curves = attempt_curves(record)
    assert len(curves) == len(record.faults) + 1
    assert curves[1][0][0] == record.faults[0].restored_step + 1
    assert [mark.last_step for mark in fault_marks(record)] == [22, 48, 71, 98, 127]
    assert record.trained_again == sum(fault.lost_steps for fault in record.faults)
    assert reference_curve(record)[0] == (1.0, float.fromhex(record.reference_losses[1]))


def test_watermarks_are_stairs_and_long_runs_are_thinned_to_their_ends() -> None:
    stairs = watermark_curve(made_up_run(), "remote")
    assert stairs[0][1] == 20.0
    assert stairs[1] == (stairs[2][0], 20.0)
    kept = thin([(float(index), 0.0) for index in range(100_001)])
    assert len(kept) < 2100
    assert (kept[0][0], kept[-1][0]) == (0.0, 100_000.0)


def test_a_million_step_record_does_not_become_a_huge_page() -> None:
    record = made_up_run()
    steps = [StepRecord(record.started + index, 1, index, 1.0) for index in range(1, 50_001)]
    assert len(page(dataclasses.replace(record, steps=steps))) < 400_000


def test_command_draws_a_saved_record_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_run().write(tmp_path / "run.json")
    assert main([str(tmp_path / "run.json"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "index.html").exists()
    assert "EQUAL" in capsys.readouterr().out
    assert main([str(tmp_path / "absent.json"), str(tmp_path / "out")]) == 2
    assert "absent.json" in capsys.readouterr().err


@pytest.mark.parametrize("tier", sorted(style.TIERS))
def test_tier_has_the_same_colour_on_the_page_as_in_the_pictures(tier: str) -> None:
    assert f"--{tier}: {style.TIERS[tier]};" in style.CSS.partition("@media")[0]
