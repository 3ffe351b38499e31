"""Whatever a stranger writes on his objects, nothing of mine is decided by it."""

from __future__ import annotations

import logging
from typing import Any

import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.api_model import ApiModel
from tests.operator.kubelet_words import made_by, pod, up
from tiercheck.protocol import names
from tiercheck_operator.app import Operator
from tiercheck_operator.attach.injection import Attachment
from tiercheck_operator.attach.owners import Owner, Unattachable
from tiercheck_operator.config import Config
from tiercheck_operator.kubernetes.api_server import ApiFailure, ApiResource
from tiercheck_operator.kubernetes.object_reader import Access
from tiercheck_operator.kubernetes.owned_objects import OwnedObjects
from tiercheck_operator.kubernetes.watches import ClusterView, ObjectParser
from tiercheck_operator.model.parsing import parse_job, parse_node, parse_pod
from tiercheck_operator.model.saved_placement import SavedPlacement

Object = dict[str, Any]
MINE = pod(up(0))
VICTIM = MINE["metadata"]["ownerReferences"][0]["uid"]

texts = st.one_of(
    st.text(max_size=12), st.sampled_from([VICTIM, "0", "1", "-1", "999999999", "٣", "x" * 300])
)
trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=12,
)
own_labels = st.sampled_from(
    [names.LABEL_JOB_UID, names.LABEL_WORKER, names.LABEL_SPARE, names.LABEL_INCARNATION, names.LABEL_JOB]
)
labels = st.dictionaries(own_labels, texts, max_size=5)
annotations = st.dictionaries(
    st.sampled_from([names.ANNOTATION_ATTACHED, "tiercheck.io/avoided-nodes", "tiercheck.io/given-up"]),
    st.one_of(texts, st.just("[" * 5000), st.just('{"container":' * 900)),
)
owners = st.one_of(
    st.just(made_by(VICTIM)),
    st.lists(
        st.fixed_dictionaries({"apiVersion": texts, "kind": texts, "uid": texts, "controller": st.booleans()})
    ),
)


def seen(*pods: Object) -> ClusterView:
    view, strange = ClusterView(), ObjectParser()
    for number, raw in enumerate(pods):
        uid = str(raw["metadata"].get("uid") or number)
        view.put_pod(uid, strange.parse_or_none("Pod", raw, parse_pod), number)
    return view


def test_number_that_a_stranger_wrote_on_a_pod_of_mine_makes_no_name_that_is_too_long() -> None:
    """A label has up to 63 digits, and a host name up to 63 characters, the job's name among them."""
    mine = pod(up(0))
    mine["metadata"]["labels"] = {**MINE["metadata"]["labels"], names.LABEL_INCARNATION: "9" * 63}
    (known,) = seen(mine).pods_of("ns", VICTIM)
    assert known.incarnation == 0


@given(labels, annotations, owners, texts)
def test_pod_of_another_namespace_is_none_of_mine(
    labels: dict[str, str], annotations: dict[str, str], owners: list[Object], image: str
) -> None:
    foreign = pod(up(0))
    foreign["metadata"] |= {"namespace": "attacker", "uid": "foreign", "ownerReferences": owners}
    foreign["metadata"] |= {"labels": {**MINE["metadata"]["labels"], **labels}, "annotations": annotations}
    foreign["spec"]["initContainers"] = [{"name": names.SIDECAR_CONTAINER, "image": image}]
    view = seen(MINE, foreign)
    assert list(view.pods_of("ns", VICTIM)) == list(seen(MINE).pods_of("ns", VICTIM)) != []


@pytest.mark.parametrize(
    "controllers",
    [
        [],
        [{**made_by(VICTIM)[0], "controller": False}],
        made_by("another-job"),
        [{**made_by(VICTIM)[0], "kind": "TierCheckPolicy"}],
        [{"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "another", "controller": True}],
    ],
    ids=["nobody's", "no controller", "another job's", "another kind's", "another workload's"],
)
def test_pod_is_a_worker_only_if_the_job_or_its_workload_controls_it(controllers: list[Object]) -> None:
    raw = pod(up(0))
    raw["metadata"] = {**raw["metadata"], "ownerReferences": controllers}
    assert parse_pod(raw) is None


def test_pod_of_a_neighbours_job_is_no_worker_of_mine_whichever_labels_its_template_has() -> None:
    """Whoever may make Jobs chooses their pods' labels, that of a JobSet among them; and these pods were not
    attached."""
    raw = pod(up(0))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "another", "controller": True}
    marks = {**raw["metadata"]["labels"], names.LABEL_JOBSET_UID: VICTIM}
    raw["metadata"] = {**raw["metadata"], "labels": marks, "ownerReferences": [owner]}
    assert list(seen(raw).pods_of("ns", VICTIM)) == []


def test_pod_that_the_job_made_is_not_taken_for_an_attached_one_by_what_its_template_says() -> None:
    raw = pod(up(0))
    raw["metadata"]["annotations"] = {names.ANNOTATION_ATTACHED: '{"container": "x"}'}
    view = parse_pod(raw)
    assert view is not None
    assert view.attached == ""


def strange(base: Object) -> st.SearchStrategy[Object]:
    """An object with parts of it replaced by anything."""
    parts = {key: st.one_of(st.just(value), trees) for key, value in base.items() if key != "metadata"}
    metadata = {
        key: st.just(value) if key in ("uid", "name", "namespace") else st.one_of(st.just(value), trees)
        for key, value in {**base["metadata"], "annotations": {}, "deletionTimestamp": None}.items()
    }
    return st.fixed_dictionaries({**parts, "metadata": st.fixed_dictionaries(metadata)})


NODE: Object = {
    "metadata": {"name": "n", "uid": "n", "labels": {}},
    "spec": {"taints": []},
    "status": {
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"kubeletVersion": "v1.36.1"},
    },
}


@given(strange(MINE), strange(NODE))
def test_object_that_makes_no_sense_is_left_out_and_stops_nobody(raw_pod: Object, raw_node: Object) -> None:
    strange = ObjectParser()
    view = ClusterView()
    view.put_pod("p", strange.parse_or_none("Pod", raw_pod, parse_pod), 1)
    view.put_node("n", strange.parse_or_none("Node", raw_node, parse_node), 1)
    assert view.pods.uids() == {"p"}, "it was seen, so that no watch is called deaf for it"
    assert set(view.all_nodes()) <= {"n"}
    assert len(list(view.pods_of("ns", VICTIM))) <= 1


def test_what_was_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    strange = ObjectParser()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert strange.parse_or_none("Node", {**NODE, "status": 7}, parse_node) is None
    assert len(caplog.records) == 1
    assert "Node n makes no sense" in caplog.text


def test_deep_annotation_is_no_attachment() -> None:
    for text in ("[" * 5000, '{"owner":' * 400, '{"owner": {"uid": "%s"}}' % ("x" * 10_000), "null", "7"):
        with pytest.raises(ValueError, match="not an attachment"):
            Attachment.from_json(text)


def new_job(uid: str = "u") -> Object:
    metadata = {"name": "j", "namespace": "default", "uid": uid, "resourceVersion": "1", "generation": 1}
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": names.KIND,
        "metadata": metadata,
        "spec": {"workers": 1},
    }


class Woken:
    def __init__(self) -> None:
        self.times = 0
        self.changes = 0

    def wake(self) -> None:
        self.times += 1

    def changed(self, raw: Object) -> None:
        self.changes += 1


def attached(uid: str, namespace: str, owner_uid: str) -> Object:
    job = new_job(uid)
    job["metadata"] |= {"namespace": namespace, "name": uid}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": owner_uid}
    job["spec"] = {"workers": 1, "attach": {"owner": owner, "container": "c"}}
    return job


@pytest.fixture
def operator() -> Operator:
    """One that does not lead, and so only listens."""
    made = Operator(Config(), Access(lambda: kopf.ConnectionInfo(server="http://127.0.0.1:1")))
    made._leading = False
    return made


@pytest.mark.parametrize("namespace", ["attacker", "ns"])
def test_job_that_claims_anothers_pods_hears_nothing_of_them(operator: Operator, namespace: str) -> None:
    victim, mine = new_job(VICTIM), parse_pod(MINE)
    victim["metadata"]["namespace"] = "ns"
    mine_loop, evil_loop = Woken(), Woken()
    operator._loops = {VICTIM: mine_loop, "evil": evil_loop}  # type: ignore[dict-item]
    for job in (attached("evil", namespace, VICTIM), victim, attached("evil", namespace, VICTIM)):
        operator._job_changed(job)
    assert mine is not None
    operator._wake(mine)
    assert (mine_loop.times, evil_loop.times) == (1, 0)


def test_workload_gets_a_job_of_its_own_whoever_else_claims_it_elsewhere(operator: Operator) -> None:
    operator._job_changed(attached("claims", "attacker", "workload"))
    assert ("ns", "workload") not in operator._known_as
    operator._job_changed(attached("real", "ns", "workload"))
    assert operator._known_as["ns", "workload"] == "real"


@pytest.mark.parametrize(
    "spec", [None, 7, [], {}, {"attach": 7}, {"attach": {"owner": []}}, {"workers": "x"}], ids=str
)
def test_job_whose_spec_makes_no_sense_ends_no_watch(operator: Operator, spec: Any) -> None:
    job = new_job()
    job["spec"] = spec
    told = Woken()
    operator._loops = {"u": told}  # type: ignore[dict-item]
    operator._job_changed(job)
    assert told.changes == 1
    assert operator._jobs.uids() == {"u"}


@given(trees)
def test_status_that_makes_no_sense_is_not_read_as_one(status: Any) -> None:
    job = new_job()
    job["status"] = status
    ObjectParser().parse_or_none(names.KIND, job, parse_job)


@pytest.mark.parametrize("name", ["../../victim/secrets", "a/b", "x?y=z", "x#y", "%2e%2e", "a b", "\n"])
def test_name_is_one_segment_of_a_path_whatever_it_says(name: str) -> None:
    path = ApiResource("g/v1", "things").path("mine", name)
    assert path.count("/") == 7
    assert "?" not in path
    assert "#" not in path


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_what_is_no_name_makes_no_path(name: str) -> None:
    with pytest.raises(ApiFailure, match="is no name"):
        ApiResource("v1", "things").path("mine", name)


@pytest.mark.parametrize(
    "owner",
    [
        Owner("batch/v1/../../../api/v1", "Job", "x", "u"),
        Owner("batch/v1", "Job", "..", "u"),
        Owner("v1", "Secret", "x", "u"),
        Owner("batch/..", "Job", "x", "u"),
    ],
)
def test_owner_is_looked_up_where_workloads_are_and_nowhere_else(owner: Owner) -> None:
    try:
        path = owner.resource("mine").path("mine", owner.name)
    except Unattachable:
        return
    assert path.startswith("/apis/batch/")
    assert path.split("/")[4:7] == ["namespaces", "mine", "jobs"]
    assert ".." not in path.split("/")


# Namesakes of a placement's ConfigMap


JOB = parse_job(
    {
        "metadata": {"name": "j", "namespace": "default", "uid": "u"},
        "spec": {"workers": 1, "template": {"spec": {}}},
    }
)


def having(owner: str) -> ApiModel:
    """A server with the ConfigMap of that owner."""
    metadata = {"name": "j-placement", "ownerReferences": [{"uid": owner}]}
    path = "/api/v1/namespaces/default/configmaps/j-placement"
    return ApiModel({path: {"metadata": metadata, "data": {"mine": "yes"}}})


async def test_placement_of_somebody_else_is_left_as_it_is() -> None:
    server = having("another")
    belongings = OwnedObjects(server)
    with pytest.raises(ApiFailure, match="j-placement is not this job's") as refused:
        await belongings.save_placement(JOB, SavedPlacement(1, ()))
    assert refused.value.refused, "said in the job's status"
    assert (server.did("PUT"), belongings.placement) == ([], None)


async def test_placement_of_the_job_itself_is_written_anew() -> None:
    server = having("u")
    await OwnedObjects(server).save_placement(JOB, SavedPlacement(1, ()))
    assert server.names("PUT") == ["j-placement"]
