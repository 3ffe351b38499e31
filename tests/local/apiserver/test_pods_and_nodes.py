"""Pods and nodes: bound once, evicted with a reason, deleted with grace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused, pod


def bound_pod(api: Api, core: str, name: str = "p", **spec: Any) -> str:
    """A pod on a node. Returns its path."""
    api.create(f"{core}/pods", pod(name, {"app": "x"}, **spec))
    target = {"kind": "Node", "name": "node-1"}
    api.create(f"{core}/pods/{name}/binding", {"metadata": {"name": name}, "target": target})
    return f"{core}/pods/{name}"


def eviction(name: str = "p", **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    return body | ({"deleteOptions": options} if options else {})


def test_new_pod_is_pending_whatever_it_says(api: Api, core: str) -> None:
    made = api.create(f"{core}/pods", pod("p") | {"status": {"phase": "Running"}})
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert {t["key"]: t["tolerationSeconds"] for t in spec["tolerations"]} == {
        "node.kubernetes.io/not-ready": 300,
        "node.kubernetes.io/unreachable": 300,
    }


def test_pod_without_containers_is_invalid(api: Api, core: str) -> None:
    with pytest.raises(Refused) as refused:
        api.create(f"{core}/pods", {"metadata": {"name": "p"}, "spec": {}})
    assert refused.value.message == 'Pod "p" is invalid: spec.containers: Required value'


def test_pod_spec_is_frozen(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    with pytest.raises(Refused) as refused:
        api.merge(f"{core}/pods/p", {"spec": {"nodeName": "elsewhere"}})
    assert refused.value.code == 422
    assert "pod updates may not change fields other than" in refused.value.message


def test_pod_status_has_its_own_door(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    assert api.merge(f"{core}/pods/p", {"status": {"phase": "Running"}})["status"]["phase"] == "Pending"
    after = api.merge(f"{core}/pods/p/status", {"status": {"phase": "Running"}, "spec": {"nodeName": "x"}})
    assert after["status"]["phase"] == "Running"
    assert "nodeName" not in after["spec"]


def test_pod_is_bound_once(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    seen = api.get(path)
    assert seen["spec"]["nodeName"] == "node-1"
    assert [(c["type"], c["status"]) for c in seen["status"]["conditions"]] == [("PodScheduled", "True")]
    with pytest.raises(Refused) as refused:
        api.create(
            f"{path}/binding", {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "node-2"}}
        )
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert 'pod p is already assigned to node "node-1"' in refused.value.message


def test_unbound_pod_is_deleted_at_once(api: Api, core: str) -> None:
    api.create(f"{core}/pods", pod("p"))
    api.delete(f"{core}/pods/p")
    assert api.call("GET", f"{core}/pods/p")[0] == 404


def test_bound_pod_is_deleted_when_its_node_has_stopped_it(api: Api, core: str) -> None:
    path = bound_pod(api, core, terminationGracePeriodSeconds=7)
    answer = api.delete(path)
    assert answer["metadata"]["deletionTimestamp"]
    assert answer["metadata"]["deletionGracePeriodSeconds"] == 7
    assert answer["metadata"]["generation"] == 2
    api.delete(path, {"gracePeriodSeconds": 0})
    assert api.call("GET", path)[0] == 404


def test_grace_can_be_shortened_but_not_prolonged(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.delete(path, gracePeriodSeconds="20")
    assert api.delete(path, {"gracePeriodSeconds": 40})["metadata"]["deletionGracePeriodSeconds"] == 20
    assert api.delete(path, {"gracePeriodSeconds": 5})["metadata"]["deletionGracePeriodSeconds"] == 5


def test_finished_pod_needs_no_grace(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.merge(f"{path}/status", {"status": {"phase": "Succeeded"}})
    api.delete(path)
    assert api.call("GET", path)[0] == 404


def test_evicted_pod_says_why_it_goes(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    assert api.create(f"{path}/eviction", eviction())["status"] == "Success"
    seen = api.get(path)
    assert seen["metadata"]["deletionGracePeriodSeconds"] == 30
    condition = next(c for c in seen["status"]["conditions"] if c["type"] == "DisruptionTarget")
    assert (condition["status"], condition["reason"]) == ("True", "EvictionByEvictionAPI")
    assert condition["message"] == "Eviction API: evicting"


def test_eviction_of_nobody_is_not_found(api: Api, core: str) -> None:
    assert api.call("POST", f"{core}/pods/p/eviction", eviction())[0] == 404


def test_eviction_takes_a_grace_period(api: Api, core: str) -> None:
    path = bound_pod(api, core)
    api.create(f"{path}/eviction", eviction(gracePeriodSeconds=3))
    assert api.get(path)["metadata"]["deletionGracePeriodSeconds"] == 3


def test_disruption_budget_refuses_an_eviction(api: Api, core: str, namespace: str) -> None:
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "b"},
        "spec": spec,
    }
    api.create(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets", budget)
    path = bound_pod(api, core)
    api.merge(
        f"{path}/status",
        {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}},
    )
    with pytest.raises(Refused) as refused:
        api.create(f"{path}/eviction", eviction())
    assert (refused.value.code, refused.value.reason) == (429, "TooManyRequests")
    assert "deletionTimestamp" not in api.get(path)["metadata"]


def test_pods_of_a_node_can_be_selected(api: Api, core: str) -> None:
    bound_pod(api, core, "here")
    api.create(f"{core}/pods", pod("nowhere"))

    def names(selector: str) -> list[str]:
        return [item["metadata"]["name"] for item in api.get(f"{core}/pods", fieldSelector=selector)["items"]]

    assert names("spec.nodeName=node-1") == ["here"]
    assert names("spec.nodeName=") == ["nowhere"]
    assert names("spec.nodeName!=node-1,status.phase=Pending") == ["nowhere"]


def test_node_is_registered_with_its_status_and_not_yet_trusted(api: Api, namespace: str) -> None:
    status = {"conditions": [{"type": "Ready", "status": "True"}], "capacity": {"cpu": "4"}}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{namespace}"}, "status": status}
    made = api.create("/api/v1/nodes", body)
    assert made["status"]["conditions"][0]["status"] == "True"
    assert made["spec"]["taints"] == [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
    path = f"/api/v1/nodes/node-{namespace}"
    assert api.merge(path, {"spec": {"unschedulable": True, "taints": None}})["spec"] == {
        "unschedulable": True
    }
    unknown = [{"type": "Ready", "status": "Unknown"}]
    assert api.merge(path, {"status": {"conditions": unknown}})["status"]["conditions"][0]["status"] == "True"
    after = api.merge(f"{path}/status", {"status": {"conditions": unknown}})
    assert after["status"]["conditions"][0]["status"] == "Unknown"
    api.delete(path)
