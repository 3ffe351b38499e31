"""The page on failures is true: each failure has a test, and every cause and reason is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tiercheck.trainer import process
from tiercheck_operator.model.conditions import Cause

ROOT = Path(__file__).parents[2]
FAILURES = (ROOT / "docs" / "operate" / "failures.md").read_text()
PROOFS = (ROOT / "docs" / "understand" / "failure-tests.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+)`", PROOFS)))


@pytest.fixture(scope="module")
def defined() -> set[str]:
    """The names of all tests."""
    paths = (ROOT / "tests").rglob("test_*.py")
    return {
        name
        for path in paths
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_the_map_names_exists(name: str, defined: set[str]) -> None:
    assert name in defined


def test_every_failure_of_the_map_has_a_test() -> None:
    failures = re.findall(r"^- (.+?)(?=\n- |\n\n|\Z)", PROOFS, re.MULTILINE | re.DOTALL)
    assert len(failures) > 70
    assert [failure for failure in failures if "`test_" not in failure] == []


def test_table_is_short() -> None:
    rows = re.findall(r"^\| (?!what fails|---).*\|$", FAILURES, re.MULTILINE)
    assert 20 <= len(rows) <= 30


@pytest.mark.parametrize("cause", [cause for cause in Cause if not cause.planned])
def test_every_cause_has_its_place(cause: Cause) -> None:
    assert f"`{cause.value}`" in FAILURES


def test_every_reason_that_a_rank_gives_is_offered_to_rules() -> None:
    words = {
        value
        for name, value in vars(process).items()
        if re.fullmatch("[A-Z][A-Z_]*", name) and isinstance(value, str)
    }
    assert {word for word in words if f"`{word}`" not in FAILURES} == set()


def test_example_is_what_the_api_takes() -> None:
    rules = yaml.safe_load(FAILURES.partition("```yaml\n")[2].partition("```")[0])["spec"]["failurePolicy"][
        "rules"
    ]
    assert len({rule["name"] for rule in rules}) == len(rules)
    for rule in rules:
        assert sum(key.startswith("on") for key in rule) == 1
        for reason in rule.get("onReasons", ()):
            assert f"`{reason}`" in FAILURES
