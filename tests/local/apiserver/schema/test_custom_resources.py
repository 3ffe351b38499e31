"""CRDs: the schema fills in, cuts off and refuses, in sentences that a user can act on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.apiserver.api_client import Api, Refused, refused_with, widget


def refusal(api: Api, path: str, body: dict[str, Any], **query: Any) -> str:
    with pytest.raises(Refused) as refused:
        api.create(path, body, **query)
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    return refused.value.message


def test_crd_is_established_with_its_names(api: Api, widgets_defined: None) -> None:
    status = api.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.conformance.test")[
        "status"
    ]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "NamesAccepted": "True",
        "Established": "True",
    }
    assert status["acceptedNames"]["listKind"] == "WidgetList"
    assert status["storedVersions"] == ["v1"]


def test_crd_appears_in_discovery(api: Api, widgets_defined: None) -> None:
    listed = {r["name"]: r for r in api.get("/apis/conformance.test/v1")["resources"]}
    assert set(listed) == {"widgets", "widgets/status"}
    assert listed["widgets"]["shortNames"] == ["wg"]
    assert listed["widgets"]["namespaced"] is True
    assert "conformance.test" in {group["name"] for group in api.get("/apis")["groups"]}


def test_defaults_are_filled_in(api: Api, widgets: str) -> None:
    made = api.create(widgets, widget("w", parts=[{"name": "p1"}], color=None, note=None))
    assert made["spec"] == {
        "size": 3,
        "paused": False,
        "color": "Red",
        "note": None,
        "parts": [{"name": "p1", "weight": 1}],
        "limits": {"cpu": 4},
    }


def test_unknown_fields_are_cut_off_except_where_they_are_welcome(api: Api, widgets: str) -> None:
    made = api.create(widgets, widget("w", bogus=1, limits={"cpu": 1, "gpu": 2}, free={"any": {"thing": 1}}))
    assert "bogus" not in made["spec"]
    assert made["spec"]["limits"] == {"cpu": 1}
    assert made["spec"]["free"] == {"any": {"thing": 1}}


def test_unknown_field_is_refused_when_the_client_is_strict(api: Api, widgets: str) -> None:
    code, answer = api.call("POST", widgets, widget("w", bogus=1, limits={"x": 1}), fieldValidation="Strict")
    assert code == 400
    assert answer["message"] == (
        'Widget in version "v1" cannot be handled as a Widget: strict decoding error: '
        'unknown field "spec.bogus", unknown field "spec.limits.x"'
    )


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"size": "x"}, 'spec.size: Invalid value: "string": spec.size in body must be of type integer: '
                        '"string"'),
        ({"size": 0}, "spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1"),
        ({"size": 101}, "spec.size: Invalid value: 101: spec.size in body should be less than or equal to "
                        "100"),
        ({"size": None}, "spec.size: Required value"),
        ({"color": "Blue"}, 'spec.color: Unsupported value: "Blue": supported values: "Red", "Green"'),
        ({"code": "AB"}, "spec.code: Invalid value: \"AB\": spec.code in body should match '^[a-z]+$'"),
        ({"code": "a"}, 'spec.code: Invalid value: "a": spec.code in body should be at least 2 chars long'),
        ({"code": "abcdef"}, "spec.code: Too long: may not be more than 5 bytes"),
        ({"port": True}, 'spec.port: Invalid value: "boolean": spec.port in body must be of type '
                         'integer,string: "boolean"'),
        ({"started": "noon"}, 'spec.started: Invalid value: "noon": spec.started in body must be of type '
                              'date-time: "noon"'),
        ({"labels": {"a": 1}}, 'spec.labels.a: Invalid value: "integer": spec.labels.a in body must be of '
                               'type string: "integer"'),
        ({"parts": [{}]}, "spec.parts[0].name: Required value"),
        ({"parts": [{"name": n} for n in "abcd"]}, "spec.parts: Too many: 4: must have at most 3 items"),
        ({"parts": [{"name": "p1"}, {"name": "p1"}]}, 'spec.parts[1]: Duplicate value: {"name":"p1"}'),
        ({"copies": 1, "parity": 1}, "spec: Invalid value: copies or parity, not both"),
        ({"parts": [{"name": "x"}]}, "spec: Invalid value: parts must be p1, p2 or p3, not x"),
    ],
)  # fmt: skip
def test_wrong_field_is_refused_with_a_sentence(
    api: Api, widgets: str, spec: dict[str, Any], sentence: str
) -> None:
    message = refusal(api, widgets, widget("w", **spec))
    assert message.startswith('Widget.conformance.test "w" is invalid: ')
    assert sentence in message


def test_several_faults_are_told_at_once(api: Api, widgets: str) -> None:
    message = refusal(api, widgets, widget("w", size=0, code="A1"))
    assert message.startswith('Widget.conformance.test "w" is invalid: [')
    assert "spec.size" in message
    assert "spec.code" in message


def test_rules_wait_until_the_shape_is_right(api: Api, widgets: str) -> None:
    message = refusal(api, widgets, widget("w", size="x", copies=1, parity=1))
    assert "copies or parity" not in message
    assert "some validation rules were not checked because the object was invalid" in message


def test_rule_sees_the_name(api: Api, widgets: str) -> None:
    assert "the name must be at most 20 characters long" in refusal(api, widgets, widget("w" * 21))


def test_int_or_string_takes_both(api: Api, widgets: str) -> None:
    assert api.create(widgets, widget("a", port=80))["spec"]["port"] == 80
    assert api.create(widgets, widget("b", port="http"))["spec"]["port"] == "http"


def test_transition_rule_compares_with_the_old_object(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    with pytest.raises(Refused) as refused:
        api.merge(f"{widgets}/w", {"spec": {"size": 4}})
    assert refused.value.message == (
        'Widget.conformance.test "w" is invalid: spec.size: Invalid value: size cannot change while the '
        "widget is not paused"
    )
    assert refused.value.status["details"]["causes"][0]["field"] == "spec.size"
    api.merge(f"{widgets}/w", {"spec": {"paused": True}})
    assert api.merge(f"{widgets}/w", {"spec": {"size": 4}})["spec"]["size"] == 4


def test_generation_counts_changes_of_the_spec_only(api: Api, widgets: str) -> None:
    assert api.create(widgets, widget("w"))["metadata"]["generation"] == 1
    assert api.merge(f"{widgets}/w", {"metadata": {"labels": {"a": "b"}}})["metadata"]["generation"] == 1
    assert (
        api.merge(f"{widgets}/w/status", {"status": {"observedGeneration": 1}})["metadata"]["generation"] == 1
    )
    assert api.merge(f"{widgets}/w", {"spec": {"paused": True}})["metadata"]["generation"] == 2


def test_status_is_written_through_its_own_door_only(api: Api, widgets: str) -> None:
    made = api.create(widgets, widget("w") | {"status": {"observedGeneration": 7}})
    assert "status" not in made
    assert "status" not in api.merge(f"{widgets}/w", {"status": {"observedGeneration": 7}})
    change = {
        "status": {"observedGeneration": 1},
        "spec": {"paused": True},
        "metadata": {"labels": {"a": "b"}},
    }
    after = api.merge(f"{widgets}/w/status", change)
    assert after["status"] == {"observedGeneration": 1}
    assert after["spec"]["paused"] is False
    assert "labels" not in after["metadata"]
    assert api.get(f"{widgets}/w/status")["status"] == {"observedGeneration": 1}


def test_status_write_with_a_stale_version_conflicts(api: Api, widgets: str) -> None:
    first = api.create(widgets, widget("w"))
    api.merge(f"{widgets}/w", {"spec": {"paused": True}})
    with refused_with(code=409, reason="Conflict"):
        api.replace(f"{widgets}/w/status", {**first, "status": {"observedGeneration": 1}})
    stale = {
        "metadata": {"resourceVersion": first["metadata"]["resourceVersion"]},
        "status": {"observedGeneration": 1},
    }
    with refused_with(code=409):
        api.merge(f"{widgets}/w/status", stale)


def test_status_is_validated_too(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    twice = [{"type": "Ready", "status": "True"}, {"type": "Ready", "status": "False"}]
    with pytest.raises(Refused) as refused:
        api.merge(f"{widgets}/w/status", {"status": {"conditions": twice}})
    assert 'status.conditions[1]: Duplicate value: {"type":"Ready"}' in refused.value.message


def test_replacing_a_custom_object_needs_a_version(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    with refused_with("metadata.resourceVersion: Invalid value: 0: must be specified for an update"):
        api.replace(f"{widgets}/w", widget("w"))


def test_custom_object_must_say_its_kind(api: Api, widgets: str) -> None:
    code, answer = api.call("POST", widgets, {"metadata": {"name": "w"}})
    assert code == 400
    assert "Object 'Kind' is missing" in answer["message"]


def test_table_has_the_columns_of_the_crd(api: Api, widgets: str) -> None:
    api.create(widgets, widget("w"))
    api.merge(f"{widgets}/w/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    table = api.get(widgets, accept="application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
    assert table["kind"] == "Table"
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "Size", "Ready", "Age"]
    assert table["rows"][0]["cells"][:3] == ["w", 3, "True"]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"


@pytest.mark.parametrize("rule", ["self.size(", "self ==== 1"])
def test_crd_with_a_broken_rule_is_refused(api: Api, rule: str) -> None:
    schema = {"type": "object", "x-kubernetes-validations": [{"rule": rule}]}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "brokens", "kind": "Broken"}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "brokens.conformance.test"},
        "spec": {"group": "conformance.test", "scope": "Namespaced", "names": names, "versions": [version]},
    }
    message = refusal(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
    assert "x-kubernetes-validations[0].rule: Invalid value" in message
    assert "compilation failed" in message


def test_crd_must_be_named_after_its_resource(api: Api) -> None:
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object"}},
    }
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "other.conformance.test"},
        "spec": {
            "group": "conformance.test",
            "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [version],
        },
    }
    message = refusal(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
    assert 'must be spec.names.plural+"."+spec.group' in message
