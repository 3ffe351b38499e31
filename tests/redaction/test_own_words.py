"""What operator, sidecar and library themselves say is never taken for a credential."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercheck.redaction import redacted

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("operator", "sidecar", "tiercheck")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "redaction.py"
]
SHOWS_A_SETTING = "TIERCHECK_WEBHOOK_SECRET=NAMESPACE/NAME"


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string with a blank in it; `x7` stands for what is filled in."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x7" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value
        if " " in text and SHOWS_A_SETTING not in text:
            yield node.lineno, text


@pytest.mark.parametrize("folder", ["operator", "sidecar", "tiercheck"])
def test_sentences_of_ours_stay_as_they_are(folder: str) -> None:
    said = [
        (path, line, text)
        for path in FILES
        if path.is_relative_to(ROOT / folder)
        for line, text in sentences(path)
    ]
    assert len(said) > 300
    changed = [
        (str(path.relative_to(ROOT)), line, redacted(text))
        for path, line, text in said
        if redacted(text) != text
    ]
    assert changed == [], "say it in other words"
