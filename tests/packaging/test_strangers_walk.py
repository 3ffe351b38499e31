"""A stranger finds what docs/understand/how-it-works.md names where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = (ROOT / "docs/understand/how-it-works.md").read_text().partition("\n## A stranger's walk\n")[2]
ROWS = re.findall(r"^\| (.*\?)? \| (`.+`) \| `(.+)` \|$", WALK, re.MULTILINE)
NAMES = [(name, path) for _, names, path in ROWS for name in re.findall(r"`([\w.]+)`", names)]


def test_ten_questions_are_answered() -> None:
    assert len([question for question, _, _ in ROWS if question]) == 10
    assert len(ROWS) == len(re.findall(r"^\| ", WALK, re.MULTILINE)) - 2  # the table's head


@pytest.mark.parametrize(("name", "path"), NAMES)
def test_name_is_defined_in_its_file(name: str, path: str) -> None:
    text = (ROOT / path).read_text()
    for part in name.split("."):
        assert re.search(rf"^ *(class|def|async def) {part}\b", text, re.MULTILINE), (
            f"{part} is not in {path}"
        )
