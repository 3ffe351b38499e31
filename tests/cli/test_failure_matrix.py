"""The failure matrix keeps its word: every row names a test that exists, every cause is in it, and every reason that it offers to rules is real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tiercheck.trainer import last_words
from tiercheck_operator.model.causes import Cause

ROOT = Path(__file__).parents[2]
MATRIX = (ROOT / "docs" / "failures.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", MATRIX)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_a_row_names_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_row_has_its_columns_and_a_test() -> None:
    table: list[str] = []
    for line in [*MATRIX.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table and table[0].rstrip(" |").endswith("test"):
            columns = table[0].count("|")
            for row in table[2:]:
                assert row.count("|") == columns, row
                assert "`tests/" in row.split("|")[-2], f"no test: {row}"
        table = []


@pytest.mark.parametrize("cause", [cause for cause in Cause if not cause.planned])
def test_every_cause_has_its_place(cause: Cause) -> None:
    assert f"`{cause.value}`" in MATRIX


def test_every_reason_that_a_rank_gives_is_offered_to_rules() -> None:
    words = {value for name, value in vars(last_words).items() if name.isupper() and isinstance(value, str)}
    assert {word for word in words if f"`{word}`" not in MATRIX} == set()


def test_example_is_what_the_api_takes() -> None:
    rules = yaml.safe_load(MATRIX.partition("```yaml\n")[2].partition("```")[0])["spec"]["failurePolicy"]["rules"]
    assert len({rule["name"] for rule in rules}) == len(rules)
    for rule in rules:
        assert sum(key.startswith("on") for key in rule) == 1
        for reason in rule.get("onReasons", ()):
            assert f"`{reason}`" in MATRIX
