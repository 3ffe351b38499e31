"""The report shows what a run went through, and the verdict is never kinder than the evidence."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiercheck_cli.terminal import short
from tiercheck_local.demo.record import (
    Digest,
    FaultRecord,
    RunRecord,
    RunVerdict,
    Step,
    TrainingLog,
    add_resumes,
    compare,
    parse,
    with_resumes,
)
from tiercheck_local.demo.report import (
    HEADINGS,
    count_ranks,
    faults_table,
    page,
    rows,
    verdict_line,
    write_report,
)

_FAULTS = [
    # name, what, target, at step, lost, detect, restore, start, tiers, sources
    ("process", "a training process is killed", "training process of worker 1 (gpt-1-0)", 22, 2, 0.06, 0.4,
    4.1,
     {"local": 4}, ["own memory"] * 4),
    ("pod", "a pod is evicted", "pod gpt-2-0 (worker 2)", 48, 3, 0.2, 3.2, 4.4,
     {"local": 3, "peer": 1}, ["own memory", "own memory", "worker 0 (rack a)", "own memory"]),
    ("node", "a node dies", "node b-2 with worker 3", 71, 1, 2.4, 3.9, 4.2,
     {"local": 3, "peer": 1}, ["own memory", "own memory", "own memory", "worker 1 (rack a)"]),
    ("rack", "a rack goes dark", "rack a: nodes a-1, a-2", 98, 3, 2.6, 4.8, 4.9,
     {"local": 2, "peer": 2}, ["worker 2 (rack b)", "worker 3 (rack b)", "own memory", "own memory"]),
    ("all pods", "every pod is lost at once", "all pods, with all memory", 127, 7, 0.5, 5.9, 5.0,
     {"remote": 4}, ["S3"] * 4),
]  # fmt: skip


def loss_of(step: int) -> float:
    """The same for the run and for the reference: equality is what the demonstration shows."""
    return 2.2 + 3.4 * math.exp(-step / 38) + random.Random(step).uniform(-0.06, 0.06)


def made_up_step(step: int, attempt: int, time: float) -> Step:
    return Step(step, attempt, loss_of(step), loss_of(step).hex(), time)


def made_up_run(total: int = 150, step_seconds: float = 0.45) -> RunRecord:
    """150 steps in about two minutes."""
    started = now = 1_790_000_000.0
    attempt, step = 1, 0
    steps: list[Step] = []
    faults: list[FaultRecord] = []
    now += 9.0
    pending = list(_FAULTS)
    while step < total:
        step += 1
        now += step_seconds
        steps.append(made_up_step(step, attempt, now))
        if pending and step == pending[0][3]:
            name, what, target, _, lost, detect, restore, start, tiers, sources = pending.pop(0)
            injected = now + 0.1
            attempt += 1
            step -= lost
            now = injected + detect + restore + start
            faults.append(
                FaultRecord(
                    name, what, target, injected, injected + detect, injected + detect + restore,
                    now + step_seconds,
                    attempt, 4, step, lost, dict(tiers), list(sources),
                    reason=f"step {step} is the newest version that every rank can rebuild",
                    exact="NotComparable" if "remote" in tiers else "Proven",
                )
            )  # fmt: skip
    return RunRecord(
        title="every process starts anew",
        machine="2 cores, 24 GB, Linux",
        started=started,
        ended=now + 2.5,
        nodes={"a-1": "rack a", "a-2": "rack a", "b-1": "rack b", "b-2": "rack b"},
        steps=steps,
        faults=faults,
        reference=[made_up_step(number, 1, 0.0) for number in range(1, total + 1)],
        digest=Digest(total, "9f2c" * 16),
        reference_digest=Digest(total, "9f2c" * 16),
        verdict=RunVerdict(True, "all losses are bitwise equal"),
    )


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
    fault = FaultRecord("node", "a node dies", "n", 100.0, 99.9, 101.0, 103.0, 2, 4, 5, 1, {})
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
    reader = read(page([made_up_run()]))
    assert reader.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.addresses == []
    assert not re.search(r"url\((?!#)|xlink:href=\"(?!#)|@import", page([made_up_run()]))


def test_page_shows_every_value_of_every_fault() -> None:
    record = made_up_run()
    reader = read(page([record]))
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
    html = page([poisoned(made_up_run(), numbers=numbers)])
    assert "<script" not in html
    assert "script" not in read(html).tags
    assert NASTY in " ".join(read(html).texts)


def test_unequal_run_is_said_first_and_in_words() -> None:
    record = dataclasses.replace(made_up_run(), verdict=RunVerdict(False, "the loss of step 41 differs"))
    html = page([record])
    assert "Not equal" in html
    assert "Bitwise equal</b>" not in html
    assert "loss of step 41" in html
    assert in_terminal(record, 100).count("DIFFERENT") == 1


def test_the_folder_holds_the_page_and_all_numbers(tmp_path: Path) -> None:
    record = made_up_run()
    written = write_report([record], tmp_path / "out")
    assert written.name == "index.html"
    assert written.read_text() == page([record])
    (told,) = json.loads((written.parent / "run.json").read_text())
    assert [fault["exact"] for fault in told["faults"]] == [fault.exact for fault in record.faults]
    assert told["steps"][0]["loss_hex"] == record.steps[0].loss_hex


def test_run_that_ended_early_still_gets_its_report() -> None:
    verdict = RunVerdict(False, "the job failed while waiting for step 20")
    record = dataclasses.replace(
        made_up_run(), steps=[], faults=[], reference=[], digest=None, nodes={}, verdict=verdict
    )
    read(page([record]))
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
    html = page([made_up_run()])
    assert '<meta name="viewport" content="width=device-width' in html
    assert re.search(r'<div class="wide" role="region" aria-label="[^"]+" tabindex="0"><svg', html)
    assert html.count('<th scope="col">') == html.count("<th ") == len(HEADINGS)
    assert "<caption>" in html
    assert html.count('data-of="Steps lost"') == len(made_up_run().faults)


def a_run(*losses: tuple[int, int, str]) -> list[Step]:
    return [
        Step(step, attempt, 1.0, loss, float(index)) for index, (step, attempt, loss) in enumerate(losses)
    ]


REFERENCE = a_run((1, 0, "0x1p+0"), (2, 0, "0x1p-1"), (3, 0, "0x1p-2"))
DIGEST = Digest(3, "abc")


def test_equal_only_with_every_loss_and_the_digest() -> None:
    verdict = compare(REFERENCE, DIGEST, REFERENCE, DIGEST)
    assert verdict.equal
    assert "bitwise equal" in verdict.sentence
    missing = compare([REFERENCE[0], REFERENCE[2]], DIGEST, REFERENCE, DIGEST)
    assert "step 2 was never trained" in missing.sentence
    for found in (None, Digest(3, "abd")):
        assert not compare(REFERENCE, found, REFERENCE, DIGEST).equal
    for steps, digest in ((REFERENCE, DIGEST), ([], None)):
        assert not compare(steps, digest, [], None).equal, "without a reference"


def test_steps_trained_again_must_agree_too() -> None:
    again = [*REFERENCE[:2], *a_run((2, 1, "0x1.8p-1"), (3, 1, "0x1p-2"))]
    verdict = compare(again, DIGEST, REFERENCE, DIGEST)
    assert not verdict.equal
    assert "the loss of step 2 (attempt 1)" in verdict.sentence


def test_the_log_survives_half_lines_noise_and_new_pods(tmp_path: Path) -> None:
    first = tmp_path / "job-0-0" / "trainer.log"
    first.parent.mkdir()
    line = '{"step": 1, "attempt": 1, "rank": 0, "loss": 1.0, "loss_hex": "0x1p+0", "time": 1.0}\n'
    first.write_text("Traceback: not ours\n" + line[:20])
    log = TrainingLog(tmp_path, "job-0-*/trainer.log")
    assert log.poll() == []
    with first.open("a") as file:
        file.write(line[20:])
    assert [step.step for step in log.poll()] == [1]
    second = tmp_path / "job-0-1" / "trainer.log"
    second.parent.mkdir()
    second.write_text(line.replace('"step": 1', '"step": 2').replace('"time": 1.0', '"time": 2.0'))
    assert [step.step for step in log.poll()] == [2]
    assert log.last is not None
    assert log.last.step == 2


def test_only_our_lines_are_read() -> None:
    assert parse("{broken") is None
    assert parse('{"other": 1}') is None
    assert parse("plain") is None
    assert parse('{"digest": "ab", "steps": 5}') == Digest(5, "ab")


def test_one_resume_that_differs_is_no_equality_and_the_verdict_says_which() -> None:
    verdict = compare(REFERENCE, DIGEST, REFERENCE, DIGEST)
    faults = [
        FaultRecord("node", "a node dies", "n", 1.0, 2.0, 3.0, 4.0, number, 4, 5, 1, {}) for number in (2, 3)
    ]
    proven = {"exact": "Proven", "exactMessage": "1 step"}
    told = with_resumes(faults, {2: proven, 3: {}})
    assert [fault.exact for fault in told] == ["Proven", ""]
    assert add_resumes(verdict, told) == verdict
    told = with_resumes(faults, {2: proven, 3: {"exact": "Differs", "exactMessage": "attempt 3, loss 2.5"}})
    found = add_resumes(verdict, told)
    assert not found.equal
    assert "attempt 3, loss 2.5" in found.sentence
