"""The API server accepts attached jobs and their policies, and says what is wrong with others."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crd.crd_api import ROOT, Api, Refused, refused_with
from tests.crd.jobs import changed, job
from tests.operator.attach.test_attach_admission import made_job

_POLICIES = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckpolicies"
DEFINITION = yaml.safe_load((ROOT / "crds" / "tiercheckpolicies.yaml").read_text())
JOBS = yaml.safe_load((ROOT / "crds" / "tiercheckjobs.yaml").read_text())
EXAMPLE = ROOT / "examples" / "attach" / "policy.yaml"


@pytest.fixture(scope="session")
def policies(api: Api) -> Api:
    """The API server, which knows policies too."""
    api.install(DEFINITION, _POLICIES)
    return api


def create(api: Api, raw: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = api.http.create(_POLICIES, raw, dryRun="All", fieldValidation="Strict")
    return made


def policy(**spec: Any) -> dict[str, Any]:
    kind = {"apiVersion": "tiercheck.io/v1alpha1", "kind": "TierCheckPolicy"}
    return {**kind, "metadata": {"name": "careful"}, "spec": spec}


def attached(**changes: Any) -> dict[str, Any]:
    raw = made_job()
    raw["metadata"] = {"name": f"job-{uuid.uuid4().hex[:8]}", "namespace": "default"}
    raw["spec"] |= changes
    return raw


def spec_of(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    (version,) = definition["spec"]["versions"]
    found: Mapping[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def test_policy_has_the_jobs_own_fields() -> None:
    ours, theirs = spec_of(DEFINITION)["properties"], spec_of(JOBS)["properties"]
    assert set(ours) == {
        "procsPerWorker",
        "topology",
        "checkpoint",
        "tiers",
        "restore",
        "failurePolicy",
        "sidecar",
    }
    assert all(ours[name] == theirs[name] for name in ours if name != "procsPerWorker")
    assert len(spec_of(DEFINITION)["x-kubernetes-validations"]) >= 3


def test_policy_gets_the_jobs_defaults(policies: Api) -> None:
    given = create(policies, policy())["spec"]
    wanted = policies.create(job(), dryRun="All")["spec"]
    assert given == {name: wanted[name] for name in given}
    assert {"checkpoint", "tiers", "topology", "failurePolicy"} <= set(given)


def test_example_is_accepted(policies: Api) -> None:
    create(policies, yaml.safe_load(Path(EXAMPLE).read_text()))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("metadata.name", "p" * 64, "at most 63 characters long"),
        ("spec.procsPerWorker", 0, "greater than or equal to 1"),
        ("spec.tiers.peer.spread.level", "row", "must be the name of a level"),
        ("spec.tiers.remote", {"s3": {"bucket": "b"}, "everySteps": 7}, "must be a multiple of"),
        ("spec.failurePolicy.rollbackAfterNonFinite", 3, "needs checkpoint.sanityGate Finite"),
        ("spec.tiers.peer", {"copies": 1, "parity": {"data": 2, "parity": 1}}, "copies or parity, not both"),
    ],
)
def test_mistake_in_a_policy_is_refused_with_the_jobs_sentence(
    policies: Api, path: str, value: Any, said: str
) -> None:
    raw = policy(checkpoint={"snapshot": {"everySteps": 5}, "sanityGate": "Off"})
    with refused_with(said):
        create(policies, changed(raw, path, value))


def test_what_belongs_to_the_owner_is_no_field_of_a_policy(policies: Api) -> None:
    for field in ("workers", "template", "suspend", "spares"):
        with pytest.raises(Refused, match=f'unknown field "spec.{field}"'):
            create(policies, policy(**{field: 1}))


def test_job_that_the_operator_makes_for_an_owner_is_accepted(api: Api) -> None:
    raw = api.create(attached(), dryRun="All", fieldValidation="Strict")
    assert "template" not in raw["spec"]
    assert raw["spec"]["attach"]["owner"]["uid"] == "job-uid"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (attached(template=job()["spec"]["template"]), "needs either a template"),
        (attached(suspend=True), "suspend the Job, JobSet, TrainJob or PyTorchJob"),
        (attached(spares=1), "cannot have spares"),
        (changed(attached(), "spec.attach.owner.kind", "Deployment"), "supported values"),
    ],
    ids=["template", "suspend", "spares", "kind"],
)
def test_attached_job_cannot_have_what_is_its_owners(api: Api, raw: dict[str, Any], said: str) -> None:
    with refused_with(said):
        api.create(raw, dryRun="All")


def test_job_needs_a_template_or_an_owner(api: Api) -> None:
    raw = job()
    del raw["spec"]["template"]
    with pytest.raises(Refused, match="needs either a template"):
        api.create(raw, dryRun="All")


def test_attachment_is_for_life(api: Api) -> None:
    raw = attached()
    name = api.create(raw)["metadata"]["name"]
    with pytest.raises(Refused, match="attach cannot change"):
        api.patch(name, {"spec": {"attach": {"container": "another"}}})
    with pytest.raises(Refused, match="between template and attach"):
        api.patch(name, {"spec": {"attach": None, "template": job()["spec"]["template"]}})
