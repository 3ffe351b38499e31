"""No module of the sidecar leads back to itself by imports, those for type checkers and inside functions
included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tiercheck_sidecar

PRODUCT = Path(tiercheck_sidecar.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(PRODUCT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, modules: set[str]) -> set[str]:
    """Modules of the sidecar that this one names. A folder that it stands in is not one."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names} & modules or {node.module}
    own = module_name(path)
    return {each for each in found & modules if own != each and not own.startswith(f"{each}.")}


def test_imports_never_lead_back() -> None:
    paths = {module_name(path): path for path in PRODUCT.rglob("*.py")}
    graph = {name: imports(path, set(paths)) for name, path in paths.items()}
    assert len(graph) > 100
    assert graph["tiercheck_sidecar.versions.tiers"], "imports are found"
    TopologicalSorter(graph).prepare()  # names the circle
