"""Each promise of the README names a test that exists, and each link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROMISES = README.partition("\n## What it promises\n")[2].partition("\n## ")[0]
NAMED = re.findall(r"\(`(test_\w+)`\)", PROMISES)
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "local" / "tiercheck_local" / "README.md",
]


def test_every_promise_names_a_test() -> None:
    assert len(NAMED) == len(re.findall(r"^\d\. \*", PROMISES, re.MULTILINE)) == 7


@pytest.mark.parametrize("name", NAMED)
def test_named_test_exists(name: str) -> None:
    definition = re.compile(rf"^(async )?def {name}\(", re.MULTILINE)
    assert any(definition.search(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


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
