"""The pages on installing and monitoring are true: the values and alerts that they name exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.chart.chart_under_test import CHART, ROOT, objects, only

PAGES = ("start/install.md", "operate/monitoring.md")
GUIDE = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def paths(schema: dict[str, Any], prefix: str = "") -> set[str]:
    """Every value and group of values."""
    found = set()
    for name, entry in schema.get("properties", {}).items():
        found |= {prefix + name, *paths(entry, f"{prefix}{name}.")}
    return found


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_values_of_the_guide_are_accepted_as_they_stand(number: int) -> None:
    assert len(objects(yaml.safe_load(BLOCKS[number]))) > 5


def test_values_that_the_guide_names_exist() -> None:
    known = paths(json.loads((CHART / "values.schema.json").read_text()))
    groups = {path.partition(".")[0] for path in known}
    named = {
        word
        for word in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)*)(?:: \w+)?`", GUIDE)
        if word.partition(".")[0] in groups
    }
    named |= set(re.findall(r"--set ([\w.]+)=", GUIDE))
    assert len(named) > 15
    assert named <= known


def test_alerts_of_the_guide_are_those_of_the_chart() -> None:
    told = dict(re.findall(r"^\| `(TierCheck\w+)` \| (\w+) \|", GUIDE, re.MULTILINE))
    groups = only("PrometheusRule", {"metrics": {"prometheusRule": {"enabled": True}}})["spec"]["groups"]
    assert told == {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
