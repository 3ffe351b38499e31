"""The TierCheckJob CRD on a real API: accepted as it is, and its rules hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused
from tests.local.apiserver.defining import REPOSITORY, define


@pytest.fixture(scope="session")
def tiercheckjobs_defined(api: Api) -> None:
    define(api, REPOSITORY / "crds" / "tiercheckjobs.yaml")


@pytest.fixture
def jobs(tiercheckjobs_defined: None, namespace: str) -> str:
    return f"/apis/tiercheck.io/v1alpha1/namespaces/{namespace}/tiercheckjobs"


def job(name: str = "gpt", **spec: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "example:1", "command": ["torchrun", "train.py"]}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": name},
        "spec": {"workers": 4, "template": template, **spec},
    }


def test_smallest_job_is_accepted_and_completed(api: Api, jobs: str) -> None:
    made = api.create(jobs, job())
    assert made["spec"]["suspend"] is False
    assert made["spec"]["managedBy"] == "tiercheck.io/controller"
    assert made["metadata"]["generation"] == 1


def test_workers_are_fixed_while_the_job_runs(api: Api, jobs: str) -> None:
    api.create(jobs, job())
    with pytest.raises(Refused) as refused:
        api.merge(f"{jobs}/gpt", {"spec": {"workers": 5}})
    assert "workers cannot change while the job runs" in refused.value.message
    api.merge(f"{jobs}/gpt", {"spec": {"suspend": True}})
    assert api.merge(f"{jobs}/gpt", {"spec": {"workers": 5}})["spec"]["workers"] == 5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 0}, "spec.workers"),
        ({"tiers": {"peer": {"copies": 4}}}, "copies must be smaller than workers"),
        ({"tiers": {"peer": {"copies": 1, "parity": {"data": 2, "parity": 1}}}}, "tiers.peer takes copies or "
                                                                                 "parity, not both"),
        ({"tiers": {"peer": {"spread": {"level": "galaxy"}}}}, "spread.level"),
        ({"template": {"spec": {"containers": [{"name": "other"}]}}}, "needs a container named trainer"),
    ],
)  # fmt: skip
def test_impossible_job_is_refused_with_a_sentence(
    api: Api, jobs: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Refused) as refused:
        api.create(jobs, job(**changes))
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    assert sentence in refused.value.message


def test_name_that_fits_no_dns_label_is_refused(api: Api, jobs: str) -> None:
    with pytest.raises(Refused) as refused:
        api.create(jobs, job("j" * 41))
    assert "at most 40 characters" in refused.value.message


def test_conditions_are_kept_one_per_type(api: Api, jobs: str) -> None:
    api.create(jobs, job())
    condition = {
        "type": "Placed",
        "status": "True",
        "reason": "Placed",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    after = api.merge(f"{jobs}/gpt/status", {"status": {"conditions": [condition]}})
    assert after["status"]["conditions"] == [condition]
    with pytest.raises(Refused) as refused:
        api.merge(f"{jobs}/gpt/status", {"status": {"conditions": [condition, condition]}})
    assert "Duplicate value" in refused.value.message
