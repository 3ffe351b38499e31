"""Only its own methods write the shared state, so that each change has a lock and a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tiercheck_sidecar
from tiercheck_sidecar.model import state as state_module

PRODUCT = Path(tiercheck_sidecar.__file__).parent


def written(tree: ast.AST) -> Iterator[tuple[ast.expr, str, int]]:
    """Each attribute that is set or deleted, or whose items are: of what, its name, and the line."""
    for node in ast.walk(tree):
        target = (
            node.value if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) else node
        )
        if isinstance(target, ast.Attribute) and not (target is node and isinstance(target.ctx, ast.Load)):
            yield target.value, target.attr, target.lineno


def is_self(of: ast.expr) -> bool:
    return isinstance(of, ast.Name) and of.id == "self"


def state_fields() -> set[str]:
    tree = ast.parse(Path(state_module.__file__).read_text())
    (state,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "SidecarState")
    return {name for of, name, _ in written(state) if is_self(of) and not name.startswith("_")}


def trespasses(source: str, fields: set[str]) -> list[str]:
    return [
        f"line {line}: {ast.unparse(of)}.{name}"
        for of, name, line in written(ast.parse(source))
        if name in fields and not is_self(of)
    ]


def test_no_module_writes_a_field_of_the_state() -> None:
    fields = state_fields()
    assert {"directive", "verdict", "restore", "remote"} <= fields
    found = {
        str(path.relative_to(PRODUCT)): trespasses(path.read_text(), fields) for path in PRODUCT.rglob("*.py")
    }
    assert not {path: lines for path, lines in found.items() if lines}


def test_each_way_to_write_a_field_is_seen() -> None:
    ways = [
        "self._state.verdict = None",
        "state.left_out &= gone",
        "state.reached[0] = version",
        "self.state.ending, rest = True, 1",
        "del state.remote",
        "state.proofs: tuple = ()",
    ]
    fields = {"verdict", "left_out", "reached", "ending", "remote", "proofs"}
    assert [len(trespasses(way, fields)) for way in ways] == [1] * len(ways)
    assert trespasses("self.verdict = state.verdict\nknown = state.reached[0]", fields) == []
