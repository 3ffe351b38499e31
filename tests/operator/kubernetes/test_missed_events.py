"""Watches lose events: what is gone is found, and a watch that stays stale is noticed.

What is gone is found, what is late is waited for, and a watch that stays deaf is noticed.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.access import load
from tests.cluster.jobs import Replica
from tests.operator.kubernetes.proxy import withholding
from tests.operator.sidecar_over_https import TURNS, Woken, ends, turns, until_turn
from tests.operator.test_operator_process import DEADLINE, JOBS, ROOT, job, owned
from tests.operator.world_in_memory import trained
from tiercheck_local.cluster import LocalCluster
from tiercheck_operator.kubernetes.api_server import NODES, PODS, ApiFailure, ApiResource
from tiercheck_operator.kubernetes.client import Kube, ListedState
from tiercheck_operator.kubernetes.watches import (
    ClusterView,
    Resync,
    Watched,
    WatchedKind,
    WatchHealth,
    date_pod,
    stuck,
)
from tiercheck_operator.model.observed import ContainerState, NodeView, PodView

OBJECTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9))


@given(OBJECTS, OBJECTS)
def test_after_a_comparison_nothing_that_is_gone_is_left_and_all_that_is_new_is_known_to_be_missed(
    seen: dict[str, int], there: dict[str, int]
) -> None:
    watched: Watched[str] = Watched()
    for uid, version in seen.items():
        watched.put(uid, version, uid)
    gone, unseen = watched.compare(watched.uids(), ListedState(9, there))
    for uid in gone:
        watched.drop(uid)
    assert watched.uids() == seen.keys() & there.keys()
    assert unseen == {uid: v for uid, v in there.items() if seen.get(uid, 0) < v}


def test_object_that_appeared_while_the_list_was_on_its_way_is_not_taken_for_gone() -> None:
    watched: Watched[str] = Watched()
    before = watched.uids()
    watched.put("new", 5, "new")
    assert watched.compare(before, ListedState(9, {}))[0] == ()


def test_listing_older_than_what_was_seen_of_an_object_does_not_show_that_it_is_gone() -> None:
    """As a proxy's cache has it, or an etcd that was restored from a backup."""
    watched: Watched[str] = Watched()
    watched.put("old", 5, "old")
    watched.put("new", 8, "new")
    assert watched.compare(watched.uids(), ListedState(7, {}))[0] == ("old",)
    assert watched.compare(watched.uids(), ListedState(0, {}))[0] == (), "its version is unknown"


def test_listings_older_than_what_is_known_are_trouble_after_the_grace() -> None:
    hearing = WatchHealth("Pod", grace=60)
    hearing.compared({}, now=0.0, listed=100, newest=90)
    assert not hearing.behind
    hearing.compared({}, now=60.0, listed=50, newest=100)
    hearing.compared({}, now=110.0, listed=70, newest=120)
    assert hearing.behind
    assert hearing.trouble(120.0) == ""
    assert "older than resourceVersion 100, which is known, for 61 s: etcd was" in hearing.trouble(121.0)
    hearing.compared({}, now=122.0, listed=110, newest=130)
    assert hearing.behind
    assert hearing.trouble(150.0) == "", "a cache that is always a moment late is none"
    hearing.compared({}, now=151.0, listed=140, newest=140)
    assert not hearing.behind


def test_older_news_than_what_is_known_changes_nothing() -> None:
    watched: Watched[str] = Watched()
    watched.put("a", 5, "new")
    watched.put("a", 4, "old")
    assert watched.get("a") == "new"


def test_watch_is_deaf_only_if_the_same_news_is_missed_for_longer_than_the_grace() -> None:
    hearing, watched = WatchHealth("Pod", grace=30), Watched[str]()
    hearing.compared(watched.compare(watched.uids(), ListedState(9, {"a": 5}))[1], now=100.0)
    assert not hearing.complete
    assert hearing.trouble(120.0) == ""
    hearing.compared(watched.compare(watched.uids(), ListedState(9, {"a": 9}))[1], now=125.0)
    assert "the watch of Pod is deaf" in hearing.trouble(131.0), "newer news of it do not start the time anew"
    watched.put("a", 5, "a")
    hearing.note_event("a", 5)
    assert hearing.trouble(131.0) == ""
    assert hearing.complete


def test_watch_that_was_late_is_well_again_after_the_next_comparison() -> None:
    hearing, watched = WatchHealth("Pod", grace=30), Watched[str]()
    hearing.compared(watched.compare(watched.uids(), ListedState(9, {"a": 5}))[1], now=0.0)
    hearing.compared(watched.compare(watched.uids(), ListedState(9, {}))[1], now=40.0)
    assert hearing.trouble(40.0) == ""


def test_operator_that_can_list_nothing_for_minutes_is_not_well() -> None:
    hearing = WatchHealth("Pod", grace=60)
    assert hearing.trouble(1000.0) == "", "it has just begun"
    hearing.compared({}, now=1100.0)
    assert hearing.trouble(1400.0) == ""
    assert hearing.trouble(1401.0) == "Pod: the API server has answered no listing for 301 s"
    hearing.compared({}, now=1500.0)
    assert hearing.trouble(1501.0) == ""


def test_reconcile_that_does_not_end_is_named() -> None:
    assert stuck({"ns/a": 0.0, "ns/b": 90.0}, now=100.0, limit=300.0) == ""
    assert stuck({"ns/a": 0.0, "ns/b": 90.0}, now=301.0, limit=300.0) == (
        "1 jobs are stuck in a reconcile; ns/a for 301 s"
    )


class Listing:
    """Compares one kind with what its API server lists, from when `look` is awaited to when `end` is."""

    def __init__(self, kind: str, lists: Mapping[str, int] | ApiFailure) -> None:
        self.watched, self._lists, self._began = Watched[Any](), lists, asyncio.Event()
        self.gone: list[str] = []
        known = WatchedKind(
            ApiResource("v1", f"{kind.lower()}s"), "", self.watched, lambda raw: None, self._gone
        )
        self.resync = Resync(cast(Kube, self), {kind: known}, namespaces=(), every=3600.0, grace=30.0)
        self.due = self.resync._due = Woken()
        self._task: asyncio.Task[None] | None = None

    async def list_versions(self, path: str, query: str) -> ListedState:
        if isinstance(self._lists, ApiFailure):
            raise self._lists
        return ListedState(9, self._lists)

    async def look(self) -> None:
        """Returns when it has looked once, and waits."""
        self._began.set()
        self._task = asyncio.create_task(self.resync.run(self._began))
        await until_turn(lambda: self.due.waits)

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await ends(self._task)

    async def _gone(self, uid: str) -> None:
        self.gone.append(uid)


@pytest.mark.parametrize("between", TURNS)
async def test_comparing_ends_when_it_is_told_to_even_if_a_watch_listed_at_the_same_moment(
    between: int,
) -> None:
    listing = Listing("Pod", {})
    await listing.look()
    listing.resync.note_event("Pod", "uid", 1, listed=True)
    await turns(between)
    await listing.end()


async def test_all_is_seen_once_the_watch_has_told_of_everything_that_the_first_look_found() -> None:
    listing = Listing("Pod", {"a": 5, "b": 7})
    seen_all = listing.resync.seen_all
    listing.watched.put("a", 5, "a")
    listing.resync.note_event("Pod", "a", 5, listed=True)
    assert not seen_all.is_set(), "nobody has looked yet"
    await listing.look()
    assert not seen_all.is_set()
    listing.resync.note_event("Pod", "b", 6, listed=True)
    assert not seen_all.is_set(), "that was an older one"
    listing.resync.note_event("Pod", "b", 7, listed=False)
    assert seen_all.is_set()
    await listing.end()


async def test_why_no_job_is_served_is_told(caplog: pytest.LogCaptureFixture) -> None:
    listing = Listing("Node", ApiFailure(403, "nodes is forbidden"))
    await listing.look()
    await listing.end()
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert told.getMessage() == "no job is served yet: Node cannot be listed: 403: nodes is forbidden"


@pytest.mark.parametrize("failure", [ApiFailure(404, "404 page not found"), ApiFailure(0, "no answer")])
async def test_pods_that_cannot_be_listed_are_not_gone(failure: ApiFailure) -> None:
    """The kind of pods is always there, whatever a proxy's default page says."""
    listing = Listing("Pod", failure)
    listing.watched.put("a", 5, "a")
    await listing.look()
    await listing.end()
    assert (listing.resync.complete, listing.gone) == (False, [])


@pytest.fixture
def pod() -> PodView:
    world = trained(0)
    return next(iter(world.pods.values()))


def test_pods_are_found_by_job_until_they_are_gone(pod: PodView) -> None:
    view = ClusterView()
    view.put_pod(pod.uid, pod, 1)
    view.put_pod("other", replace(pod, uid="other", job_uid="another"), 2)
    assert list(view.pods_of(pod.namespace, pod.job_uid)) == [pod]
    moved = replace(pod, job_uid="another")
    view.put_pod(pod.uid, moved, 3)
    assert list(view.pods_of(pod.namespace, pod.job_uid)) == []
    assert len(list(view.pods_of(pod.namespace, "another"))) == 2
    assert view.drop_pod(pod.uid) == moved
    assert view.drop_pod(pod.uid) is None
    assert [entry.uid for entry in view.pods_of(pod.namespace, "another")] == ["other"]


def test_pod_whose_labels_make_no_sense_is_seen_but_belongs_to_no_job(pod: PodView) -> None:
    view = ClusterView()
    view.put_pod(pod.uid, pod, 1)
    view.put_pod(pod.uid, None, 2)
    assert list(view.pods_of(pod.namespace, pod.job_uid)) == []
    assert view.pods.compare(view.pods.uids(), ListedState(2, {pod.uid: 2}))[1] == {}


def test_what_a_kubelet_says_is_dated_when_it_is_first_heard_by_our_clock(pod: PodView) -> None:
    """Whatever else changes about the pod, and however often it is listed anew."""
    first = date_pod(pod, None, 100.0)
    assert (first.sidecar.since, first.trainer.since) == (100.0, 100.0)
    again = date_pod(replace(pod, phase="Running", resource_version="9"), first, 200.0)
    assert (again.sidecar.since, again.trainer.since) == (100.0, 100.0)
    ended = replace(pod, sidecar=replace(pod.sidecar, state=ContainerState.ENDED))
    assert date_pod(ended, again, 300.0).sidecar.since == 300.0
    assert date_pod(ended, again, 300.0).trainer.since == 100.0
    assert (first.housed_since, again.housed_since, again.remade_since) == (100.0, 100.0, None)
    assert (first.began, again.began) == (100.0, 100.0), "whatever the API server's clock says"
    going = date_pod(replace(pod, deleted_at=9e9), again, 300.0)
    assert date_pod(replace(pod, deleted_at=9e9), going, 400.0).deleted_at == 300.0
    remade = date_pod(replace(pod, remade_since=1.0), again, 400.0)
    assert date_pod(replace(pod, remade_since=1.0), remade, 500.0).remade_since == 400.0
    homeless = date_pod(replace(pod, node=None), None, 100.0)
    assert (homeless.housed_since, date_pod(pod, homeless, 600.0).housed_since) == (None, 600.0)
    unfit = date_pod(replace(pod, node=None, unschedulable_since=1.0), homeless, 600.0)
    later = date_pod(replace(pod, node=None, unschedulable_since=1.0), unfit, 700.0)
    assert (unfit.unschedulable_since, later.unschedulable_since) == (600.0, 600.0)
    assert date_pod(pod, later, 800.0).unschedulable_since is None


def test_heartbeats_of_nodes_change_nothing_and_wake_nobody() -> None:
    view, node = ClusterView(), NodeView("n", {"a": "b"})
    assert view.put_node("u", node, 1)
    known = view.all_nodes()
    assert not view.put_node("u", NodeView("n", {"a": "b"}), 2)
    assert view.all_nodes() is known
    assert view.put_node("u", replace(node, lost="gone"), 3)
    assert view.all_nodes()["n"].lost == "gone"
    view.drop_node("u")
    assert not view.all_nodes()


ODD: dict[str, Any] = {"metadata": {"annotations": {"tiercheck.io/last-handled-configuration": "{"}}}
"""An annotation that kopf would read, and stumble over."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A node, a job with its two pods, and no operator any more."""
    with LocalCluster(tmp_path, []) as started:
        started.apply_crds(ROOT / "crds")
        started.api.create(NODES, None, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "there"}})
        operator = started.start_operator()
        started.apply(job("early"))
        started.wait_for(lambda: len(pods(started)) == 2, DEADLINE, "two pods")
        operator.kill()
        operator.wait()
        yield started


def pods(cluster: LocalCluster) -> dict[str, Any]:
    return {pod["metadata"]["uid"]: pod for pod in cluster.pods()}


@pytest.mark.cluster
@pytest.mark.parametrize(("withheld", "heard"), [("nodes", "Pod"), ("pods", "TierCheckJob")])
def test_what_is_listed_is_heard_at_once_and_no_job_is_served_before_all_is(
    cluster: LocalCluster, tmp_path: Path, withheld: str, heard: str
) -> None:
    """With kopf's indexes each would stay in memory, whole, until the last of every kind was listed, and be
    woken by each that comes: minutes and hundreds of MiB for thousands of them."""
    before = pods(cluster).keys()
    kubeconfig = tmp_path / "withheld"
    with withholding(cluster.kubeconfig, kubeconfig, withheld) as released:
        process = cluster.start_operator({"KUBECONFIG": str(kubeconfig)})
        operator = Replica("operator", process, cluster.metrics_address)

        def tells(series: str) -> bool:
            return series in operator.page("/metrics")

        event = f'tiercheck_watch_last_event_timestamp_seconds{{kind="{heard}"}}'
        cluster.wait_for(lambda: tells(event), DEADLINE, f"the operator to hear of a {heard}")
        assert not tells('tiercheck_job="early"')
        assert not operator.page("/readyz")
        released.set()
        cluster.wait_for(lambda: tells('tiercheck_job="early"'), DEADLINE, "the job to be served")
    assert pods(cluster).keys() == before


@pytest.mark.cluster
def test_no_object_that_somebody_made_strange_keeps_the_other_jobs_from_being_served(
    cluster: LocalCluster,
) -> None:
    strange = job("strange")
    strange["metadata"] |= ODD["metadata"]
    cluster.apply(strange)
    bottomless = job("deep")
    bottomless["spec"]["template"]["spec"]["deep"] = "DEEP"
    post(cluster, json.dumps(bottomless).replace('"DEEP"', '{"a":' * 600 + "1" + "}" * 600))
    cluster.api.patch(NODES, None, "there", ODD)
    for pod in cluster.pods():
        cluster.api.patch(PODS, "default", pod["metadata"]["name"], ODD)
    before = pods(cluster).keys()
    operator = Replica("operator", cluster.start_operator(), cluster.metrics_address)
    cluster.wait_for(lambda: operator.page("/readyz"), DEADLINE, "readiness")
    cluster.wait_for(
        lambda: 'tiercheck_job="early"' in operator.page("/metrics"), DEADLINE, "the job to be served"
    )
    cluster.wait_for(lambda: len(owned(cluster, "strange")) == 4, DEADLINE, "the strange one to be served")
    assert before < pods(cluster).keys(), "the pods of the first are known"
    cluster.wait_for(lambda: told(cluster, "deep"), DEADLINE, "the owner of the deep one to be told")
    assert "it is more than 100 levels deep" in told(cluster, "deep")[0]


def post(cluster: LocalCluster, body: str) -> None:
    """Without the client library, which cannot take what is deep."""
    access = load(cluster.kubeconfig)
    headers = {**access.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(access.server + JOBS, body.encode(), headers)
    urllib.request.urlopen(request, timeout=DEADLINE, context=access.tls).close()


def told(cluster: LocalCluster, name: str) -> list[str]:
    """What events say of a job."""
    events = cluster.api.request("GET", "/api/v1/namespaces/default/events")["items"]
    return [event["message"] for event in events if event["involvedObject"]["name"] == name]
