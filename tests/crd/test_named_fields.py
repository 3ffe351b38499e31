"""Whatever field a message or a page tells people to set, the definition of a job has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOTS = "spec|tiers|checkpoint|failurePolicy|restore|topology|sidecar|elastic|attach|gang"
NAMED = re.compile(rf"(?<![\w./$-])(?:{ROOTS})(?:\.[a-z]\w*)+(?![\w(/-]|\.\w)")
OF_OTHERS = {
    "spec.containers",
    "spec.levels",
    "spec.nodeName",
    "spec.resources",
    "spec.schedulingGroup",
    "spec.schedulingGroup.podGroupName",
    "spec.schedulingPolicy",
    "restore.load",
    "sidecar.sock",
    "sidecar.tiercheck.io",
}
"""Fields of pods, pod groups and Kueue's Topology; a module, a socket and a name."""


def definition(name: str) -> dict[str, Any]:
    (version,) = yaml.safe_load(Path(f"crds/{name}.yaml").read_text())["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def is_defined(path: str, spec: dict[str, Any]) -> bool:
    node = spec
    for part in path.removeprefix("spec.").split("."):
        while "items" in node:
            node = node["items"]
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return True
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


def texts() -> Iterator[tuple[str, str]]:
    """Pages, and every text in the code."""
    for page in [*Path("docs").rglob("*.md"), *Path().glob("*.md"), Path("charts/tiercheck/README.md")]:
        if "design" not in page.parts and page.name != "CHANGELOG.md":
            yield str(page), page.read_text()
    for name in ("crds/tiercheckjobs.yaml", "charts/tiercheck/values.schema.json"):
        yield name, Path(name).read_text()
    for room in ("tiercheck", "operator", "sidecar", "cli"):
        for file in Path(room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file}:{node.lineno}", node.value


def test_every_field_that_is_named_anywhere_is_defined() -> None:
    job = definition("tiercheckjobs")["properties"]
    chart = json.loads(Path("charts/tiercheck/values.schema.json").read_text())
    missing = {
        (where, found[0])
        for where, text in texts()
        for found in NAMED.finditer(text)
        if found[0] not in OF_OTHERS
        and not found[0].endswith((".md", ".py", ".yaml"))
        and not any(is_defined(found[0], root) for root in (job["spec"], job["status"], chart))
    }
    assert missing == set()


@pytest.mark.parametrize("name", ["tiercheckjobs", "tiercheckpolicies"])
def test_no_entry_of_a_list_has_a_default(name: str) -> None:
    """What compares an applied object with the live one calls it changed for ever."""

    def defaults(node: dict[str, Any], path: str, *, listed: bool) -> Iterator[str]:
        if listed and "default" in node:
            yield path
        for key, child in node.get("properties", {}).items():
            yield from defaults(child, f"{path}.{key}", listed=listed)
        if isinstance(node.get("items"), dict):
            yield from defaults(node["items"], f"{path}[]", listed=True)

    assert list(defaults(definition(name), "", listed=False)) == []
