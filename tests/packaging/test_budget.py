"""The size of each room has a number in `budget.csv` that may fall, and rises by a commit of its own.

`python tests/packaging/test_budget.py` prints the table as it is now, to be written there.
"""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("budget.csv")
WHOLE = ("benchmarks", "charts", "docs", "examples", "tests", "tools")
"""Folders that are one room each."""


def test_no_room_has_more_statements_or_files_than_its_budget() -> None:
    """A commit that raises a number does nothing else, and says why."""
    allowed = {room: (int(a), int(b)) for room, a, b in map(_columns, BUDGET.read_text().splitlines())}
    found = sizes()
    above = {
        room: f"{statements} statements in {files} files; the budget is {allowed.get(room, (0, 0))}"
        for room, (statements, files) in found.items()
        if statements > allowed.get(room, (0, 0))[0] or files > allowed.get(room, (0, 0))[1]
    }
    assert above == {}
    assert allowed.keys() == found.keys(), "a room is gone, and its line is not"


def sizes() -> dict[str, tuple[int, int]]:
    """Statements without docstrings, and files, of each room that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in map(Path, listed.splitlines()):
        if (ROOT / path).is_file():
            room = found[_room(path)]
            room[0] += _statements((ROOT / path).read_text())
            room[1] += 1
    return {room: (statements, files) for room, (statements, files) in sorted(found.items())}


def _room(path: Path) -> str:
    top, *rest = path.parts
    if top in WHOLE or not rest:
        return top if rest else "."
    depth = 2 if top == "tiercheck" else 3
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)])


def _statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(text)))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _columns(line: str) -> tuple[str, str, str]:
    room, statements, files = line.split(",")
    return room, statements, files


if __name__ == "__main__":
    for name, (count, modules) in sizes().items():
        print(f"{name},{count},{modules}")
