"""The loop of one job costs the API server little, and ends with its job."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest

from tests.operator.api_model import ApiModel
from tests.operator.sidecar_over_https import TURNS, Woken, ends, turns, until_turn
from tests.operator.world_in_memory import TEMPLATE, trained
from tiercheck_operator.app import Operator
from tiercheck_operator.config import Config
from tiercheck_operator.controller.reconciler import JobLoop, ReconcilerContext, find_unwelcome
from tiercheck_operator.kubernetes.api_server import JOBS, ApiFailure
from tiercheck_operator.kubernetes.client import Kube
from tiercheck_operator.kubernetes.object_reader import Access
from tiercheck_operator.kubernetes.watches import copy_of_job
from tiercheck_operator.metrics import Metrics
from tiercheck_operator.model.actions import CreatePod, Decision, EnsureService, SavePlacement
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.parsing import parse_job, parse_pod
from tiercheck_operator.model.saved_placement import SavedMember, SavedPlacement
from tiercheck_operator.model.status import Recovery

PATH = JOBS.path("default", "j")


class StandIn(ApiModel):
    """A server that has at most this job, and whatever is made for it."""

    def __init__(self, job: dict[str, Any] | None) -> None:
        super().__init__(job and {PATH: job})
        self.away = 0
        """Times that the job cannot be read."""
        self.pod_made: Callable[[], object] = lambda: None

    @property
    def job(self) -> Any:
        return self.objects.get(PATH)

    @property
    def pods_made(self) -> int:
        return sum("/pods/" in call.path for call in self.did("POST"))

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if self.away and (method, path) == ("GET", PATH):
            self.away -= 1
            raise ApiFailure(0, "the API server does not answer")
        made = super().call(method, path, body)
        if method == "POST" and "/pods" in path:
            self.pod_made()
        return made

    def replace_job(self, job: dict[str, Any] | None) -> None:
        self.objects = {PATH: job} if job else {}


class Silent:
    """Sidecars that are never heard of."""

    reports: Mapping[str, Any] = {}

    def __init__(self, *_: object, **__: object) -> None:
        """Whatever the real ones want to know."""

    def follow(self, hosts: Mapping[str, str], keep: Collection[str] = ()) -> None:
        """Nobody is listened to."""

    def want_holdings(self, wanted: bool) -> None:
        """Nobody is asked."""

    async def close(self) -> None:
        """Nothing is open."""


def surroundings(
    kube: Kube, pods: Iterable[PodView] = (), gone: Callable[[str], object] = lambda uid: None
) -> ReconcilerContext:
    return ReconcilerContext(
        lambda *_: pods, dict, kube, Config(), Metrics(), sidecars=cast(Any, Silent), gone=gone
    )


def new_job(uid: str = "u") -> dict[str, Any]:
    job = finished_job()
    del job["status"]
    job["metadata"]["uid"] = uid
    return job


def finished_job() -> dict[str, Any]:
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": "j", "namespace": "default", "uid": "u", "resourceVersion": "1",
            "generation": 1},
        "spec": {"workers": 1, "template": TEMPLATE},
        "status": {
            "conditions": [
                {
                    "type": "Completed", "status": "True", "reason": "AllTrainersSucceeded", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ]
        },
    }  # fmt: skip


@pytest.mark.parametrize(("phase", "asks"), [("Succeeded", False), ("Running", True)])
async def test_finished_job_that_is_kept_costs_the_api_server_nothing(phase: str, asks: bool) -> None:
    kube = StandIn(finished_job())
    world = trained(0)
    pod: PodView = replace(next(iter(world.pods.values())), phase=phase, job_uid="u")
    loop = JobLoop(finished_job(), surroundings(kube, [pod]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_observe", _stop)
        with pytest.raises(_Seen):
            await loop._reconcile()
    assert bool(kube.calls) is asks


async def test_job_held_by_a_finalizer_costs_one_status_that_names_it() -> None:
    raw = new_job() | {"status": {"phase": "Running"}}
    raw["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["audit.example/hold"]}
    kube = StandIn(raw)
    loop = JobLoop(copy.deepcopy(raw), surroundings(kube))
    for _ in range(3):
        await loop._reconcile()
    assert [call.method for call in kube.calls] == ["PATCH"]
    status = kube.job["status"]
    assert (status["phase"], status["reason"]) == ("Terminating", "Terminating")
    assert "audit.example/hold" in json.dumps(status["conditions"])


async def test_decision_knows_of_a_second_budget_on_the_pods_because_it_ends_every_drain() -> None:
    kube, job = StandIn(new_job()), parse_job(new_job())
    rival = {"metadata": {"name": "theirs"}, "spec": {"selector": {}}}
    kube.objects["/apis/policy/v1/namespaces/default/poddisruptionbudgets"] = {"items": [rival]}
    loop = JobLoop(new_job(), surroundings(kube))
    await loop._owned_objects.refresh(job)
    assert "theirs selects the job's pods as well" in loop._observe(job).budget_problem


@pytest.mark.parametrize(("others", "seconds"), [(0, 1.0), (49, 1.0), (499, 10.0)])
async def test_the_more_jobs_train_the_less_often_progress_is_written(others: int, seconds: float) -> None:
    """So that all of them together write it fifty times a second at most."""
    raw, now = new_job() | {"status": {"phase": "Running"}}, 1000.0
    around = replace(surroundings(StandIn(raw)), training={*map(str, range(others))}, clock=lambda: now)
    loop = JobLoop(raw, around)

    async def write(phase: str, step: int) -> float | None:
        job = parse_job(loop._raw)
        record = replace(job.status, phase=phase, step=step)
        return await loop._write_status(job, loop._raw, Decision(status=record))

    assert await write("Running", 1) is None
    assert await write("Running", 2) == seconds
    now += seconds
    assert await write("Running", 2) is None
    assert await write("Recovering", 2) is None, "what is no progress is written at once"
    assert [loop._raw["status"]["phase"], loop._raw["status"]["progress"]["step"]] == ["Recovering", 2]
    assert len(around.training) == others


async def test_owner_of_another_size_is_read_again_soon_so_that_its_return_is_told() -> None:
    """Although there are as many pods as workers: an owner that made and removed none yet."""
    now, sizes = 1000.0, [2, 1, 1]
    raw = new_job()
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job"}
    raw["spec"] |= {"attach": {"owner": owner, "container": "train"}}
    world = trained(0)
    pod: PodView = replace(next(iter(world.pods.values())), attached=json.dumps({"container": "train"}))

    async def read(job: object) -> int:
        return sizes.pop(0)

    around = replace(surroundings(StandIn(raw), [pod]), owner_size=read, clock=lambda: now)
    loop, job = JobLoop(raw, around), parse_job(raw)
    await loop._read_owner_size(job)
    now += 10.0
    await loop._read_owner_size(job)
    assert (loop._owner_size, sizes) == (1, [1])
    now += 10.0
    await loop._read_owner_size(job)
    assert sizes == [1], "while both are the same it is read once a minute"


async def test_loop_keeps_nothing_of_the_event_that_started_it() -> None:
    """What kopf's handlers run in holds the event, which is the whole job once more."""
    event: ContextVar[str] = ContextVar("event", default="nothing")
    seen: list[str] = []
    kube = StandIn(finished_job())
    loop = JobLoop(new_job(), surroundings(kube, gone=lambda uid: seen.append(event.get())))
    kube.replace_job(None)
    event.set("the whole job")
    loop.start()
    await until_turn(lambda: seen)
    await ends(loop.stop())
    assert seen == ["nothing"]


@pytest.mark.parametrize("between", TURNS)
async def test_loop_ends_with_its_job_even_if_news_came_at_the_same_moment(between: int) -> None:
    """The pods of a deleted job go when it goes, and wake its loop."""
    loop = JobLoop(finished_job(), surroundings(StandIn(finished_job())))
    woken = loop._woken = Woken()
    loop.start()
    await until_turn(lambda: woken.waits)
    loop.wake()
    await turns(between)
    await ends(loop.stop())
    assert loop.dead


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are followed up at once."""
    monkeypatch.setattr("tiercheck_operator.kubernetes.client._BACKOFF", (0.0,))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("namesake", [None, new_job("another")])
async def test_job_that_the_api_server_does_not_have_is_forgotten_whatever_the_watch_says(
    namesake: dict[str, Any] | None,
) -> None:
    kube, forgotten = StandIn(new_job()), list[str]()
    kube.pod_made = lambda: kube.replace_job(namesake)
    around = surroundings(kube, gone=forgotten.append)
    around.metrics.job_seen(parse_job(new_job()))
    loop = JobLoop(new_job(), around)
    loop.start()
    await until_turn(lambda: bool(forgotten) and loop.dead)
    assert forgotten == ["u"]
    assert kube.pods_made == 1, "after the first 404 it gets no more pods"
    assert b'tiercheck_job="j"' not in around.metrics.text()


@pytest.mark.usefixtures("hurried")
async def test_after_a_404_nothing_is_made_until_the_job_was_found() -> None:
    """The 404 may have been about something else, and the API server may not answer for a while."""
    kube = StandIn(new_job())

    def gone_for_a_while() -> None:
        kube.replace_job(None)
        kube.away = 5
        kube.pod_made = lambda: found.append(kube.away)

    kube.pod_made = gone_for_a_while
    found: list[int] = []
    loop = JobLoop(new_job(), surroundings(kube))
    loop.start()
    await until_turn(lambda: kube.away in (1, 2))
    kube.replace_job(new_job())
    await until_turn(lambda: bool(found))
    assert set(found) == {0}
    await ends(loop.stop())


async def test_attempt_is_not_written_while_its_placement_is_refused_and_all_else_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoMaps(StandIn):
        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            if path.endswith("/configmaps"):
                raise ApiFailure(403, "exceeded quota: configmaps")
            return super().call(method, path, body)

    def begin(obs: Observation) -> Decision:
        before = (SavePlacement(SavedPlacement(1, ())), CreatePod(0, 0, ()), EnsureService())
        return Decision(before, replace(obs.job.status, attempt=1))

    monkeypatch.setattr("tiercheck_operator.controller.reconciler.decide", begin)
    kube = NoMaps(new_job())
    loop = JobLoop(new_job(), surroundings(kube))
    for _ in range(3):
        with pytest.raises(ApiFailure, match="configmaps"):
            await loop._reconcile()
        assert not kube.job["status"].get("attempt")
    assert (kube.pods_made, sum("/services/" in call.path for call in kube.did("POST"))) == (3, 3)


async def test_refused_status_is_an_event_of_the_job() -> None:
    class NoStatus(StandIn):
        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            if method == "PATCH" and path.endswith("/status"):
                raise ApiFailure(422, "the policy frozen-status denies it")
            return super().call(method, path, body)

    kube = NoStatus(new_job())
    loop = JobLoop(new_job(), surroundings(kube))
    for _ in range(3):
        with pytest.raises(ApiFailure, match="frozen-status"):
            await loop._reconcile()
    assert [(each["reason"], each["involvedObject"]["uid"]) for each in kube.events] == [
        ("StatusRefused", "u")
    ]
    assert "frozen-status" in kube.events[0]["message"]


async def test_sidecars_are_asked_what_they_hold_before_a_failure_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write takes what the API server takes, and a recovery waits for their answers alone."""
    order: list[str] = []

    class Asked(Silent):
        def want_holdings(self, wanted: bool) -> None:
            order.append("asked" if wanted else "left alone")

    class Written(StandIn):
        def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
            if path.endswith("/status"):
                order.append("written")
            return super().call(method, path, body)

    def find_failure(obs: Observation) -> Decision:
        return Decision(status=replace(obs.job.status, recovery=Recovery("TrainerCrash", "", 1.0, 1.0)))

    job = new_job() | {"status": {"attempt": 1}}
    loop = JobLoop(job, surroundings(Written(job)))
    loop._known, loop._read_at, loop._sidecars = True, time.time(), cast(Any, Asked())
    loop._owned_objects.placement = SavedPlacement(1, ())
    monkeypatch.setattr("tiercheck_operator.controller.reconciler.decide", lambda obs: Decision())
    await loop._reconcile()
    monkeypatch.setattr("tiercheck_operator.controller.reconciler.decide", find_failure)
    await loop._reconcile()
    assert order == ["left alone", "asked", "written"]


async def test_suspended_job_without_a_pod_asks_the_api_server_for_nothing_once_it_says_so() -> None:
    """A queue may hold thousands of them."""
    job = new_job()
    job["spec"]["suspend"] = True
    kube = StandIn(job)
    first = JobLoop(copy.deepcopy(job), surroundings(kube))
    await first._reconcile()
    assert kube.calls, "until then it is not known what it owns"
    kube.calls.clear()
    again = JobLoop(copy.deepcopy(kube.job), surroundings(kube))
    for _ in range(3):
        await again._reconcile()
        again._known = False  # as after a quiet while
    assert not kube.calls
    again.changed({**again._raw, "spec": {**job["spec"], "suspend": False}})
    await again._reconcile()
    assert kube.calls


async def test_what_somebody_deleted_of_a_job_that_always_has_news_is_made_again() -> None:
    """A job that trains is never quiet; without its Secret no pod of it starts any more."""
    kube, now = StandIn(new_job()), 1000.0
    loop = JobLoop(new_job(), replace(surroundings(kube), clock=lambda: now))
    secret = "/api/v1/namespaces/default/secrets/j-credentials"
    await loop._reconcile()
    first = kube.objects.pop(secret)
    reads = kube.names("GET").count("j-credentials")
    for _ in range(50):
        now += 1.0
        await loop._reconcile()
    assert kube.names("GET").count("j-credentials") == reads, "to ask costs the API server something"
    now += 10.0
    await loop._reconcile()
    assert kube.objects[secret]["data"] == first["data"], "the one that its sidecars believe"


@pytest.mark.parametrize("there", ["u0", "another", None])
async def test_member_that_the_view_lacks_is_read_once_before_it_counts_as_gone(
    there: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that a proxy's cache answers may lack it, and its healthy training would be restarted."""
    monkeypatch.setattr("tiercheck_operator.controller.reconciler.decide", lambda obs: Decision())
    kube, found = StandIn(new_job() | {"status": {"attempt": 1}}), list[Any]()
    if there is not None:
        kube.put("/api/v1/namespaces/default/pods/j-0-0", {"metadata": {"name": "j-0-0", "uid": there}})
    loop = JobLoop(kube.job, replace(surroundings(kube), found=found.append))
    loop._known, loop._read_at = True, time.time()
    loop._owned_objects.placement = SavedPlacement(1, (SavedMember(0, "j-0-0", "u0", 0, "n", ()),))
    for _ in range(3):
        await loop._reconcile()
    assert kube.names("GET") == ["j-0-0"]
    assert [pod["metadata"]["uid"] for pod in found] == [there] * (there == "u0")


@pytest.mark.parametrize(("owner", "put_back"), [("u", True), ("another", False)])
async def test_labels_that_were_taken_off_a_member_are_put_back_once_and_it_trains_on(
    owner: str, put_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch shows no pod without them. Any user may write a foreign pod's name into the placement."""
    monkeypatch.setattr("tiercheck_operator.controller.reconciler.decide", lambda obs: Decision())
    kube, found = StandIn(new_job() | {"status": {"attempt": 1}}), list[Any]()
    reference = {"apiVersion": JOBS.api_version, "kind": "TierCheckJob", "uid": owner, "controller": True}
    pod = {"name": "j-0-3", "uid": "u0", "ownerReferences": [reference], "labels": {"team": "a"}}
    kube.put("/api/v1/namespaces/default/pods/j-0-3", {"metadata": pod})
    loop = JobLoop(kube.job, replace(surroundings(kube), found=found.append))
    loop._known, loop._read_at = True, time.time()
    loop._owned_objects.placement = SavedPlacement(1, (SavedMember(0, "j-0-3", "u0", 3, "n", ()),))
    for _ in range(3):
        await loop._reconcile()
    assert kube.names("PATCH") == ["j-0-3"] * put_back
    seen = parse_pod(found[0])
    assert (seen is not None) is put_back
    assert seen is None or (seen.job_uid, seen.worker, seen.incarnation) == ("u", 0, 3)


async def test_late_news_of_a_job_that_is_gone_make_nothing() -> None:
    kube, forgotten = StandIn(None), list[str]()
    loop = JobLoop(new_job(), surroundings(kube, gone=forgotten.append))
    loop.start()
    await until_turn(lambda: bool(forgotten) and loop.dead)
    assert not kube.did("POST")


def knowing_operator(kube: StandIn, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """It has seen all that there was."""
    monkeypatch.setattr("tiercheck_operator.app.Kube", lambda *_, **__: kube)
    operator = Operator(Config(), Access(lambda: kopf.ConnectionInfo(server="http://127.0.0.1:1")))
    operator._resync.seen_all.set()
    return operator


async def test_operator_has_forgotten_a_job_and_is_well_when_its_loop_found_it_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube = StandIn(None)
    operator = knowing_operator(kube, monkeypatch)
    operator._job_changed(new_job())
    (loop,) = operator._loops.values()
    await until_turn(lambda: loop.dead)
    assert not operator._loops
    assert not operator._jobs.uids()
    assert not operator._known_as
    assert operator._trouble() == ""
    await operator._job_gone("u")  # the watch says so at last


class _Seen(Exception):
    pass


def _stop(_: object) -> Any:
    raise _Seen


def test_names_of_fields_are_one_string_for_all_jobs() -> None:
    text = json.dumps(finished_job())
    first, second = (copy_of_job(json.loads(text)) for _ in range(2))
    assert first == second == finished_job()
    for one, other in ((first, second), (first["spec"], second["spec"])):
        assert one is not other
        assert all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def test_node_is_unwelcome_to_all_only_if_two_teams_say_so() -> None:
    places = {
        ("a", "1"): frozenset({"n1", "n2"}),
        ("b", "2"): frozenset({"n2"}),
        ("a", "3"): frozenset({"n1"}),
    }
    assert find_unwelcome(places, "a") == {"n1", "n2"}
    assert find_unwelcome(places, "b") == find_unwelcome(places, "c") == {"n2"}
