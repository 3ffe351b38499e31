"""Pages say what is true: promises name tests, links lead, commands print what is shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.cli import recorded
from tests.cli.shown import FOLDER, matches, rendered
from tiercheck.trainer import process
from tiercheck_cli.commands import app
from tiercheck_cli.events import events_table, timeline
from tiercheck_operator.model.conditions import Cause

ROOT = Path(__file__).parents[2]
FAILURES = (ROOT / "docs" / "operate" / "failures.md").read_text()
PROOFS = (ROOT / "docs" / "understand" / "failure-tests.md").read_text()
README = (ROOT / "README.md").read_text()
PROMISES = README.partition("\n## What it promises\n")[2].partition("\n## ")[0]
PROMISED = re.findall(r"\(`(test_\w+)`\)", PROMISES)
NAMED = sorted({*re.findall(r"`(test_\w+)`", PROOFS), *PROMISED})


@pytest.fixture(scope="module")
def defined() -> set[str]:
    """The names of all tests."""
    paths = (ROOT / "tests").rglob("test_*.py")
    return {
        name
        for path in paths
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_map_and_promises_name_exists(name: str, defined: set[str]) -> None:
    assert name in defined


def test_every_failure_of_the_map_has_a_test() -> None:
    failures = re.findall(r"^- (.+?)(?=\n- |\n\n|\Z)", PROOFS, re.MULTILINE | re.DOTALL)
    assert len(failures) > 70
    assert [failure for failure in failures if "`test_" not in failure] == []


def test_table_is_short() -> None:
    rows = re.findall(r"^\| (?!what fails|---).*\|$", FAILURES, re.MULTILINE)
    assert 20 <= len(rows) <= 30


@pytest.mark.parametrize("cause", [cause for cause in Cause if not cause.planned])
def test_every_cause_has_its_place(cause: Cause) -> None:
    assert f"`{cause.value}`" in FAILURES


def test_every_reason_that_a_rank_gives_is_offered_to_rules() -> None:
    words = {
        value
        for name, value in vars(process).items()
        if re.fullmatch("[A-Z][A-Z_]*", name) and isinstance(value, str)
    }
    assert {word for word in words if f"`{word}`" not in FAILURES} == set()


def test_example_is_what_the_api_takes() -> None:
    rules = yaml.safe_load(FAILURES.partition("```yaml\n")[2].partition("```")[0])["spec"]["failurePolicy"][
        "rules"
    ]
    assert len({rule["name"] for rule in rules}) == len(rules)
    for rule in rules:
        assert sum(key.startswith("on") for key in rule) == 1
        for reason in rule.get("onReasons", ()):
            assert f"`{reason}`" in FAILURES


# README and links.

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "local" / "tiercheck_local" / "README.md",
]


def test_every_promise_names_a_test() -> None:
    assert len(PROMISED) == len(re.findall(r"^\d\. \*", PROMISES, re.MULTILINE)) == 7


def test_make_targets_that_the_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {
        word
        for page in PAGES
        for words in re.findall(r"^\$ make ([a-z ]+?)(?:\s+#.*)?$", page.read_text(), re.MULTILINE)
        for word in words.split()
    }
    assert len(named) > 4
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


# What docs/use/cli.md shows.

PAGE = ROOT / "docs" / "use" / "cli.md"
BLOCK = re.compile(r"<!-- golden: ([\w-]+) -->\n```text\n.*?```", re.DOTALL)


@pytest.mark.parametrize("width", [60, 80])
def test_events_on_screens_of_several_widths(width: int) -> None:
    shown = rendered(events_table(timeline(recorded.job(), recorded.events())), width)
    assert max(map(len, shown.splitlines())) <= width
    matches(f"events-{width}", shown)


def test_the_page_shows_what_the_commands_print() -> None:
    page = PAGE.read_text()
    assert BLOCK.search(page)
    told = BLOCK.sub(_filled, page)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(told)
    assert told == PAGE.read_text(), "UPDATE_GOLDEN=1 rewrites docs/use/cli.md"


def _filled(block: re.Match[str]) -> str:
    shown = (FOLDER / f"{block[1]}.txt").read_text()
    return f"<!-- golden: {block[1]} -->\n```text\n{shown}```"


def test_every_command_is_on_the_page() -> None:
    commands = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None
    }
    page = PAGE.read_text()
    for name in commands - {"version", "launch", "demo"}:
        assert re.search(rf"^\| `{name}[ `]", page, re.MULTILINE), f"docs/use/cli.md does not tell of {name}"
