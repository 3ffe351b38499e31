"""Holds what a command shows against what a person approved of: a text file beside the tests."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import RenderableType

from tiercheck_cli.terminal import to_plain_text

FOLDER = Path(__file__).parent / "golden"


def rendered(shown: RenderableType, width: int) -> str:
    """As a pipe gets it: no colours, no trailing blanks."""
    return to_plain_text(shown, width)


def matches(name: str, text: str) -> None:
    """UPDATE_GOLDEN=1 writes the file: look at it before it is committed."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 rewrites it"
