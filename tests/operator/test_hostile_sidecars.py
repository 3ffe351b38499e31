"""No answer or clock of one team's sidecar takes the operator's memory, its listening or its times."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import gc
import json
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator.sidecar_model import SidecarModel
from tests.operator.sidecar_over_https import (
    CREDENTIALS,
    HOST,
    Answer,
    ServedSidecar,
    heard,
    serve,
    some_report,
    until,
)
from tests.operator.world_in_memory import REMOTE, World, make_spec, trained
from tiercheck.clocks import ClockSkew, SteadyClock
from tiercheck.protocol.directive import DeltaMode, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import (
    ConnectionFailure,
    Holding,
    Problem,
    Proof,
    Quarantined,
    RankRestore,
    RemoteReport,
    Report,
    TrainerReport,
    TrainerState,
    Unreachable,
    Watermarks,
)
from tiercheck.protocol.version import Branch, History, Kind, Share, Version
from tiercheck_local.apiserver.schema.structural import faults
from tiercheck_operator import sidecars
from tiercheck_operator.model import conditions
from tiercheck_operator.model.status import render_record
from tiercheck_operator.planning.recovery import availability
from tiercheck_operator.planning.recovery.availability import Artifacts, JobInventory, RemoteInventory
from tiercheck_operator.planning.recovery.recovery import Recover, RecoveryProblem, decide_recovery
from tiercheck_operator.report_bounds import MOST, clamp_report, to_operator_clock
from tiercheck_operator.sidecars import FollowedSidecar, JobSidecars, read_report

MIB = 2**20


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[ServedSidecar]:
    served = ServedSidecar()
    runner = await serve(served, CREDENTIALS, tmp_path)
    yield served
    await runner.cleanup()


@pytest.fixture
async def listening() -> AsyncIterator[JobSidecars]:
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None, poll_seconds=0.1, call_seconds=5.0)
    yield client
    await client.close()


@functools.cache
def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(b" " * MIB) for _ in range(size // MIB)), packer.flush()])


async def a_bomb(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bomb(96 * MIB), headers={"Content-Encoding": "gzip"})


ODD: dict[str, Callable[[ServedSidecar], Answer]] = {}


def odd(name: str) -> Callable[[Callable[[ServedSidecar], Answer]], Callable[[ServedSidecar], Answer]]:
    def add(make: Callable[[ServedSidecar], Answer]) -> Callable[[ServedSidecar], Answer]:
        ODD[name] = make
        return make

    return add


def plain(**response: object) -> Callable[[ServedSidecar], Answer]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(**response)  # type: ignore[arg-type]

    return lambda _: answer


ODD |= {
    "a bomb": lambda _: a_bomb,
    "no UTF-8": plain(body=b'{"job_uid":"\xff"}'),
    "deep": plain(body=b'{"more":' * 100_000),
    "a whole number of any length": plain(body=to_json(some_report()).replace(b'"attempt":',
        b'"attempt":1' + b"0" * 3000, 1)),
    "elsewhere": plain(status=302, headers={"Location": "http://127.0.0.1:1/"}),
    "a date before all dates": plain(body=to_json(some_report()).replace(b"job-uid", b"another"),
        headers={"Date": f"Mon, 01 Jan {'9' * 40} 00:00:00 GMT"}),
    "no text that says why": plain(status=500, body=b"\xff" * 1000),
}  # fmt: skip


@odd("without end")
def _endless(sidecar: ServedSidecar) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            sidecar.sent += 65536
            await asyncio.sleep(0)

    return answer


@pytest.mark.parametrize("name", ODD)
async def test_it_is_said_that_it_is_silent_and_it_is_heard_again(
    sidecar: ServedSidecar, listening: JobSidecars, name: str
) -> None:
    uid = sidecar.report.pod_uid
    sidecar.answer = ODD[name](sidecar)
    listening.follow({uid: HOST})
    await until(lambda: sidecar.answered >= 2 and listening.reports[uid].silent_since is not None)
    assert heard(listening, uid) is None
    sidecar.answer = None
    await until(lambda: heard(listening, uid) == sidecar.report)


async def test_what_is_compressed_is_never_unpacked(sidecar: ServedSidecar, listening: JobSidecars) -> None:
    sidecar.answer = a_bomb
    tracemalloc.start()
    try:
        listening.follow({sidecar.report.pod_uid: HOST})
        await until(lambda: sidecar.answered >= 2)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


async def test_an_answer_without_end_is_read_as_far_as_any_report_goes(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    sidecar.answer = ODD["without end"](sidecar)
    listening.follow({sidecar.report.pod_uid: HOST})
    await until(lambda: sidecar.answered >= 1)
    in_flight = 32 * MIB  # what the kernel and two transports hold between the two ends
    assert sidecar.sent / sidecar.answered < sidecars._MOST_BODY + in_flight


def _tiny(**fields: object) -> Callable[[], bytes]:
    """A report of as many small entries as an answer may have."""

    def text() -> bytes:
        report = replace(some_report(), **fields)  # type: ignore[arg-type]
        return to_json(report).replace(b'["@@"]', b"[" + b",".join([b'"@"'] * 200_000) + b"]")

    return text


_WIDE = "\N{GRINNING FACE}" + "x" * 900_000
HEAVY: dict[str, Callable[[], bytes]] = {
    "one wide text": lambda: to_json(replace(some_report(), problems=(Problem("Any", _WIDE),))),
    "wide texts": lambda: to_json(replace(some_report(), problems=(Problem("Any", _WIDE[:999]),) * 800)),
    "tiny texts": _tiny(restore=replace(some_report().restore, stalled=("@@",))),
    "tiny failures": _tiny(restore=replace(some_report().restore, ranks=(
        RankRestore(0, None, None, 0, 0.0, ("@@",)),))),
    "holdings": lambda: to_json(replace(some_report(), holdings=tuple(
        Holding(n, Version(n, 9999 + n), Tier.PEER, 10**9 + n) for n in range(5_000)))),
    "versions": lambda: to_json(replace(some_report(), remote=RemoteReport(True, True, "", tuple(
        Version(n, 9999 + n) for n in range(25_000))))),
    "bad copies": lambda: to_json(replace(some_report(), quarantined=tuple(
        Quarantined(n, Version(n, 9999 + n), n, f"{n}") for n in range(5_000)))),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEAVY)
def test_newest_reports_stay_small_whatever_is_in_them(kind: str) -> None:
    """A megabyte for each sidecar."""
    client, text = JobSidecars("job-uid", CREDENTIALS, lambda: None), HEAVY[kind]()
    assert 200_000 < len(text) <= sidecars._MOST_BODY
    client._followed = {f"{number}": FollowedSidecar(f"{number}", f"{number}", "") for number in range(16)}
    tracemalloc.start()
    try:
        kept = [client._accept(each, text, 0.0) for each in client._followed.values()]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < len(kept) * MIB
    finally:
        tracemalloc.stop()
    told = {problem.reason for report in kept for problem in report.problems}
    assert conditions.BAD_REPORT in told, "whose job it is sees why the rest is left out"
    assert kept[-1].trainer == some_report().trainer, "and training is still seen"


# No lie makes a decision fail, take long, or give a status that the API server refuses: one process decides
# for all teams.


_CRD = yaml.load((Path(__file__).parents[2] / "crds" / "tiercheckjobs.yaml").read_text(), yaml.CSafeLoader)
_STATUS = _CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
_WHOLE = (-(2**63), -(2**31), -2, -1, 0, 1, 300, 2**31, 2**53, 2**62, 2**63 - 1)
_REAL = (-1e308, -1e18, -1.0, 0.0, 1e12, 1e18, 1e308)
_TEXT = ("", "x" * 50_000, "a b\n\x00", "{0}%s", "-", "é" * 300)
SPECS: tuple[dict[str, Any], ...] = (
    {"remote": REMOTE},
    {"remote": REMOTE, "delta": DeltaMode.REPLAY},
    {"copies": 0, "parity": (2, 1), "delta": DeltaMode.REPLAY},
)
EVENTS: tuple[Callable[[World], object], ...] = (
    lambda world: None,
    lambda world: world.crash(1),
    lambda world: world.kill_node(world.home(1)),
    lambda world: world.evict(world.member(1)),
)


def _way(value: Any, numbers: random.Random) -> list[Any]:
    """To some value in it: each field of a message is as likely as any other, however much it holds."""
    way: list[Any] = []
    while (
        isinstance(value, (dict, list)) and value and not (isinstance(value, list) and numbers.random() < 0.2)
    ):
        keys = (
            [key for key in value if key not in ("job_uid", "pod_uid")]
            if isinstance(value, dict)
            else range(len(value))
        )
        way.append(numbers.choice(keys))
        value = value[way[-1]]
    return way


def _lie(value: Any, numbers: random.Random) -> Any:
    """In place of a true value, of the same type or of none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return numbers.choice(_WHOLE)
    if isinstance(value, float):
        return numbers.choice(_REAL)
    if isinstance(value, str):
        return numbers.choice(_TEXT)
    if isinstance(value, list):
        return numbers.choice(([], value * 2, value[:1] * 60))
    return numbers.choice((1, 1e300, -5.0, {"step": 2**62, "attempt": 1}, "x"))


def lying(report: Report, numbers: random.Random) -> Report:
    """As the operator takes it."""
    raw = json.loads(to_json(report))
    while True:
        told = json.loads(json.dumps(raw))
        for _ in range(numbers.choice((1, 4, 12))):
            *way, last = _way(told, numbers)
            place = told
            for key in way:
                place = place[key]
            place[last] = _lie(place[last], numbers)
        try:
            read = read_report(json.dumps(told).encode())
        except ValueError:
            continue
        return clamp_report(to_operator_clock(read, numbers.choice((0.0, 0.0, 2.5e11, -6e10))))


def make_lie(liar: SidecarModel, tell: Callable[[Report], Report]) -> None:
    honest = liar.report
    liar.report = lambda: tell(honest())  # type: ignore[method-assign]


@settings(max_examples=examples(15))
@example(28)
@example(41)
@given(st.integers(0, 2**32))
def test_no_lie_ends_a_decision_or_makes_a_status_that_is_refused(seed: int) -> None:
    numbers = random.Random(seed)
    world = World(make_spec(**numbers.choice(SPECS))).running(0)
    world.train(numbers.randrange(5))
    make_lie(world.sidecars[world.member(2)], lambda report: lying(report, numbers))
    numbers.choice(EVENTS)(world)
    for _ in range(12):
        world.tick()
        assert not list(faults(render_record(world.status), _STATUS))


@pytest.mark.parametrize(
    "share",
    [Share(2**62, (2,)), Share(-1, (2,)), Share(0, ()), Share(0, tuple(range(10**4)))],
    ids=["far", "none", "of nobody", "of all"],
)
@pytest.mark.parametrize("spec", [{}, {"copies": 0, "parity": (2, 1)}], ids=["copies", "parity"])
def test_a_block_that_no_code_has_is_no_block(share: Share, spec: dict[str, Any]) -> None:
    world = trained(steps=4, **spec)
    version = max(each.version for each in world.sidecar(2).own)
    block = Holding(2, version, Tier.PEER, 1, Kind.SNAPSHOT, share)
    make_lie(
        world.sidecars[world.member(2)],
        lambda report: clamp_report(replace(report, holdings=(*report.holdings, block))),
    )
    assert world.recovered(crash=1)["step"]


def test_versions_without_number_are_not_all_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand fit into one report; with them a decision took minutes, and a gigabyte."""
    monkeypatch.setattr(availability, "_MOST_VERSIONS", 64)
    told = [Version(step, 1) for step in range(1, 1001)]
    remote = RemoteInventory(configured=True, reachable=True, versions=told)
    lies = [JobInventory(0, {0: Artifacts(frozenset(told[:500]), frozenset())})]
    situation = RecoveryProblem(2, 1, History((Branch(1, 0, 2),)), lies, remote)
    assert situation.stock.versions == tuple(told[-64:]), "the newest of them"
    outcome = decide_recovery(situation)
    assert isinstance(outcome, Recover)
    assert outcome.version == told[-1]


def test_what_is_true_is_taken_as_it_is() -> None:
    report = some_report()
    assert clamp_report(report) == report
    held = tuple(
        Holding(n, Version(n, 1), Tier.PEER, n, Kind.DELTA, Share(n % 4, (n, n + 1))) for n in range(20)
    )
    assert clamp_report(replace(report, holdings=held)).holdings == held


def test_a_number_that_no_job_has_is_brought_to_one_that_some_job_could_have() -> None:
    far = Version(2**63 - 1, 2**63 - 1)
    told = replace(
        some_report(), watermarks=Watermarks(far, far, far),
        proofs=(Proof(Tier.PEER, far, -1e300, 1e300, -(2**63)),),
        unreachable=(Unreachable(1, "h", 1e300, ConnectionFailure.SILENT),),
        problems=(Problem("no word", "x"),),
    )  # fmt: skip
    found = clamp_report(told)
    assert found.watermarks.local == Version(MOST, MOST)
    assert (found.proofs[0].at, found.unreachable[0].since) == (-(2.0**31), 253_370_764_800.0)
    assert found.problems[0].message == "x"


async def test_it_is_heard_all_the_same(sidecar: ServedSidecar, listening: JobSidecars) -> None:
    """Not taken for silent: that would cost a healthy worker its place."""
    uid = sidecar.report.pod_uid
    told = replace(sidecar.report, watermarks=Watermarks(Version(2**63 - 1, 1)))
    sidecar.answer = plain(body=to_json(told))(sidecar)
    listening.follow({uid: HOST})
    await until(lambda: heard(listening, uid) is not None)
    known = heard(listening, uid)
    assert known is not None
    assert known.watermarks.local == Version(MOST, 1)


NOW = 1_800_000_000.0


def date(moment: float) -> str:
    """As HTTP writes it: whole seconds, the rest cut off."""
    return email.utils.formatdate(int(moment), usegmt=True)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 30.0])
def test_skew_is_found_from_the_date_of_an_answer(ahead: float) -> None:
    assert ClockSkew().measure("h", date(NOW + ahead), NOW) == pytest.approx(ahead, abs=1.0)


@pytest.mark.parametrize("ahead", [0.0, 0.9, -1.0])
def test_clocks_that_agree_leave_reports_as_they_are(ahead: float) -> None:
    assert ClockSkew().measure("h", date(NOW + ahead), NOW) == 0.0


def test_skew_does_not_wander_with_the_fraction_of_a_second() -> None:
    skew = ClockSkew()
    found = {skew.measure("h", date(NOW + passed + 60), NOW + passed) for passed in (0.0, 0.4, 0.9, 1.3, 7.7)}
    assert len(found) == 1


@pytest.mark.parametrize("text", [None, "yesterday"])
def test_answer_without_a_usable_date_changes_nothing(text: str | None) -> None:
    skew = ClockSkew()
    before = skew.measure("h", date(NOW + 100), NOW)
    assert skew.measure("h", text, NOW) == before


def test_every_time_in_a_report_is_moved_and_nothing_else() -> None:
    world = trained(0)
    report = world.sidecars[world.member(0)].report()
    trainer = TrainerReport(
        TrainerState.FAILED, exit_code=1, started_at=100.0, first_step_at=None, ended_at=160.0
    )
    proof = Proof(Tier.PEER, Version(3, 1), at=150.0, seconds=7.0, bytes=1)
    given = replace(report, trainer=trainer, proofs=(proof,))
    moved = to_operator_clock(given, 50.0)
    assert moved == replace(
        given, trainer=replace(trainer, started_at=50.0, ended_at=110.0), proofs=(replace(proof, at=100.0),)
    )
    assert to_operator_clock(given, 0.0) is given


# No step of the operator's own clock gives anybody up.


STEPS = [30.0, 90.0, 600.0, 86_400.0, -90.0, -86_400.0]


@pytest.mark.parametrize("step", STEPS)
def test_healthy_worker_stays_when_the_clock_steps_while_its_sidecar_misses_three_calls(step: float) -> None:
    world = trained()
    uid, attempt = world.member(1), world.status.attempt
    world.sidecars[uid].reachable = False
    world.train(2)
    world.now += step
    world.tick()
    world.sidecars[uid].reachable = True
    world.train(30, attempt=attempt)
    assert uid in world.pods


@pytest.mark.parametrize("step", STEPS)
def test_dead_node_is_noticed_as_soon_as_ever_although_the_clock_stepped(step: float) -> None:
    def seconds_until_noticed(step: float) -> int:
        world = trained()
        attempt = world.status.attempt
        world.kill_node(world.home(1))
        world.now += step
        for seconds in range(200):
            if world.status.attempt > attempt:
                return seconds
            world.tick()
        raise AssertionError("never")

    assert abs(seconds_until_noticed(step) - seconds_until_noticed(0.0)) <= 2


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(-1e6, 1e6))))
def test_seconds_are_as_long_as_they_are_to_a_tenth_and_steps_are_made_up_for(
    moves: list[tuple[float, float]],
) -> None:
    wall = passed = 0.0
    clock = SteadyClock(lambda: wall, lambda: passed)
    for seconds, step in moves:
        before = clock()
        passed, wall = passed + seconds, wall + seconds + step
        assert 0.9 * seconds - 1e-3 <= clock() - before <= 1.1 * seconds + 1e-3
    passed, wall = passed + 1e9, wall + 1e9
    assert clock() == pytest.approx(wall)
