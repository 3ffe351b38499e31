"""The API accepts the examples, fills in defaults, and refuses every mistake with a sentence."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crd.crd_api import ROOT, Api, Refused
from tests.crd.jobs import (
    ACCEPTED,
    ACCEPTED_AS_CHANGE,
    REFUSED_AS_CHANGE,
    REFUSED_AT_CREATION,
    TOGETHER,
    changed,
    job,
)
from tiercheck.protocol.version import Branch, History
from tiercheck_operator.model.status import (
    Condition,
    JobRecord,
    PlacementRecord,
    Recovery,
    SizeRecord,
    SparesRecord,
    TierRecord,
    parse_record,
    render_record,
)
from tiercheck_operator.planning.topology import PRESETS

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
NOW = "2026-01-01T00:00:00Z"


def jobs_in(path: Path) -> list[dict[str, Any]]:
    return [raw for raw in yaml.safe_load_all(path.read_text()) if raw["kind"] == "TierCheckJob"]


def new_job(api: Api, **spec: Any) -> str:
    """Create a job; returns its name."""
    return api.create(job(name=f"j-{uuid.uuid4().hex[:12]}", **spec))["metadata"]["name"]


def refusal(case: tuple[str, Any, str]) -> str:
    return f"{case[0].rpartition('.')[2] or case[0]}: {case[2][:40]}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted_without_a_warning(api: Api, path: Path) -> None:
    found = jobs_in(path)
    assert found
    for raw in found:
        api.create(raw, dryRun="All", fieldValidation="Strict")


def test_defaults_are_filled_in_by_the_server(api: Api) -> None:
    spec = api.create(job(), dryRun="All")["spec"]
    del spec["template"]
    assert spec == {
        "suspend": False,
        "managedBy": "tiercheck.io/controller",
        "workers": 4,
        "procsPerWorker": 1,
        "disruptionBudget": {"mode": "OneAtATime", "holdSeconds": 600},
        "spares": 0,
        "topology": {"preset": "generic"},
        "checkpoint": {
            "snapshot": {},
            "delta": {"mode": "Auto"},
            "sanityGate": "Finite",
            "verify": "Sampled",
        },
        "tiers": {
            "local": {"medium": "PodMemory", "sizeLimit": "8Gi"},
            "peer": {"encryption": "Authenticated", "transport": "TCP", "spread": {"mode": "Preferred"}},
        },
        "restore": {"rehearseEvery": "10m", "proveSteps": 0},
        "failurePolicy": {
            "maxRestarts": 10,
            "resetAfterSeconds": 3600,
            "restoreStallSeconds": 180,
            "hang": {"mode": "Restart", "stepFactor": 20, "minSeconds": 1800},
        },
    }


def test_remote_tier_gets_its_defaults_only_where_there_is_one(api: Api) -> None:
    spec = api.create(changed(job(), "spec.tiers.remote.s3.bucket", "bucket"), dryRun="All")["spec"]
    assert spec["tiers"]["remote"] == {"s3": {"bucket": "bucket", "prefix": ""}, "everySteps": 500, "keep": 5}


def test_pod_template_is_kept_as_the_user_wrote_it(api: Api) -> None:
    raw = changed(job(), "spec.template.spec.tolerations", [{"key": "gpu", "operator": "Exists"}])
    raw = changed(raw, "spec.template.spec.containers.0.resources", {"limits": {"nvidia.com/gpu": "1"}})
    raw = changed(raw, "spec.template.metadata", {"labels": {"team": "a"}, "annotations": {"note": "b"}})
    assert api.create(raw, dryRun="All")["spec"]["template"] == raw["spec"]["template"]


@pytest.mark.parametrize("case", REFUSED_AT_CREATION, ids=refusal)
def test_mistake_is_refused_with_a_sentence(api: Api, case: tuple[str, Any, str]) -> None:
    path, value, sentence = case
    with pytest.raises(Refused) as refused:
        api.create(changed(job(), path, value), dryRun="All")
    assert refused.value.code == 422
    assert refused.value.reason == "Invalid"
    assert sentence in refused.value.message
    assert path.split(".")[1] in refused.value.message


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case[1][:40])
def test_fields_that_do_not_go_together_are_refused_with_a_sentence(
    api: Api, case: tuple[dict[str, Any], str]
) -> None:
    spec, sentence = case
    with pytest.raises(Refused) as refused:
        api.create(job(**spec), dryRun="All")
    assert refused.value.code == 422
    assert sentence in refused.value.message


@pytest.mark.parametrize(
    "case", ACCEPTED, ids=lambda case: f"{case[0].rpartition('.')[2]}={str(case[1])[:30]}"
)
def test_unusual_but_right_job_is_accepted(api: Api, case: tuple[str, Any]) -> None:
    api.create(changed(job(), *case), dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_host_is_a_level_of_every_preset(api: Api, preset: str) -> None:
    raw = changed(job(topology={"preset": preset}), "spec.tiers.peer.spread.level", "host")
    api.create(raw, dryRun="All")


@pytest.mark.parametrize(
    "path", ["spec.spare", "spec.checkpoint.deltas", "spec.tiers.local.mode", "spec.worker"]
)
def test_unknown_field_is_named_and_refused_by_kubectls_validation(api: Api, path: str) -> None:
    with pytest.raises(Refused) as refused:
        api.create(changed(job(), path, {}), dryRun="All", fieldValidation="Strict")
    assert refused.value.code == 400
    assert f'unknown field "{path}"' in refused.value.message


@pytest.mark.parametrize("case", REFUSED_AS_CHANGE, ids=refusal)
def test_what_must_not_change_is_refused_while_the_job_runs(api: Api, case: tuple[str, Any, str]) -> None:
    path, value, sentence = case
    name = new_job(api)
    with pytest.raises(Refused) as refused:
        api.patch(name, changed({}, path, value))
    assert refused.value.code == 422
    assert sentence in refused.value.message


@pytest.mark.parametrize("case", ACCEPTED_AS_CHANGE, ids=lambda case: case[0])
def test_what_may_change_can_be_changed_while_the_job_runs(api: Api, case: tuple[str, Any]) -> None:
    before = api.read(new_job(api))
    after = api.patch(before["metadata"]["name"], changed({}, *case))
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1


def test_workers_can_change_once_the_job_is_suspended(api: Api) -> None:
    name = new_job(api)
    with pytest.raises(Refused, match="to true first"):
        api.patch(name, {"spec": {"suspend": True, "workers": 8}})
    api.patch(name, {"spec": {"suspend": True}})
    assert api.patch(name, {"spec": {"workers": 8, "suspend": False}})["spec"]["workers"] == 8


def full_status() -> dict[str, Any]:
    """Everything that the controller can write."""
    return render_record(
        JobRecord(
            observed_generation=1,
            attempt=3,
            phase="Running",
            members="digest",
            history=History((Branch(1, 0), Branch(3, 40, ranks=8))),
            crashes=1,
            disruptions=1,
            step=57,
            step_seconds=0.25,
            tiers={tier: TierRecord(step, NOW, 57 - step) for tier,
                step in (("local", 55), ("peer", 50), ("remote", 40))},
            placement=PlacementRecord("hash", "rack", ("any one rack", "any one host"), 0, complete=True),
            size=SizeRecord(3, 1.5),
            spares=SparesRecord(2, 1),
            recovery=Recovery("PodLost", "pod j-2-0 is gone", 1.5, 2.5, 3, "because", 40, 1, 3, 3.5, 4.5,
                5.5),
            last_recovery={
                "attempt": 3, "cause": "NodeLost", "message": "node n-1 is lost", "reason": "because",
                "tiers": {"local": 3, "peer": 1, "remote": 0}, "step": 40, "lostSteps": 3,
                "detectSeconds": 1.0,
                "restoreSeconds": 2.25, "totalSeconds": 4.0, "time": NOW,
            },
            started=NOW,
            completed=NOW,
            conditions=(
                Condition("Running", True, "Released", "The trainers were released.", NOW, 1),
                Condition("Protected", True, "CopiesComplete", "Every copy is made.", NOW, 1),
            ),
        )
    )  # fmt: skip


def test_everything_the_controller_writes_is_kept(api: Api) -> None:
    name = new_job(api)
    written = full_status()
    assert api.patch_status(name, written)["status"] == written
    assert parse_record(api.read(name)["status"]) == parse_record(written)


def test_status_changes_neither_spec_nor_generation(api: Api) -> None:
    before = api.read(new_job(api))
    after = api.patch_status(before["metadata"]["name"], {"attempt": 2})
    assert (after["spec"], after["metadata"]["generation"]) == (
        before["spec"],
        before["metadata"]["generation"],
    )
    ignored = api.patch(before["metadata"]["name"], {"status": {"attempt": 9}})
    assert ignored["status"]["attempt"] == 2


def test_condition_without_a_reason_is_refused(api: Api) -> None:
    name = new_job(api)
    bad = {"type": "Running", "status": "True", "reason": "", "message": "", "lastTransitionTime": NOW}
    with pytest.raises(Refused) as refused:
        api.patch_status(name, {"conditions": [bad]})
    assert "reason" in refused.value.message


def test_second_condition_of_a_type_is_refused(api: Api) -> None:
    name = new_job(api)
    condition = {
        "type": "Placed",
        "status": "True",
        "reason": "Placed",
        "message": "",
        "lastTransitionTime": NOW,
    }
    assert api.patch_status(name, {"conditions": [condition]})["status"]["conditions"] == [condition]
    with pytest.raises(Refused, match="Duplicate value"):
        api.patch_status(name, {"conditions": [condition, condition]})


def test_moments_in_the_status_are_times_that_a_person_can_read(api: Api) -> None:
    """`kubectl describe` showed `Detected At: 1.795331992686e+09`."""
    name = new_job(api)
    api.patch_status(name, full_status())
    told = api.read(name)["status"]
    assert told["recovery"]["detectedAt"] == "1970-01-01T00:00:02.500Z"
    assert told["size"]["roomSince"] == "1970-01-01T00:00:01.500Z"
    with pytest.raises(Refused):
        api.patch_status(name, {"recovery": {**told["recovery"], "detectedAt": "yesterday"}})


def test_nothing_is_tolerated_in_the_list_before_copies_are_complete(api: Api) -> None:
    name = new_job(api)
    placed = PlacementRecord("hash", "rack", ("any one rack",), 0)
    api.patch_status(name, render_record(JobRecord(attempt=1, phase="Starting", placement=placed)))
    table = api.table()
    columns = [column["name"] for column in table["columnDefinitions"]]
    row = next(row["cells"] for row in table["rows"] if row["cells"][0] == name)
    assert not dict(zip(columns, row, strict=True))["Tolerates"]


def test_columns_tell_the_jobs_story_in_one_line(api: Api) -> None:
    name = new_job(api)
    api.patch_status(name, full_status())
    table = api.table()
    columns = [column["name"] for column in table["columnDefinitions"]]
    row = next(row["cells"] for row in table["rows"] if row["cells"][0] == name)
    shown = dict(zip(columns, row, strict=True))
    assert shown["Age"]
    del shown["Age"]
    assert shown == {
        "Name": name,
        "Phase": "Running",
        "Reason": None,
        "Protected": "True",
        "Step": 57,
        "Peer-lag": 7,
        "Remote-step": 40,
        "Tolerates": "any one rack, any one host",
        "Restarts": 2,
        "Smaller": 3,
        "Attempt": 3,
        "Last-cause": "NodeLost",
    }
