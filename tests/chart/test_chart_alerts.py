"""Alerts fire when they should and not when they should not, by Prometheus' own `promtool test rules`.

promtool comes with Debian's package `prometheus`, or from PROMTOOL; without it these tests are skipped, and
say so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_under_test import only

STORIES = Path(__file__).with_name("alerts_test.yaml")
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    not PROMTOOL, reason="no promtool on PATH or in PROMTOOL (Debian: prometheus)"
)


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = only("PrometheusRule", {"metrics": {"prometheusRule": {"enabled": True}}})[
        "spec"
    ]["groups"]
    return found


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}, sort_keys=False))
    stories = {"rule_files": ["rules.yaml"], **yaml.safe_load(STORIES.read_text())}
    (tmp_path / "stories.yaml").write_text(yaml.safe_dump(stories, sort_keys=False))
    return tmp_path


@needs_promtool
def test_prometheus_accepts_the_rules(folder: Path) -> None:
    done = promtool(folder, "check", "rules", "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_in_their_stories_and_are_silent_in_a_healthy_one(folder: Path) -> None:
    done = promtool(folder, "test", "rules", "stories.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_stories_would_notice_an_alert_that_never_fires(folder: Path) -> None:
    rules = (folder / "rules.yaml").read_text()
    for rule in [rule["alert"] for group in groups() for rule in group["rules"]]:
        broken = yaml.safe_load(rules)
        for group in broken["groups"]:
            for entry in group["rules"]:
                if entry["alert"] == rule:
                    entry["expr"] = "vector(1) == 0"
        (folder / "rules.yaml").write_text(yaml.safe_dump(broken, sort_keys=False))
        assert promtool(folder, "test", "rules", "stories.yaml").returncode != 0, f"{rule} is in no story"


def test_every_alert_has_a_story_and_is_asked_to_be_silent_in_the_healthy_one() -> None:
    healthy, *others = yaml.safe_load(STORIES.read_text())["tests"]
    alerts = {rule["alert"] for group in groups() for rule in group["rules"]}
    assert {entry["alertname"] for entry in healthy["alert_rule_test"]} == alerts
    assert set(re.findall(r"TierCheck\w+", yaml.safe_dump(others))) == alerts
