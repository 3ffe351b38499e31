"""Whatever reason a job shows, the troubleshooting guide explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiercheck_cli.status.view import find_entry
from tiercheck_operator.model import conditions
from tiercheck_sidecar.remote.errors import Reason

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
CONDITIONS, _, _ = GUIDE.partition("\n## Events\n")
TYPES = {
    "Placed",
    "Protected",
    "DeltasActive",
    "SparesReady",
    "FullSize",
    "Throttled",
    "RemoteSafe",
    "Exact",
    "Evictable",
    "Restoring",
    "Running",
    "Suspended",
    "Completed",
    "Failed",
}

OF_CONDITIONS = {value for name, value in vars(conditions).items() if name.isupper()} - TYPES
OF_SIDECARS = {f"Remote{reason.value}" for reason in Reason} | set(
    re.findall(
        r'\.problem\(\s*"(\w+)"',
        "".join(path.read_text() for path in (ROOT / "sidecar" / "tiercheck_sidecar").rglob("*.py")),
    )
)
EXPLAINED = {
    item.group(1): (item.group(2).strip(), (item.group(3) or "Nothing.").strip())
    for item in re.finditer(
        r"^- `(\w+)`: (.+?)(?:\s\*\*Do:\*\*\s(.+?))?(?=\n- |\n\n|\Z)", CONDITIONS, re.MULTILINE | re.DOTALL
    )
}


@pytest.mark.parametrize("reason", sorted(OF_CONDITIONS | OF_SIDECARS))
def test_every_reason_is_explained_with_what_to_do(reason: str) -> None:
    assert reason in EXPLAINED, f"docs/operate/troubleshooting.md does not explain {reason}"
    meaning, advice = EXPLAINED[reason]
    assert meaning.endswith(".")
    assert advice.endswith(".")
    assert find_entry(reason) is not None


def test_nothing_is_explained_that_cannot_happen() -> None:
    assert len(EXPLAINED) > 30
    assert set(EXPLAINED) <= OF_CONDITIONS | OF_SIDECARS
