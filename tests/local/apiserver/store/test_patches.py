"""The patch formats, each as its specification has it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused, config_map, widget


@pytest.fixture
def map_path(api: Api, core: str) -> str:
    api.create(f"{core}/configmaps", config_map("a", x="1", y="2"))
    return f"{core}/configmaps/a"


def test_merge_patch_sets_and_removes(api: Api, map_path: str) -> None:
    assert api.merge(map_path, {"data": {"x": None, "z": "3"}})["data"] == {"y": "2", "z": "3"}


def test_merge_patch_with_stale_version_conflicts(api: Api, map_path: str) -> None:
    version = api.get(map_path)["metadata"]["resourceVersion"]
    api.merge(map_path, {"data": {"x": "2"}})
    with pytest.raises(Refused) as refused:
        api.merge(map_path, {"metadata": {"resourceVersion": version}, "data": {"x": "3"}})
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")


def test_merge_patch_replaces_lists(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w", parts=[{"name": "p1"}, {"name": "p2"}]))
    assert api.merge(f"{widgets}/w", {"spec": {"parts": [{"name": "p3"}]}})["spec"]["parts"] == [
        {"name": "p3", "weight": 1}
    ]


def test_json_patch_is_applied_in_order(api: Api, map_path: str) -> None:
    operations = [
        {"op": "test", "path": "/data/x", "value": "1"},
        {"op": "replace", "path": "/data/x", "value": "5"},
        {"op": "copy", "from": "/data/x", "path": "/data/z"},
        {"op": "move", "from": "/data/y", "path": "/data/w"},
        {"op": "add", "path": "/metadata/annotations", "value": {"a/b": "c"}},
        {"op": "replace", "path": "/metadata/annotations/a~1b", "value": "d"},
    ]
    after = api.json_patch(map_path, operations)
    assert after["data"] == {"x": "5", "z": "5", "w": "2"}
    assert after["metadata"]["annotations"] == {"a/b": "d"}


def test_json_patch_inserts_into_lists(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w", parts=[{"name": "p1"}]))
    operations = [
        {"op": "add", "path": "/spec/parts/0", "value": {"name": "p2"}},
        {"op": "add", "path": "/spec/parts/-", "value": {"name": "p3"}},
        {"op": "remove", "path": "/spec/parts/1"},
    ]
    assert [part["name"] for part in api.json_patch(f"{widgets}/w", operations)["spec"]["parts"]] == [
        "p2",
        "p3",
    ]


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/data/x", "value": "other"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
        {"op": "remove", "path": "/data/nothing"},
        {"op": "replace", "path": "/spec/nothing", "value": 1},
    ],
)
def test_json_patch_that_cannot_be_applied_is_unprocessable(
    api: Api, map_path: str, operation: dict[str, Any]
) -> None:
    before = api.get(map_path)
    with pytest.raises(Refused) as refused:
        api.json_patch(map_path, [{"op": "replace", "path": "/data/y", "value": "9"}, operation])
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    assert api.get(map_path) == before


def test_strategic_patch_without_lists_is_a_merge(api: Api, map_path: str) -> None:
    before = api.get(map_path)["data"]
    after = api.strategic(map_path, {"data": {"x": None, "new": "1"}})
    assert after["data"] == {key: value for key, value in before.items() if key != "x"} | {"new": "1"}


def test_custom_resources_take_no_strategic_patch(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    with pytest.raises(Refused) as refused:
        api.strategic(f"{widgets}/w", {"spec": {"paused": True}})
    assert (refused.value.code, refused.value.reason) == (415, "UnsupportedMediaType")
