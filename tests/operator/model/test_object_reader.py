"""Promise: no object of the API, however large, wide or deep, takes more memory than its kind may."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.test_operator_process import job
from tiercheck.protocol import names
from tiercheck_operator.kubernetes.object_reader import (
    most_of,
    read_answer,
    read_event,
    read_object,
    weigh,
    without_depth,
)
from tiercheck_operator.model.parsing import UNREADABLE, parse_job, parse_pod

MIB = 2**20
MOST = most_of("/apis/tiercheck.io/v1alpha1/tiercheckjobs")
BRACKETS = {
    "objects": "[" + ",".join(["{}"] * 466_000) + "]",
    "objects with a key": "[" + ",".join(['{"a":1}'] * 170_000) + "]",
    "short texts": "[" + ",".join(['"ab"'] * 280_000) + "]",
    "a wide text": '"\N{GRINNING FACE}' + "x" * 1_300_000 + '"',
    "an escaped wide text": '"\\ud83d\\ude00' + "x" * 1_300_000 + '"',
    "levels": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "levels of lists": "[" * 10_000 + "]" * 10_000,
    "numbers": "[" + ",".join(["1.5"] * 340_000) + "]",
}


def text_of(junk: str, **metadata: Any) -> bytes:
    raw = job("j", suspend=True)
    raw["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 3, **metadata}
    raw["status"] = {"phase": "Suspended"}
    return json.dumps(raw).replace('"containers"', f'"junk": {junk}, "containers"', 1).encode()


@pytest.mark.parametrize("kind", BRACKETS)
def test_what_is_too_much_is_kept_as_whose_it_is_and_why(kind: str) -> None:
    text = text_of(BRACKETS[kind], labels={names.LABEL_JOB_UID: "u"})
    with allocated() as peak:
        found = read_object(text, MOST)
        assert peak() < 16 * MIB, "of the text itself are some copies"
    assert "spec" not in found
    assert found["metadata"]["uid"] == "u"
    assert found["metadata"]["labels"] == {names.LABEL_JOB_UID: "u"}
    assert found["status"] == {"phase": "Suspended"}
    with pytest.raises(ValueError, match=r"levels deep|MiB are the most"):
        parse_job(found)
    with pytest.raises(ValueError, match=r"levels deep|MiB are the most"):
        parse_pod(found)


@pytest.mark.parametrize("kind", BRACKETS)
def test_one_object_that_is_too_much_spoils_no_list_and_no_event(kind: str) -> None:
    bad, good = text_of(BRACKETS[kind]), text_of("[]", uid="good")
    page = read_answer(b'{"kind":"L","metadata":{"continue":"c"},"items":[%s,%s]}' % (bad, good), MOST)
    assert [UNREADABLE in each for each in page["items"]] == [True, False]
    assert page["metadata"] == {"continue": "c"}
    event = json.loads(read_event(b'{"type":"ADDED","object":%s}' % bad, MOST))
    assert (event["type"], event["object"]["metadata"]["uid"]) == ("ADDED", "u")


def test_large_definition_of_another_kind_is_read_by_the_framework_as_it_is() -> None:
    """It asks for the group of each, and there are some with tens of thousands of values."""
    raw = {"metadata": {"name": "rays"}, "spec": {"group": "ray.io", "versions": [{"a": {}}] * 40_000}}
    most = most_of("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    assert read_object(json.dumps(raw).encode(), most) == raw
    raw["spec"]["schema"] = json.loads("[" * 300 + "]" * 300)
    assert read_object(json.dumps(raw).encode(), most)["spec"]["group"] == "ray.io"


def test_who_wrote_which_field_and_long_annotations_cost_nothing() -> None:
    fields = [{"manager": "m", "fieldsV1": {f"f:{n}": {} for n in range(70_000)}}]
    annotations = {"last": "x" * 250_000, "kueue.x-k8s.io/queue": "q"}
    found = read_object(text_of("[]", managedFields=fields, annotations=annotations), MOST)
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["annotations"] == {"kueue.x-k8s.io/queue": "q"}
    assert parse_job(found).spec.workers == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_texts_weigh_at_least_what_they_take_and_are_read_as_they_are(value: Any) -> None:
    raw = {"metadata": {"uid": "u"}, "spec": {"value": value}}
    text = json.dumps(raw).encode()
    assert without_depth(text) == text
    assert read_object(text, MOST) == raw


@pytest.mark.parametrize("kind", BRACKETS)
def test_nothing_takes_more_than_it_weighs(kind: str) -> None:
    part = BRACKETS[kind].encode() if "levels" not in kind else b"[" * 90 + b"]" * 90
    text = b"[%s]" % part
    with allocated() as peak:
        kept = json.loads(text)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        assert peak() >= taken
    assert kept
    assert taken < weigh(text) + MIB // 10


@pytest.mark.parametrize(
    "line",
    [
        b"<html>",
        b"",
        b"[1]",
        b'{"type":"ADDED"}',
        b'{"type":"ERROR","object":{"code":500}}',
        b'{"a":' * 20_000,
    ],
)
def test_nonsense_in_a_watch_makes_it_begin_anew(line: bytes) -> None:
    assert json.loads(read_event(line, MOST)) == {"type": "ERROR", "object": {"code": 410}}


@pytest.mark.parametrize(
    "text", [b"<html>", b"", b"[1]", b'{"items": 5}', b'{"items": [5]}', b'{"a":' * 20_000]
)
def test_nonsense_in_a_list_is_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="no list"):
        read_answer(text, MOST)


class allocated:  # noqa: N801
    """Gives the most that Python allocated since it was entered."""

    def __enter__(self) -> Any:
        tracemalloc.start()
        begin = tracemalloc.get_traced_memory()[0]
        return lambda: tracemalloc.get_traced_memory()[1] - begin

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()
