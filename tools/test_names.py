"""Lists the tests that a commit had and this tree does not, each with its reason.

`python tools/test_names.py COMMIT` reads reasons from `docs/design/029-tests-that-went.csv`, and ends with 1
if one is missing. A test that only moved to another file, and kept its name, is not listed.
"""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
REASONS = ROOT / "docs" / "design" / "029-tests-that-went.csv"


def main(commit: str) -> int:
    """Returns 1 if a test is gone without a reason."""
    before = {path: names_in(_git("show", f"{commit}:{path}")) for path in _tests(commit)}
    now = Counter(name for path in (ROOT / "tests").rglob("test_*.py") for name in names_in(path.read_text()))
    with REASONS.open() as file:
        reasons = {(old, name): why for old, name, why in csv.reader(file)}
    unexplained = 0
    for path, names in sorted(before.items()):
        for name in names:
            if now[name]:
                now[name] -= 1
                continue
            reason = reasons.get((path, name), "")
            unexplained += not reason
            print(f"{path}::{name}: {reason or 'NO REASON'}")
    print(f"{sum(map(len, before.values()))} tests before; {unexplained} are gone without a reason")
    return 1 if unexplained else 0


def names_in(text: str) -> list[str]:
    """The names of a module's test functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions) and node.name.startswith("test_")
    ]


def _tests(commit: str) -> list[str]:
    names = _git("ls-tree", "-r", "--name-only", commit, "tests").splitlines()
    return [name for name in names if Path(name).name.startswith("test_") and name.endswith(".py")]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
