"""Whatever reason a job shows, the troubleshooting guide explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_sidecar.remote.errors import Reason

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text()
CONDITIONS, _, EVENTS = GUIDE.partition("\n## Events\n")
TYPES = {
    "Placed",
    "Protected",
    "DeltasActive",
    "SparesReady",
    "FullSize",
    "Throttled",
    "RemoteSafe",
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
        "".join(path.read_text() for path in (ROOT / "sidecar" / "tiercheck_sidecar").glob("*.py")),
    )
)
EXPLAINED = {
    row.group(1): (row.group(2).strip(), row.group(3).strip())
    for row in re.finditer(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|$", CONDITIONS, re.MULTILINE)
}


@pytest.mark.parametrize("reason", sorted(OF_CONDITIONS | OF_SIDECARS))
def test_every_reason_is_explained_with_what_to_do(reason: str) -> None:
    assert reason in EXPLAINED, f"docs/troubleshooting.md has no row for {reason}"
    meaning, advice = EXPLAINED[reason]
    assert meaning.endswith(".")
    assert advice.endswith(".")


def test_nothing_is_explained_that_cannot_happen() -> None:
    assert len(EXPLAINED) > 30
    assert set(EXPLAINED) <= OF_CONDITIONS | OF_SIDECARS


@pytest.mark.parametrize("cause", [cause for cause in Cause if not cause.planned])
def test_every_cause_that_is_posted_as_an_event_is_explained(cause: Cause) -> None:
    assert f"`{cause.value}`" in EVENTS
