"""A container's variables and command line are what a kubelet would make of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tiercheck_local.node.environment import BadReference, PodFacts, command_line, environment, expand

POD = {
    "metadata": {
        "name": "w-0", "namespace": "team", "uid": "u-1",
        "labels": {"tiercheck.io/worker": "3"}, "annotations": {"note": "n"},
    },
    "spec": {},
}  # fmt: skip
FACTS = PodFacts(POD, "node-1", "127.9.1.2", "127.9.1.1", {"cpu": "64", "memory": "8Gi"})
STORED = {("Secret", "s"): {"token": b"t"}, ("ConfigMap", "c"): {"A": b"1", "B": b"2"}}


def lookup(kind: str, name: str) -> Mapping[str, bytes] | None:
    return STORED.get((kind, name))


def value_from(source: dict[str, Any], container: dict[str, Any] | None = None) -> str | None:
    spec = {**(container or {}), "env": [{"name": "X", "valueFrom": source}]}
    return environment(spec, FACTS, lookup).get("X")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "w-0"),
        ("metadata.namespace", "team"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['tiercheck.io/worker']", "3"),
        ("metadata.annotations['note']", "n"),
        ("metadata.labels['absent']", ""),
        ("spec.nodeName", "node-1"),
        ("status.podIP", "127.9.1.2"),
        ("status.hostIP", "127.9.1.1"),
    ],
)
def test_field_of_the_pod(path: str, expected: str) -> None:
    assert value_from({"fieldRef": {"fieldPath": path}}) == expected


def test_keys_of_secret_and_config_map() -> None:
    assert value_from({"secretKeyRef": {"name": "s", "key": "token"}}) == "t"
    assert value_from({"configMapKeyRef": {"name": "c", "key": "B"}}) == "2"


def test_missing_optional_reference_leaves_the_variable_out() -> None:
    assert value_from({"secretKeyRef": {"name": "absent", "key": "k", "optional": True}}) is None
    assert value_from({"secretKeyRef": {"name": "s", "key": "absent", "optional": True}}) is None


@pytest.mark.parametrize(
    "source",
    [
        {"secretKeyRef": {"name": "absent", "key": "k"}},
        {"configMapKeyRef": {"name": "c", "key": "absent"}},
        {"fieldRef": {"fieldPath": "spec.nonsense"}},
    ],
)
def test_missing_reference_is_an_error_that_names_it(source: dict[str, Any]) -> None:
    with pytest.raises(BadReference, match=r"absent|nonsense"):
        value_from(source)


def test_limits_are_numbers_and_fall_back_to_the_node() -> None:
    container = {"resources": {"limits": {"memory": "1Gi", "cpu": "1500m"}}}
    assert value_from({"resourceFieldRef": {"resource": "limits.memory"}}, container) == str(1024**3)
    assert (
        value_from({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}, container) == "1024"
    )
    assert value_from({"resourceFieldRef": {"resource": "limits.cpu"}}, container) == "2"
    assert value_from({"resourceFieldRef": {"resource": "limits.memory"}}) == str(8 * 1024**3)


def test_env_overrides_env_from_and_refers_to_it() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "P_"}],
        "env": [{"name": "P_A", "value": "x"}, {"name": "Y", "value": "$(P_A)-$(P_B)-$(NONE)-$$(P_A)"}],
    }
    assert environment(container, FACTS, lookup) == {"P_A": "x", "P_B": "2", "Y": "x-2-$(NONE)-$(P_A)"}


def test_command_needs_no_image_but_must_be_there() -> None:
    assert command_line({"command": ["sh"], "args": ["-c", "$(A)"]}, {"A": "1"}) == ["sh", "-c", "1"]
    with pytest.raises(BadReference, match="needs a command"):
        command_line({"args": ["x"]}, {})


def test_expansion_leaves_shell_syntax_alone() -> None:
    assert expand("${HOME} $HOME $(HOME)", {"HOME": "/h"}) == "${HOME} $HOME /h"
