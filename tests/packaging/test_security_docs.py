"""docs/operate/security.md says what the operator may do: all of it, and nothing that it may not."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def granted() -> set[tuple[str, str, str]]:
    """(API group, resource, verb) by the manifest."""
    found = set()
    for document in yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text()):
        if document["kind"] in ("ClusterRole", "Role"):
            for rule in document["rules"]:
                found |= {
                    (g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
                }
    return found


def told() -> set[tuple[str, str, str]]:
    page = (
        (ROOT / "docs" / "operate" / "security.md")
        .read_text()
        .partition("\n## The operator's rights\n")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0][:3] == ["API", "resources", "verbs"]
    return {
        ("" if api == "core" else api, resource, verb)
        for api, resources, verbs, *_ in rows[2:]
        for resource in re.split(r", *", resources)
        for verb in re.split(r", *", verbs)
    }


def test_table_of_rights_is_what_the_manifest_grants() -> None:
    assert told() == granted()
