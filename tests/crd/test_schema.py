"""The CRD keeps the promises that need no API server: fields described, lists bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiercheck.protocol import names
from tiercheck_operator.model import conditions
from tiercheck_operator.model.status import (
    CheckpointRecord,
    Facts,
    FailedStartRecord,
    HangRecord,
    JobRecord,
    MemoryRecord,
    PlacementRecord,
    ProofRecord,
    Recovery,
    SizeRecord,
    SparesRecord,
    TierRecord,
    render_record,
)
from tiercheck_operator.planning.topology import PRESETS

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "tiercheckjobs.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema under `schema` with its path; items of lists as `[]`, values of maps as `{}`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from fields(schema["additionalProperties"], f"{path}{{}}")


def field(path: str) -> dict[str, Any]:
    return dict(fields(SCHEMA))[path]


def test_names_are_those_of_the_protocol() -> None:
    assert CRD["spec"]["group"] == names.API_GROUP
    assert VERSION["name"] == names.API_VERSION
    assert CRD["spec"]["names"]["kind"] == names.KIND
    assert CRD["spec"]["names"]["plural"] == names.PLURAL
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.API_GROUP}"
    assert field(".spec.managedBy")["default"] == names.CONTROLLER


def test_every_field_says_what_it_means() -> None:
    undescribed = [
        path
        for path, schema in fields(SCHEMA)
        if not schema.get("description") and not path.startswith(".metadata") and not path.endswith("{}")
        and not (path.endswith("[]") and schema.get("type") == "string")
    ]  # fmt: skip
    assert undescribed == []


def test_descriptions_are_sentences() -> None:
    for path, schema in fields(SCHEMA):
        if "description" in schema:
            assert schema["description"][0] == schema["description"][0].upper() or path == ".apiVersion", path
            assert schema["description"].endswith("."), path


def test_every_list_and_every_string_that_a_rule_reads_is_bounded() -> None:
    lists = [
        path for path, schema in fields(SCHEMA) if schema.get("type") == "array" and "maxItems" not in schema
    ]
    assert lists == []
    strings = [
        path
        for path, schema in fields(SCHEMA["properties"]["spec"])
        if "x-kubernetes-validations" in schema
        and schema.get("type") == "string"
        and "maxLength" not in schema
    ]
    assert strings == []


def test_unknown_fields_are_kept_only_where_they_belong_to_kubernetes() -> None:
    kept = [path for path, schema in fields(SCHEMA) if schema.get("x-kubernetes-preserve-unknown-fields")]
    theirs = (".spec.template.spec", ".spec.tiers.remote.directory.volume", ".spec.sidecar.env[].valueFrom")
    assert all(path.startswith(theirs) for path in kept), kept


def test_every_rule_has_a_sentence() -> None:
    rules = [
        (path, rule) for path, schema in fields(SCHEMA) for rule in schema.get("x-kubernetes-validations", ())
    ]
    assert len(rules) > 25
    for path, rule in rules:
        assert len(rule["message"].split()) >= 5, (path, rule)


def test_presets_have_the_levels_that_the_planner_knows() -> None:
    assert set(field(".spec.topology.preset")["enum"]) == set(PRESETS)
    rule = next(
        rule
        for rule in field(".spec")["x-kubernetes-validations"]
        if "spread.level" in rule.get("fieldPath", "")
    )
    listed = {
        preset: re.findall(r"'([^']+)'", levels)
        for preset, levels in re.findall(r"preset == '([\w-]+)' \? \S+ in \[([^\]]*)\]", rule["rule"])
    }
    listed["generic"] = re.findall(r"'([^']+)'", re.findall(r"\[([^\]]*)\]", rule["rule"])[-1])
    assert listed == {preset: [level.name for level in levels] for preset, levels in PRESETS.items()}
    for preset, levels in PRESETS.items():
        assert f"{preset} has {', '.join(level.name for level in levels)}" in rule["message"]
    description = field(".spec.topology.preset")["description"]
    for level in (level for levels in PRESETS.values() for level in levels):
        # The description writes a family of labels as "prefix-2, -1, -0".
        stem = level.label.rpartition("-")[0] if level.label[-1].isdigit() else level.label
        assert stem in description, level


def test_columns_point_at_fields_of_the_status() -> None:
    known = {path for path, _ in fields(SCHEMA)} | {".metadata.creationTimestamp"}
    columns = VERSION["additionalPrinterColumns"]
    by_type = re.compile(r'\[\?\(@\.type=="(\w+)"\)\]')
    asked = [by_type.search(column["jsonPath"]) for column in columns]
    assert {match[1] for match in asked if match} <= {conditions.PROTECTED}
    assert {by_type.sub("[]", column["jsonPath"]) for column in columns} <= known
    normal = [column["name"] for column in columns if not column.get("priority")]
    assert normal == ["Phase", "Reason", "Protected", "Step", "Peer-lag", "Remote-step", "Restarts", "Age"]
    assert [column["name"] for column in columns if column.get("priority")] == [
        "Tolerates",
        "Smaller",
        "Attempt",
        "Last-cause",
    ]


def test_conditions_are_a_list_map_by_type() -> None:
    listed = field(".status.conditions")
    assert listed["x-kubernetes-list-type"] == "map"
    assert listed["x-kubernetes-list-map-keys"] == ["type"]


@pytest.mark.parametrize("name", ["status"])
def test_controller_writes_no_field_that_would_be_pruned(name: str) -> None:
    record = JobRecord(
        members="digest",
        step=3,
        step_seconds=0.5,
        tiers={tier: TierRecord(2, "2026-01-01T00:00:00Z", 1) for tier in ("local", "peer", "remote")},
        proofs={tier: ProofRecord(2, "2026-01-01T00:00:00Z") for tier in ("local", "peer", "remote")},
        placement=PlacementRecord("h", "rack", ("any one rack",), 0),
        recovery=Recovery(
            "NodeLost",
            "node n is lost",
            1.0,
            2.0,
            2,
            "why",
            2,
            1,
            1,
            3.0,
            4.0,
            5.0,
            facts=Facts(1, ("Evicted",), ("n",)),
            rule="r",
            tries=1,
            reached=3,
            noticed_at=1.5,
        ),
        size=SizeRecord(3, 1.5),
        spares=SparesRecord(2, 1),
        checkpoint=CheckpointRecord(3, "Off", "why"),
        memory=MemoryRecord(4, 3, 2, 1),
        hang=HangRecord(1, "n", 1),
        failed_start=FailedStartRecord(1, "n", 1, (2,)),
        last_recovery={"rule": "r", "deltas": 3, "rebuilt": 1, "tiers": {"local": 1, "peer": 2, "remote": 0}},
        started="2026-01-01T00:00:00Z",
        completed="2026-01-01T00:00:00Z",
    )
    assert unknown(render_record(record), SCHEMA["properties"][name], name) == []


def test_every_moment_that_the_controller_writes_is_a_time_for_the_api() -> None:
    """And a number only where it is a duration, a count or a size."""
    moments = [
        path for path, kind in leaves(SCHEMA["properties"]["status"]) if kind.get("format") == "date-time"
    ]
    numbers = [path for path, kind in leaves(SCHEMA["properties"]["status"]) if kind.get("type") == "number"]
    assert [path for path in numbers if not path.endswith("Seconds")] == []
    for name in (
        "recovery.failedAt",
        "recovery.releasedAt",
        "size.roomSince",
        "lastRecovery.time",
        "startTime",
    ):
        assert name in moments


def leaves(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    inner = schema.get("properties") or {}
    found = [leaf for name, each in inner.items() for leaf in leaves(each, f"{path}.{name}".lstrip("."))]
    return found or [(path, schema)]


def unknown(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Paths in `value` that the schema does not declare."""
    if isinstance(value, list):
        return [found for entry in value for found in unknown(entry, schema["items"], f"{path}[]")]
    if not isinstance(value, dict):
        return []
    declared = schema.get("properties", {})
    return [f"{path}.{name}" for name in value if name not in declared] + [
        found
        for name, inner in value.items()
        if name in declared
        for found in unknown(inner, declared[name], f"{path}.{name}")
    ]
