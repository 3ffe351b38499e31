"""Alerts and dashboard ask for metrics that exist, and alerts fire when they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.chart.releases import ROOT, of_kind, only, strings
from tiercheck.protocol import names
from tiercheck.protocol.report import (
    Counters,
    MemoryReport,
    Problem,
    RemoteReport,
    Report,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
    Watermarks,
)
from tiercheck.protocol.version import Version
from tiercheck_operator.metrics import JobDurations, JobSeries, Metrics
from tiercheck_operator.model import conditions
from tiercheck_sidecar.control.report import ReportCollector

MONITORED = {
    "metrics": {
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
    },
    "grafana": {"dashboard": {"enabled": True}},
}
OF_THE_TARGET = {"namespace", "tiercheck_job", "pod", "container", "instance", "tiercheck_io_worker", "le"}
"""Labels that Prometheus adds to what a sidecar says, and that of histograms' buckets."""


class OneReport:
    """A sidecar's reporter with something in every field, so that every metric has a sample."""

    def report(self) -> Report:
        version = Version(1, 1)
        return Report(
            job_uid="u", worker=0, pod_uid="p", instance="i", serial=1, attempt=1, revision="r", phase=None,
            restore=RestoreReport(RestoreState.IDLE, None), trainer=TrainerReport(TrainerState.RUNNING),
            holdings=(), remote=RemoteReport(False, None), watermarks=Watermarks(version, version, version),
            memory=MemoryReport(1, 1, 1), problems=(Problem("Some", "thing"),), counters=Counters(),
        )  # fmt: skip


def exposed() -> dict[str, set[str]]:
    """Name of every series -> its labels, asked from the code that makes them."""
    found: dict[str, set[str]] = {}
    for collector, series in Metrics().registry._collector_to_names.items():
        family = next(iter(collector.describe()))
        labels = (
            collector.labels if isinstance(collector, JobSeries | JobDurations) else collector._labelnames
        )
        for name in set(series) - {family.name if family.type in ("counter", "histogram") else ""}:
            found.setdefault(name, set()).update(labels)
    for family in ReportCollector(OneReport()).collect():
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels}
        found.setdefault(family.name + suffix, set()).update(labels)
    return found


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, part, None)
        if inner is not None and not isinstance(inner, str | int | float):
            yield from selectors(inner)
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


def rules() -> list[dict[str, Any]]:
    return [rule for group in only("PrometheusRule", MONITORED)["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    text = next(entry for entry in of_kind("ConfigMap", MONITORED))["data"]["tiercheck.json"]
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def panels_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, those in folded rows too."""
    return [each for panel in state["panels"] for each in (panel, *panel.get("panels", ()))]


def dashboard_expressions() -> list[str]:
    state = dashboard()
    found = [target["expr"] for panel in panels_of(state) for target in panel.get("targets", ())]
    found += [entry["expr"] for entry in state["annotations"]["list"]]
    return [text.replace("$__rate_interval", "5m").replace("$__range", "1h") for text in found]


EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in rules()},
    **{f"dashboard {number}": expression for number, expression in enumerate(dashboard_expressions())},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression_asks_for_what_is_exposed(name: str) -> None:
    known = exposed()
    asked = list(selectors(promql_parser.parse(EXPRESSIONS[name])))
    assert asked
    for selector in asked:
        assert selector.name in known, f"{selector.name} is exposed by nobody"
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[selector.name] | OF_THE_TARGET, (
                f"{selector.name} has no label {matcher.name}"
            )


def test_labels_that_alerts_speak_of_are_labels_of_their_series() -> None:
    known = exposed()
    for rule in rules():
        spoken = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        had = set().union(
            *(known[selector.name] for selector in selectors(promql_parser.parse(rule["expr"])))
        )
        assert spoken <= had | OF_THE_TARGET, rule["alert"]


def test_conditions_that_are_asked_for_exist() -> None:
    known = {value for name, value in vars(conditions).items() if name.isupper()}
    for expression in EXPRESSIONS.values():
        for selector in selectors(promql_parser.parse(expression)):
            if selector.name == "tiercheck_job_condition":
                kinds = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "type"]
                assert {kind for text in kinds for kind in text.split("|")} <= known


def test_every_alert_says_how_bad_it_is_what_happened_and_what_to_do() -> None:
    found = rules()
    assert len(found) > 10
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "${" not in json.dumps(rule), "a threshold was not filled in"


def test_thresholds_labels_and_unwanted_alerts_are_the_users() -> None:
    values = {
        "metrics": {
            "prometheusRule": {
                "enabled": True,
                "peerStaleSeconds": 77,
                "alertLabels": {"team": "training"},
                "disabled": ["TierCheckReconcileSlow"],
            }
        }
    }
    found = {
        rule["alert"]: rule
        for group in only("PrometheusRule", values)["spec"]["groups"]
        for rule in group["rules"]
    }
    assert set(found) == {rule["alert"] for rule in rules()} - {"TierCheckReconcileSlow"}
    assert "> 77" in found["TierCheckPeerCopiesStale"]["expr"]
    assert all(rule["labels"]["team"] == "training" for rule in found.values())


def test_group_without_alerts_is_left_out() -> None:
    disabled = [
        rule["alert"] for rule in rules() if "Operator" in rule["alert"] or "Reconcile" in rule["alert"]
    ]
    values = {"metrics": {"prometheusRule": {"enabled": True, "disabled": disabled}}}
    groups = only("PrometheusRule", values)["spec"]["groups"]
    assert [group["name"] for group in groups] == ["tiercheck-jobs", "tiercheck-sidecars"]


def test_job_and_namespace_of_a_series_are_those_of_the_tiercheckjob() -> None:
    """Else Prometheus would say exported_namespace, and rules with a namespace would find nothing."""
    (endpoint,) = only("ServiceMonitor", MONITORED)["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    monitor = only("PodMonitor", MONITORED)["spec"]["podMetricsEndpoints"][0]
    label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", names.LABEL_JOB)
    assert {"sourceLabels": [label], "targetLabel": "tiercheck_job"} in monitor["relabelings"]


def test_monitors_find_ports_that_exist() -> None:
    service = only("Service", MONITORED)
    monitor = only("ServiceMonitor", MONITORED)["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]
    (endpoint,) = only("PodMonitor", MONITORED)["spec"]["podMetricsEndpoints"]
    assert (
        f'"name": "{endpoint["port"]}"' in (ROOT / "operator/tiercheck_operator/manifests/pod.py").read_text()
    )
    (label,) = only("PodMonitor", MONITORED)["spec"]["selector"]["matchExpressions"]
    assert label["key"] == names.LABEL_JOB_UID


def test_dashboard_is_found_by_grafana_and_reads_from_the_data_source_that_is_chosen() -> None:
    (config,) = of_kind("ConfigMap", MONITORED)
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    state = dashboard()
    assert {panel["datasource"]["uid"] for panel in panels_of(state) if "datasource" in panel} == {
        "${datasource}"
    }
    variables = {variable["name"] for variable in state["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", " ".join(strings([state["panels"], state["templating"]]))))
    assert used <= variables


def test_dashboard_answers_four_questions_in_twelve_panels_and_folds_the_rest() -> None:
    panels = dashboard()["panels"]
    questions = [panel["title"] for panel in panels if panel["type"] == "row" and not panel["collapsed"]]
    assert questions == ["Is it protected?", "How far behind?", "What happened?", "What is wrong?"]
    assert len([panel for panel in panels if panel["type"] != "row"]) == 12


def test_every_line_of_the_dashboard_has_a_unit_and_a_legend_that_covers_nothing() -> None:
    for panel in panels_of(dashboard()):
        if panel["type"] == "timeseries":
            defaults = panel["fieldConfig"]["defaults"]
            assert defaults["unit"] != "none" or defaults["custom"]["axisLabel"], panel["title"]
            assert panel["options"]["legend"]["placement"] == "bottom"


def test_panels_have_a_title_a_meaning_and_a_place_of_their_own() -> None:
    state = dashboard()
    folded = [row["panels"] for row in state["panels"] if row.get("panels")]
    for panels in (state["panels"], *folded):
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, f"{panel['title']} overlaps another panel"
            assert place["x"] + place["w"] <= 24
            taken |= cells
            assert panel["title"]
            assert panel["type"] == "row" or panel["description"]
    everything = panels_of(state)
    assert len({panel["id"] for panel in everything}) == len(everything)


# promtool comes with Debian's package `prometheus`, or from PROMTOOL; without it these tests are skipped,
# and say so.

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
