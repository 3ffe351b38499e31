"""Create, read, change and delete: the answers that controllers build on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused, config_map, pod, refused_with, widget


def test_new_object_gets_identity_and_version(api: Api, core: str) -> None:
    made = api.create(f"{core}/configmaps", config_map("a", x="1"))
    assert made["metadata"]["uid"]
    assert made["metadata"]["creationTimestamp"].endswith("Z")
    assert made["metadata"]["namespace"] == core.rpartition("/")[2]
    assert api.get(f"{core}/configmaps/a") == made


def test_generated_name_ends_with_five_letters(api: Api, core: str) -> None:
    body = config_map("") | {"metadata": {"generateName": "run-"}}
    names = {api.create(f"{core}/configmaps", body)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("run-") and len(name) == 9 for name in names)


def test_second_object_of_a_name_is_refused(api: Api, core: str) -> None:
    api.create(f"{core}/configmaps", config_map("a"))
    with pytest.raises(Refused) as refused:
        api.create(f"{core}/configmaps", config_map("a"))
    assert refused.value.status == {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "AlreadyExists",
        "message": 'configmaps "a" already exists', "details": {"name": "a", "kind": "configmaps"},
        "code": 409,
    }  # fmt: skip


def test_missing_object_is_not_found(api: Api, core: str) -> None:
    with pytest.raises(Refused) as refused:
        api.get(f"{core}/pods/nobody")
    assert refused.value.status["message"] == 'pods "nobody" not found'
    assert refused.value.status["details"] == {"name": "nobody", "kind": "pods"}
    assert (refused.value.code, refused.value.reason) == (404, "NotFound")


def test_object_in_missing_namespace_is_refused(api: Api) -> None:
    with refused_with('namespaces "nowhere" not found', code=404):
        api.create("/api/v1/namespaces/nowhere/configmaps", config_map("a"))


def test_unknown_resource_is_404(api: Api, core: str) -> None:
    assert api.call("GET", f"{core}/gadgets")[0] == 404
    assert api.call("GET", "/apis/no.such.group/v1/gadgets")[0] == 404


def test_bad_name_is_invalid(api: Api, core: str) -> None:
    said = 'ConfigMap "Not_A_Name" is invalid: metadata.name: Invalid value: "Not_A_Name":'
    with refused_with(said, field="metadata.name"):
        api.create(f"{core}/configmaps", config_map("Not_A_Name"))


def test_nameless_object_is_invalid(api: Api, core: str) -> None:
    with refused_with("name or generateName is required"):
        api.create(f"{core}/configmaps", {"metadata": {}})


def test_replacing_with_stale_version_conflicts(api: Api, core: str) -> None:
    first = api.create(f"{core}/configmaps", config_map("a", x="1"))
    second = api.replace(f"{core}/configmaps/a", {**first, "data": {"x": "2"}})
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    said = (
        'Operation cannot be fulfilled on configmaps "a": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    with refused_with(said, code=409, reason="Conflict"):
        api.replace(f"{core}/configmaps/a", {**first, "data": {"x": "3"}})


def test_replacing_without_version_is_unconditional_for_built_in_kinds(api: Api, core: str) -> None:
    api.create(f"{core}/configmaps", config_map("a", x="1"))
    assert api.replace(f"{core}/configmaps/a", config_map("a", x="2"))["data"] == {"x": "2"}


def test_replacing_under_another_name_is_refused(api: Api, core: str) -> None:
    api.create(f"{core}/configmaps", config_map("a"))
    with refused_with("the name of the object (b) does not match the name on the URL (a)", code=400):
        api.replace(f"{core}/configmaps/a", config_map("b"))


def test_change_of_nothing_costs_no_version(api: Api, core: str) -> None:
    made = api.create(f"{core}/configmaps", config_map("a", x="1"))
    assert api.merge(f"{core}/configmaps/a", {"data": {"x": "1"}}) == made


def test_empty_metadata_is_no_metadata(api: Api, core: str) -> None:
    body = config_map("a") | {"metadata": {"name": "a", "labels": {}, "annotations": {}, "finalizers": []}}
    made = api.create(f"{core}/configmaps", body)
    assert not {"labels", "annotations", "finalizers"} & set(made["metadata"])


def test_server_owned_fields_cannot_be_written(api: Api, core: str) -> None:
    made = api.create(f"{core}/configmaps", config_map("a"))
    after = api.merge(f"{core}/configmaps/a", {"metadata": {"creationTimestamp": "2001-01-01T00:00:00Z"}})
    assert after["metadata"]["creationTimestamp"] == made["metadata"]["creationTimestamp"]


def test_uid_cannot_be_patched(api: Api, core: str) -> None:
    api.create(f"{core}/configmaps", config_map("a"))
    with refused_with('ConfigMap "a" is invalid: metadata.uid: Invalid value: "other": field is immutable'):
        api.merge(f"{core}/configmaps/a", {"metadata": {"uid": "other"}})


def test_deleted_object_is_gone_and_the_answer_says_which_it_was(api: Api, core: str) -> None:
    made = api.create(f"{core}/configmaps", config_map("a"))
    answer = api.delete(f"{core}/configmaps/a")
    assert answer["status"] == "Success"
    assert answer["details"] == {"name": "a", "kind": "configmaps", "uid": made["metadata"]["uid"]}
    assert api.call("GET", f"{core}/configmaps/a")[0] == 404


@pytest.mark.parametrize("field", ["uid", "resourceVersion"])
def test_delete_of_another_incarnation_is_refused(api: Api, core: str, field: str) -> None:
    api.create(f"{core}/configmaps", config_map("a"))
    with refused_with("in the precondition (1) does not match", code=409, reason="Conflict"):
        api.delete(f"{core}/configmaps/a", {"preconditions": {field: "1"}})
    assert api.get(f"{core}/configmaps/a")


def test_finalizer_holds_deletion_until_it_is_removed(api: Api, core: str) -> None:
    body = config_map("a")
    body["metadata"]["finalizers"] = ["conformance.test/hold"]
    api.create(f"{core}/configmaps", body)
    api.delete(f"{core}/configmaps/a")
    waiting = api.get(f"{core}/configmaps/a")
    assert waiting["metadata"]["deletionTimestamp"]
    assert waiting["metadata"]["deletionGracePeriodSeconds"] == 0
    with refused_with("no new finalizers can be added if the object is being deleted"):
        both = ["conformance.test/hold", "conformance.test/new"]
        api.merge(f"{core}/configmaps/a", {"metadata": {"finalizers": both}})
    api.merge(f"{core}/configmaps/a", {"metadata": {"finalizers": None}})
    assert api.call("GET", f"{core}/configmaps/a")[0] == 404


def test_collection_can_be_deleted_by_label(api: Api, core: str) -> None:
    api.create(f"{core}/configmaps", config_map("a", {"app": "x"}))
    api.create(f"{core}/configmaps", config_map("b", {"app": "y"}))
    api.delete(f"{core}/configmaps", labelSelector="app=x")
    names = {item["metadata"]["name"] for item in api.get(f"{core}/configmaps")["items"]}
    assert "a" not in names
    assert "b" in names


def test_dry_run_changes_nothing(api: Api, core: str) -> None:
    assert api.create(f"{core}/configmaps", config_map("a"), dryRun="All")["metadata"]["uid"]
    assert api.call("GET", f"{core}/configmaps/a")[0] == 404
    api.create(f"{core}/configmaps", config_map("b", x="1"))
    assert api.merge(f"{core}/configmaps/b", {"data": {"x": "2"}}, dryRun="All")["data"] == {"x": "2"}
    assert api.get(f"{core}/configmaps/b")["data"] == {"x": "1"}


def test_body_of_unknown_format_is_refused(api: Api, core: str) -> None:
    assert api.call("POST", f"{core}/configmaps", b"x", content_type="text/plain")[0] == 415
    api.create(f"{core}/configmaps", config_map("a"))
    code, answer = api.call("PATCH", f"{core}/configmaps/a", {}, content_type="application/json")
    assert (code, answer["reason"]) == (415, "UnsupportedMediaType")


def test_broken_json_and_wrong_kind_are_bad_requests(api: Api, core: str) -> None:
    assert api.call("POST", f"{core}/configmaps", b"{")[0] == 400
    assert api.call("POST", f"{core}/configmaps", pod("a"))[0] == 400


def test_secret_text_is_encoded(api: Api, core: str) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "v"}}
    made = api.create(f"{core}/secrets", body)
    assert (made["data"], made["type"], "stringData" in made) == ({"k": "dg=="}, "Opaque", False)


def test_headless_service_keeps_its_shape(api: Api, core: str) -> None:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "ports": [{"port": 8470}]}
    made = api.create(f"{core}/services", {"metadata": {"name": "s"}, "spec": spec})
    assert made["spec"]["clusterIP"] == "None"
    assert made["spec"]["type"] == "ClusterIP"
    assert made["spec"]["ports"] == [{"port": 8470, "protocol": "TCP", "targetPort": 8470}]


def test_lease_can_be_taken_with_a_version_precondition(api: Api, namespace: str) -> None:
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    spec = {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"}
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}, "spec": spec}
    lease = api.create(leases, body)
    api.replace(f"{leases}/l", {**lease, "spec": {**spec, "holderIdentity": "two"}})
    with refused_with(code=409):
        api.replace(f"{leases}/l", {**lease, "spec": {**spec, "holderIdentity": "three"}})
    assert api.get(f"{leases}/l")["spec"]["holderIdentity"] == "two"


def test_events_are_found_by_the_object_that_they_are_about(api: Api, core: str, namespace: str) -> None:
    about = {"kind": "Pod", "namespace": namespace, "name": "p", "uid": "u"}
    said = {"reason": "Why", "message": "what", "type": "Normal"}
    body = {"metadata": {"name": "e"}, "involvedObject": about, **said}
    api.create(f"{core}/events", body)
    found = api.get(f"{core}/events", fieldSelector="involvedObject.name=p,involvedObject.kind=Pod")
    assert [event["metadata"]["name"] for event in found["items"]] == ["e"]
    assert api.get(f"{core}/events", fieldSelector="involvedObject.name=q")["items"] == []


def test_namespace_waits_for_its_finalizer(api: Api, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}"
    assert api.get(path)["spec"]["finalizers"] == ["kubernetes"]
    terminating = api.delete(path)
    assert terminating["status"]["phase"] == "Terminating"
    with refused_with(code=403, reason="Forbidden"):
        api.create(f"{path}/configmaps", config_map("late"))
    api.replace(f"{path}/finalize", {**api.get(path), "spec": {"finalizers": []}})
    assert api.call("GET", path)[0] == 404


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"labels": {"a": "not valid!"}}, 'metadata.labels: Invalid value: "not valid!": a valid label must '
                                          'be'),
        ({"labels": {"a": "x" * 64}}, "metadata.labels: Invalid value: "),
        ({"labels": {"a b": "x"}}, 'metadata.labels: Invalid value: "a b": name part must consist of'),
        ({"annotations": {"A_/b": "x"}}, 'metadata.annotations: Invalid value: "A_/b": prefix part a '
                                         'lowercase RFC 1123'),
        ({"ownerReferences": [{"kind": "X"}]}, 'metadata.ownerReferences.uid: Invalid value: "": must not be '
                                               'empty'),
    ],
)  # fmt: skip
def test_bad_metadata_is_invalid(api: Api, core: str, metadata: dict[str, Any], sentence: str) -> None:
    with refused_with(sentence):
        api.create(f"{core}/configmaps", {"metadata": {"name": "a", **metadata}})


def test_event_belongs_into_the_namespace_of_its_object(api: Api, core: str) -> None:
    about = {"namespace": "other", "name": "x"}
    with refused_with('involvedObject.namespace: Invalid value: "other": does not match event.namespace'):
        api.create(f"{core}/events", {"metadata": {"name": "e"}, "involvedObject": about})


def test_values_of_the_wrong_type_are_bad_requests(api: Api, core: str) -> None:
    assert api.call("POST", f"{core}/configmaps", {"metadata": {"name": "a"}, "data": {"x": 1}})[0] == 400
    assert api.call("POST", f"{core}/secrets", {"metadata": {"name": "a"}, "data": {"x": "!!"}})[0] == 400


def test_the_first_namespaces_cannot_be_deleted(api: Api) -> None:
    with refused_with('namespaces "default" is forbidden: this namespace may not be deleted', code=403):
        api.delete("/api/v1/namespaces/default")


# The patch formats, each as its specification has it.


@pytest.fixture
def map_path(api: Api, core: str) -> str:
    api.create(f"{core}/configmaps", config_map("a", x="1", y="2"))
    return f"{core}/configmaps/a"


def test_merge_patch_sets_and_removes(api: Api, map_path: str) -> None:
    assert api.merge(map_path, {"data": {"x": None, "z": "3"}})["data"] == {"y": "2", "z": "3"}


def test_merge_patch_with_stale_version_conflicts(api: Api, map_path: str) -> None:
    version = api.get(map_path)["metadata"]["resourceVersion"]
    api.merge(map_path, {"data": {"x": "2"}})
    with refused_with(code=409, reason="Conflict"):
        api.merge(map_path, {"metadata": {"resourceVersion": version}, "data": {"x": "3"}})


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
    with refused_with():
        api.json_patch(map_path, [{"op": "replace", "path": "/data/y", "value": "9"}, operation])
    assert api.get(map_path) == before


def test_strategic_patch_without_lists_is_a_merge(api: Api, map_path: str) -> None:
    before = api.get(map_path)["data"]
    after = api.strategic(map_path, {"data": {"x": None, "new": "1"}})
    assert after["data"] == {key: value for key, value in before.items() if key != "x"} | {"new": "1"}


def test_custom_resources_take_no_strategic_patch(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    with refused_with(code=415, reason="UnsupportedMediaType"):
        api.strategic(f"{widgets}/w", {"spec": {"paused": True}})
