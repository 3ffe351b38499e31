"""Lists, watches and discovery behave as those of the real server."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused, config_map


def names(listing: dict[str, Any]) -> list[str]:
    return [item["metadata"]["name"] for item in listing["items"]]


@pytest.fixture
def three(api: Api, core: str) -> str:
    """Three labelled objects. Returns the path of their collection."""
    path = f"{core}/configmaps"
    api.create(path, config_map("a", {"app": "x", "tier": "1"}))
    api.create(path, config_map("b", {"app": "y"}))
    api.create(path, config_map("c", {"tier": "3"}))
    return path


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("app=x", ["a"]),
        ("app==x", ["a"]),
        ("app!=x", ["b", "c"]),
        ("app", ["a", "b"]),
        ("!app", ["c"]),
        ("app in (x, y)", ["a", "b"]),
        ("app notin (x)", ["b", "c"]),
        ("app=x,tier=1", ["a"]),
        ("app=x,tier=2", []),
        ("tier>1", ["c"]),
        ("tier<2,app", ["a"]),
    ],
)
def test_label_selector(api: Api, three: str, selector: str, found: list[str]) -> None:
    assert names(api.get(three, labelSelector=selector)) == found


def test_malformed_selectors_are_bad_requests(api: Api, three: str) -> None:
    assert api.call("GET", three, labelSelector="app in")[0] == 400
    assert api.call("GET", three, fieldSelector="data.x=1")[0] == 400


def test_name_is_a_field_selector_everywhere(api: Api, three: str) -> None:
    assert names(api.get(three, fieldSelector="metadata.name=b")) == ["b"]


def test_list_is_sorted_and_says_its_version(api: Api, three: str) -> None:
    listing = api.get(three)
    assert listing["kind"] == "ConfigMapList"
    assert names(listing) == ["a", "b", "c"]
    newest = max(int(item["metadata"]["resourceVersion"]) for item in listing["items"])
    assert int(listing["metadata"]["resourceVersion"]) >= newest


def test_list_comes_in_pages(api: Api, three: str) -> None:
    first = api.get(three, limit=2)
    assert names(first) == ["a", "b"]
    assert first["metadata"]["remainingItemCount"] == 1
    second = api.get(three, limit=2, **{"continue": first["metadata"]["continue"]})
    assert names(second) == ["c"]
    assert not second["metadata"].get("continue")


def test_list_covers_all_namespaces(api: Api, three: str, namespace: str) -> None:
    everything = api.get("/api/v1/configmaps", labelSelector="app=x")["items"]
    assert namespace in {item["metadata"]["namespace"] for item in everything}


def test_watch_continues_where_the_list_ended(api: Api, three: str) -> None:
    version = api.get(three)["metadata"]["resourceVersion"]
    with api.watch(three, resourceVersion=version) as events:
        api.create(three, config_map("d", x="1"))
        api.merge(f"{three}/d", {"data": {"x": "2"}})
        api.delete(f"{three}/d")
        seen = list(islice(events, 3))
    assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert {event["object"]["metadata"]["name"] for event in seen} == {"d"}
    assert {event["object"]["kind"] for event in seen} == {"ConfigMap"}
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in seen]
    assert versions == sorted(set(versions))
    assert versions[0] > int(version)


def test_watch_replays_what_was_missed(api: Api, three: str) -> None:
    version = api.get(three)["metadata"]["resourceVersion"]
    api.create(three, config_map("d"))
    api.delete(f"{three}/d")
    with api.watch(three, resourceVersion=version) as events:
        assert [event["type"] for event in islice(events, 2)] == ["ADDED", "DELETED"]


def test_watch_without_version_begins_with_what_exists(api: Api, three: str) -> None:
    with api.watch(three) as events:
        seen = list(islice(events, 3))
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in seen] == [
        ("ADDED", "a"),
        ("ADDED", "b"),
        ("ADDED", "c"),
    ]


def test_object_that_leaves_the_selection_is_deleted_for_the_watcher(api: Api, three: str) -> None:
    version = api.get(three)["metadata"]["resourceVersion"]
    with api.watch(three, resourceVersion=version, labelSelector="app=x") as events:
        api.merge(f"{three}/b", {"metadata": {"labels": {"app": "x"}}})
        api.merge(f"{three}/b", {"data": {"k": "v"}})
        api.merge(f"{three}/b", {"metadata": {"labels": {"app": "z"}}})
        api.merge(f"{three}/b", {"data": {"k": "w"}})
        api.delete(f"{three}/a")
        seen = [(event["type"], event["object"]["metadata"]["name"]) for event in islice(events, 4)]
    assert seen == [("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "b"), ("DELETED", "a")]


def test_watch_of_one_object_by_name(api: Api, three: str) -> None:
    version = api.get(three)["metadata"]["resourceVersion"]
    with api.watch(three, resourceVersion=version, fieldSelector="metadata.name=b") as events:
        api.merge(f"{three}/a", {"data": {"k": "v"}})
        api.merge(f"{three}/b", {"data": {"k": "v"}})
        assert next(events)["object"]["metadata"]["name"] == "b"


def test_watch_ends_when_its_time_is_over(api: Api, three: str) -> None:
    version = api.get(three)["metadata"]["resourceVersion"]
    with api.watch(three, resourceVersion=version, timeoutSeconds=1) as events:
        assert list(events) == []


def test_initial_events_end_with_a_bookmark(api: Api, three: str) -> None:
    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    with api.watch(three, **query) as events:
        seen = list(islice(events, 4))
    assert [event["type"] for event in seen] == ["ADDED"] * 3 + ["BOOKMARK"]
    metadata = seen[-1]["object"]["metadata"]
    assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert int(metadata["resourceVersion"]) > 0


def test_watch_as_table(api: Api, three: str) -> None:
    with api.watch(three, accept="application/json;as=Table;v=v1;g=meta.k8s.io") as events:
        first, second = islice(events, 2)
    assert first["object"]["kind"] == "Table"
    assert first["object"]["columnDefinitions"][0]["name"] == "Name"
    assert second["object"]["rows"][0]["cells"][0] == "b"


def test_finalized_object_is_seen_going_in_two_steps(api: Api, three: str) -> None:
    api.merge(f"{three}/a", {"metadata": {"finalizers": ["conformance.test/hold"]}})
    version = api.get(three)["metadata"]["resourceVersion"]
    with api.watch(three, resourceVersion=version) as events:
        api.delete(f"{three}/a")
        api.merge(f"{three}/a", {"metadata": {"finalizers": None}})
        seen = list(islice(events, 2))
    assert [event["type"] for event in seen] == ["MODIFIED", "DELETED"]
    assert seen[0]["object"]["metadata"]["deletionTimestamp"]


def test_table_of_an_unwritable_selector_is_refused_before_the_stream_begins(api: Api, three: str) -> None:
    with pytest.raises(Refused) as refused, api.watch(three, fieldSelector="data.x=1") as events:
        next(events)
    assert refused.value.code == 400


WANTED = {
    "/api/v1": {"namespaces", "nodes", "nodes/status", "pods", "pods/status", "pods/binding", "pods/eviction",
    "services",
                "secrets", "configmaps", "events", "serviceaccounts"},
    "/apis/coordination.k8s.io/v1": {"leases"},
    "/apis/policy/v1": {"poddisruptionbudgets"},
    "/apis/apiextensions.k8s.io/v1": {"customresourcedefinitions"},
}  # fmt: skip


@pytest.mark.parametrize("path", WANTED)
def test_group_lists_its_resources(api: Api, path: str) -> None:
    listing = api.get(path)
    assert listing["kind"] == "APIResourceList"
    assert WANTED[path] <= {resource["name"] for resource in listing["resources"]}
    for resource in listing["resources"]:
        assert {"name", "namespaced", "kind", "verbs", "singularName"} <= set(resource)


def test_groups_and_versions_are_listed(api: Api) -> None:
    assert api.get("/api")["versions"] == ["v1"]
    groups = {
        group["name"]: group["preferredVersion"]["groupVersion"] for group in api.get("/apis")["groups"]
    }
    assert groups["policy"] == "policy/v1"
    assert api.get("/apis/policy")["kind"] == "APIGroup"


def test_server_says_version_and_readiness(api: Api) -> None:
    version = api.get("/version")
    assert (version["major"], int(version["minor"].rstrip("+")) >= 33) == ("1", True)
    assert api.call("GET", "/readyz") == (200, "ok")


def test_first_namespaces_exist(api: Api) -> None:
    names = {item["metadata"]["name"] for item in api.get("/api/v1/namespaces")["items"]}
    assert {"default", "kube-system"} <= names
