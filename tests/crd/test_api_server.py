"""The API accepts the examples, fills in defaults, and refuses every mistake with a sentence."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crd.conftest import ROOT, Api
from tests.crd.jobs import (
    ACCEPTED,
    ACCEPTED_AS_CHANGE,
    NOW,
    REFUSED_AS_CHANGE,
    REFUSED_AT_CREATION,
    TOGETHER,
    changed,
    full_status,
    job,
)
from tests.local.apiserver.api_client import Refused, refused_with
from tiercheck_operator.model.status import JobRecord, PlacementRecord, parse_record, render_record
from tiercheck_operator.planning.topology import PRESETS

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


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
        "recovery": {"inProcess": "Auto", "interruptSeconds": 5},
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
    with refused_with(sentence, path.split(".")[1]):
        api.create(changed(job(), path, value), dryRun="All")


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case[1][:40])
def test_fields_that_do_not_go_together_are_refused_with_a_sentence(
    api: Api, case: tuple[dict[str, Any], str]
) -> None:
    with refused_with(case[1]):
        api.create(job(**case[0]), dryRun="All")


@pytest.mark.parametrize("case", REFUSED_AS_CHANGE, ids=refusal)
def test_what_must_not_change_is_refused_while_the_job_runs(api: Api, case: tuple[str, Any, str]) -> None:
    name = new_job(api)
    with refused_with(case[2]):
        api.patch(name, changed({}, *case[:2]))


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
    with refused_with(f'unknown field "{path}"', code=400):
        api.create(changed(job(), path, {}), dryRun="All", fieldValidation="Strict")


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
    bad = {"type": "Running", "status": "True", "reason": "", "message": "", "lastTransitionTime": NOW}
    with refused_with("reason"):
        api.patch_status(new_job(api), {"conditions": [bad]})


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


def columns_of(api: Api, status: dict[str, Any]) -> dict[str, Any]:
    """Of the list, for a job with that status."""
    name = new_job(api)
    api.patch_status(name, status)
    table = api.table()
    names = [column["name"] for column in table["columnDefinitions"]]
    row = next(row["cells"] for row in table["rows"] if row["cells"][0] == name)
    return dict(zip(names, row, strict=True))


def test_nothing_is_tolerated_in_the_list_before_copies_are_complete(api: Api) -> None:
    placed = PlacementRecord("hash", "rack", ("any one rack",), 0)
    status = render_record(JobRecord(attempt=1, phase="Starting", placement=placed))
    assert not columns_of(api, status)["Tolerates"]


def test_columns_tell_the_jobs_story_in_one_line(api: Api) -> None:
    shown = columns_of(api, full_status())
    assert shown.pop("Age")
    assert shown.pop("Name").startswith("j-")
    assert shown == {
        "Phase": "Running", "Reason": None, "Protected": "True", "Step": 57, "Peer-lag": 7, "Remote-step": 40,
        "Tolerates": "any one rack, any one host", "Restarts": 2, "Smaller": 3, "Attempt": 3,
        "Last-cause": "NodeLost",
    }  # fmt: skip
