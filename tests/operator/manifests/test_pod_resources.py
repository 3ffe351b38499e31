"""A pod keeps its QoS class and exclusive cores, and the sidecar gets what its work takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.attach import attach_shapes as shapes
from tests.operator.manifests.test_pod_manifest import container, make_job, with_pod
from tiercheck.protocol import names
from tiercheck_operator.attach.injection import attached_job, attachment_of, inject
from tiercheck_operator.attach.owners import Unattachable, find_owner, find_worker_identity
from tiercheck_operator.config import Config
from tiercheck_operator.controller.decide import decide
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.manifests.resources import resources_problem
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import JobView, Observation
from tiercheck_operator.model.serialization import parse_amount

Object = dict[str, Any]
OURS = (names.LIBRARY_CONTAINER, names.NODE_MEMORY_CONTAINER, names.SIDECAR_CONTAINER)
BOUND = {
    "requests": {"cpu": "16", "memory": "64Gi"},
    "limits": {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "8"},
}


def job_with(
    trainer: Object | None = None, others: Object | None = None, pod: Object | None = None, **spec: Any
) -> JobView:
    """The template's trainer has the resources `trainer`, its other containers `others`, the pod as a whole
    `pod`."""
    job = make_job(**spec)
    given = copy.deepcopy(dict(job.spec.template["spec"]))
    for entry in [*given["containers"], *given["initContainers"]]:
        resources = trainer if entry["name"] == "trainer" else others
        if resources is not None:
            entry["resources"] = resources
    return with_pod(job, **given, **({} if pod is None else {"resources": pod}))


def qos_class(pod: Mapping[str, Any]) -> str:
    """As the API server finds it: by sums over all containers, or by what the pod as a whole has."""
    spec = pod["spec"]
    whole = spec.get("resources")
    holders = (
        [whole]
        if whole
        else [e.get("resources") or {} for e in [*spec["containers"], *spec["initContainers"]]]
    )
    sums: dict[str, dict[str, Decimal]] = {"requests": {}, "limits": {}}
    bound = True
    for entry in holders:
        limits = entry.get("limits") or {}
        requests = {**limits, **(entry.get("requests") or {})}  # what has no request is given its limit
        bound &= {"cpu", "memory"} <= set(limits)
        for kind, quantities in (("requests", requests), ("limits", limits)):
            for name in ("cpu", "memory"):
                if name in quantities:
                    sums[kind][name] = sums[kind].get(name, Decimal(0)) + parse_amount(quantities[name])
    if not sums["requests"] and not sums["limits"]:
        return "BestEffort"
    return "Guaranteed" if bound and sums["requests"] == sums["limits"] else "Burstable"


def resources(pod: Mapping[str, Any], name: str) -> Object:
    found: Object = container(dict(pod), name)["resources"]
    return found


@pytest.mark.parametrize("medium", ["PodMemory", "NodeMemory"])
@pytest.mark.parametrize(
    "trainer",
    [BOUND, {"limits": {"cpu": "7500m", "memory": "64Gi"}}, {"limits": {"cpu": 4, "memory": 2**33}}],
)
def test_guaranteed_pod_stays_guaranteed_and_its_trainer_keeps_its_own_cores(
    trainer: Object, medium: str
) -> None:
    """A container has exclusive cores if its pod is Guaranteed and it asks for whole ones; ours have none of
    their own."""
    job = job_with(trainer, BOUND, tiers={"local": {"sizeLimit": "2Gi", "medium": medium}})
    for pod in (build_pod(job, 0, 0, (), "s:1"), build_spare(job, 0, (), "s:1")):
        kubernetes_validate.validate(pod, "1.34", strict=True)
        assert qos_class(pod) == "Guaranteed"
        assert container(pod, "trainer")["resources"] == trainer
        for name in OURS:
            if name == names.NODE_MEMORY_CONTAINER and medium == "PodMemory":
                continue
            assert parse_amount(resources(pod, name)["requests"]["cpu"]) % 1 != 0, "no whole cores"


@pytest.mark.parametrize("size", ["1Mi", "64Gi"])
def test_containers_before_the_sidecar_cost_nothing_and_ask_for_what_a_limit_range_usually_demands(
    size: str,
) -> None:
    """A pod is counted with the largest of its init containers, or with all that run later."""
    pod = build_pod(make_job(tiers={"local": {"sizeLimit": size}}), 0, 0, (), "s:1")
    asked, later = (resources(pod, name) for name in (names.LIBRARY_CONTAINER, names.SIDECAR_CONTAINER))
    for name, least in (("cpu", "100m"), ("memory", "128Mi")):
        amount = parse_amount(asked["requests"][name])
        assert parse_amount(least) <= amount <= parse_amount(later["requests"][name])
    assert asked["requests"]["memory"] == asked["limits"]["memory"], "whatever ratio is demanded"


@given(st.integers(1, 64), st.integers(1, 4096))
def test_sidecar_of_a_guaranteed_pod_never_asks_for_whole_cores_by_itself(procs: int, gib: int) -> None:
    job = job_with(BOUND, BOUND, tiers={"local": {"sizeLimit": f"{gib}Gi"}}, procsPerWorker=procs)
    cpu = parse_amount(resources(build_pod(job, 0, 0, (), "s:1"), names.SIDECAR_CONTAINER)["limits"]["cpu"])
    assert cpu % 1 != 0
    assert cpu >= Decimal("0.5")


@pytest.mark.parametrize(
    ("trainer", "others"),
    [
        (None, None),
        (BOUND, None),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}, BOUND),
        ({"limits": {"memory": "1Gi"}}, BOUND),
    ],
)
def test_sidecar_of_any_other_pod_has_no_limit_of_cpu(trainer: Object | None, others: Object | None) -> None:
    pod = build_pod(job_with(trainer, others), 0, 0, (), "s:1")
    assert qos_class(pod) == "Burstable"
    assert set(resources(pod, names.SIDECAR_CONTAINER)["limits"]) == {"memory"}


@pytest.mark.parametrize(
    ("procs", "size", "cpu"),
    [(1, "1Gi", "160m"), (8, "64Gi", "760m"), (8, "940Gi", "4260m"), (64, "8Gi", "3340m")],
)
def test_sidecar_asks_for_cpu_by_its_ranks_and_by_the_bytes_that_it_keeps(
    procs: int, size: str, cpu: str
) -> None:
    job = job_with(tiers={"local": {"sizeLimit": size}}, procsPerWorker=procs)
    found = resources(build_pod(job, 0, 0, (), "s:1"), names.SIDECAR_CONTAINER)
    assert found["requests"]["cpu"] == cpu
    assert found["requests"]["memory"] == found["limits"]["memory"]
    assert parse_amount(found["limits"]["memory"]) == parse_amount(size) + 512 * 2**20


@pytest.mark.parametrize(
    ("theirs", "qos", "cpu"),
    [
        (
            {"requests": {"cpu": "16", "memory": "64Gi"}, "limits": {"cpu": "16", "memory": "64Gi"}},
            "Guaranteed",
            "18",
        ),
        ({"limits": {"cpu": "15", "memory": "64Gi"}}, "Guaranteed", "16"),
        ({"limits": {"cpu": "1500m", "memory": "64Gi"}}, "Guaranteed", "1660m"),
        ({"requests": {"cpu": "4"}, "limits": {"cpu": "8", "memory": "64Gi"}}, "Burstable", "8160m"),
    ],
)
def test_pods_own_resources_grow_by_what_the_sidecar_takes(theirs: Object, qos: str, cpu: str) -> None:
    """Or the user's containers would have less than they were given. Whole cores stay whole, and an even
    number even."""
    pod = build_pod(job_with(pod=theirs), 0, 0, (), "s:1")
    kubernetes_validate.validate(pod, "1.34", strict=True)
    whole, ours = pod["spec"]["resources"], resources(pod, names.SIDECAR_CONTAINER)
    assert qos_class(pod) == qos
    assert whole["limits"]["cpu"] == cpu
    assert parse_amount(whole["limits"]["memory"]) == 64 * 2**30 + parse_amount(ours["limits"]["memory"])
    for name, asked in whole["requests"].items():
        before = {**theirs["limits"], **theirs.get("requests", {})}[name]
        assert parse_amount(asked) >= parse_amount(before) + parse_amount(ours["requests"][name])
    assert "cpu" not in ours["limits"], "it uses what the pod has"


def test_request_that_the_api_server_would_find_for_the_pod_is_not_made_smaller_by_ours() -> None:
    """It takes the limit where no container asks for anything, and else the sum of what they ask for."""
    limits = {"limits": {"cpu": "16", "memory": "64Gi"}}
    alone = build_pod(job_with(pod=limits), 0, 0, (), "s:1")["spec"]["resources"]
    assert alone["requests"] == alone["limits"]
    beside = build_pod(job_with(pod=limits, trainer={"requests": {"cpu": "3"}}), 0, 0, (), "s:1")["spec"][
        "resources"
    ]
    assert set(beside["requests"]) == {"memory"}, "the API server adds ours to the trainer's three cores"


def test_what_the_user_gives_the_sidecar_wins_and_the_rest_is_found_for_it() -> None:
    def of(trainer: Object | None, given: Object) -> Object:
        job = job_with(trainer, trainer, sidecar={"resources": given})
        assert resources_problem(job.spec, job.spec.template["spec"]) == ""
        return resources(build_pod(job, 0, 0, (), "s:1"), names.SIDECAR_CONTAINER)

    plain = of(None, {"requests": {"cpu": 2}, "limits": {"memory": "9Gi"}})
    assert plain == {
        "requests": {"cpu": "2", "memory": str(5 * 2**29)},
        "limits": {"memory": "9Gi"},
    }
    assert of(None, {"limits": {"cpu": "100m"}})["requests"]["cpu"] == "100m", (
        "or Kubernetes would refuse the pod"
    )
    assert of(None, {"requests": {"memory": "9Gi"}})["limits"]["memory"] == "9Gi"
    for kind in ("requests", "limits"):
        found = of(BOUND, {kind: {"cpu": "2"}})
        assert found["requests"]["cpu"] == found["limits"]["cpu"] == "2", (
            "whole cores, if the user wants them"
        )


@pytest.mark.parametrize(
    ("trainer", "given", "word"),
    [
        (None, {"limits": {"memory": "2Gi"}}, "needs 2560Mi"),
        (None, {"requests": {"memory": "1Gi"}}, "needs 2560Mi"),
        (None, {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}, "more than its limit"),
        (BOUND, {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}, "QoS class Guaranteed"),
    ],
)
def test_resources_that_cannot_be_are_refused_with_a_sentence(
    trainer: Object | None, given: Object, word: str
) -> None:
    job = job_with(trainer, trainer, sidecar={"resources": given})
    problem = resources_problem(job.spec, job.spec.template["spec"])
    assert word in problem
    obs = Observation(now=0.0, job=job, pods=(), nodes={}, reports={}, placement=None)
    status = decide(obs).status
    assert status is not None
    placed = status.condition(conditions.PLACED)
    assert placed is not None
    assert (placed.status, placed.reason, placed.message) == (False, conditions.INVALID_SPEC, problem)


def test_memory_of_the_node_is_not_the_sidecars_to_be_measured_against() -> None:
    job = job_with(
        sidecar={"resources": {"limits": {"memory": "1Gi"}}},
        tiers={"local": {"sizeLimit": "2Gi", "medium": "NodeMemory"}},
    )
    assert resources_problem(job.spec, job.spec.template["spec"]) == ""


def attached(pod: Object, **policy: Any) -> Object:
    owner = shapes.job(4)
    seat = find_worker_identity(pod, find_owner(pod), owner)
    spec = {**shapes.POLICY["spec"], **policy}
    attachment = attachment_of(pod, find_owner(pod), seat, "careful", None)
    return inject(pod, attachment, seat, attached_job("ml", attachment, spec), Config(sidecar_image="s:1"))


def test_attached_guaranteed_pod_stays_guaranteed_too() -> None:
    pod = shapes.job_pod(0)
    pod["spec"]["containers"][0]["resources"] = BOUND
    assert qos_class(attached(pod)) == "Guaranteed"
    found = resources(attached(pod, sidecar={"resources": {"limits": {"cpu": "3"}}}), names.SIDECAR_CONTAINER)
    assert found["requests"]["cpu"] == found["limits"]["cpu"] == "3"
    with pytest.raises(Unattachable, match="QoS class Guaranteed"):
        attached(pod, sidecar={"resources": {"limits": {"cpu": "3"}, "requests": {"cpu": "2"}}})


def test_ephemeral_storage_of_the_sidecar_is_asked_for_by_every_container_of_ours() -> None:
    given = {"requests": {"ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "2Gi"}}
    for job in (job_with(BOUND, BOUND), job_with(), job_with(pod=BOUND)):
        bound = replace(job, spec=replace(job.spec, sidecar_resources=given))
        pod = build_pod(bound, 0, 0, (), "s:1")
        for name in (names.LIBRARY_CONTAINER, names.SIDECAR_CONTAINER):
            for kind, storage in given.items():
                assert resources(pod, name)[kind].items() >= storage.items()


def test_what_one_pod_is_given_is_not_shared_with_the_next() -> None:
    job = job_with(BOUND, BOUND)
    first, second = (build_pod(job, worker, 0, (), "s:1") for worker in (0, 1))
    resources(first, names.LIBRARY_CONTAINER)["limits"]["cpu"] = "9"
    assert resources(second, names.LIBRARY_CONTAINER)["limits"]["cpu"] == "500m"
    assert replace(job.spec, workers=3).sidecar_resources == {}
