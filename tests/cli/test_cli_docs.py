"""What docs/use/cli.md shows is what the commands print."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli import recorded
from tests.cli.shown import FOLDER, matches, rendered
from tiercheck_cli.commands import app
from tiercheck_cli.events import events_table, story

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "use" / "cli.md"
BLOCK = re.compile(r"<!-- golden: ([\w-]+) -->\n```text\n.*?```", re.DOTALL)


@pytest.mark.parametrize("width", [60, 80])
def test_events_on_screens_of_several_widths(width: int) -> None:
    shown = rendered(events_table(story(recorded.job(), recorded.events())), width)
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
