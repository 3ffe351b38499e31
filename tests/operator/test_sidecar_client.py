"""The operator listens to a sidecar over TLS with the job's credentials, and hears silence."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from moments import TURNS, Woken, ends, turns
from moments import until as until_turn
from world_in_memory import World

from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.names import join_address
from tiercheck.protocol.report import Report
from tiercheck_operator import sidecars
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.manifests.owned import Credentials
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import HostSign
from tiercheck_operator.sidecars import JobSidecars, SidecarError

HOST = "127.83.1.7"
CREDENTIALS = issue("job-uid")
_QUEUE = 128


def some_report() -> Report:
    world = World()
    for _ in range(5):
        world.tick()
    return world.sidecars[world.member(1)].report()


class StandIn:
    """Answers as a sidecar does; what it says and what it was asked can be set and seen."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.changed = asyncio.Event()
        self.asked: list[float] = []
        self.headers: dict[str, str] = {}
        self.directives: list[Directive] = []

    def tell(self, **changes: object) -> None:
        self.report = dataclasses.replace(self.report, serial=self.report.serial + 1, **changes)  # type: ignore[arg-type]
        self.changed.set()

    async def get(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {CREDENTIALS.token}":
            return web.Response(status=401)
        wait = float(request.query["wait"])
        self.asked.append(wait)
        if int(request.query["after"]) >= self.report.serial:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self.changed.wait()
        return web.Response(body=to_json(self.report), headers=self.headers)

    async def put(self, request: web.Request) -> web.Response:
        self.directives.append(from_json(await request.read(), Directive))
        self.tell(revision=self.directives[-1].revision)
        return web.Response(body=to_json(self.report))


async def serve(sidecar: StandIn, credentials: Credentials, folder: Path) -> web.AppRunner:
    (folder / "crt").write_bytes(credentials.certificate)
    (folder / "key").write_bytes(credentials.key)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "crt", folder / "key")
    app = web.Application()
    app.add_routes([web.get("/v1/report", sidecar.get), web.put("/v1/directive", sidecar.put)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, names.CONTROL_PORT, ssl_context=tls).start()
    return runner


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[StandIn]:
    stand_in = StandIn(some_report())
    runner = await serve(stand_in, CREDENTIALS, tmp_path)
    yield stand_in
    await runner.cleanup()


@pytest.fixture
async def listening() -> AsyncIterator[JobSidecars]:
    woken = asyncio.Event()
    client = JobSidecars("job-uid", CREDENTIALS, woken.set, poll_seconds=30.0, call_seconds=5.0)
    yield client
    await client.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  what is waited for is a state, not an event of ours
            await asyncio.sleep(0.01)


def heard(client: JobSidecars, uid: str) -> Report | None:
    return client.reports[uid].report if uid in client.reports else None


async def test_news_arrives_while_a_long_poll_waits(sidecar: StandIn, listening: JobSidecars) -> None:
    uid = sidecar.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: heard(listening, uid) == sidecar.report)
    await until(lambda: 30.0 in sidecar.asked)
    sidecar.tell(attempt=9)
    await until(lambda: heard(listening, uid) == sidecar.report)


async def test_probe_interrupts_a_long_poll_that_has_nothing_to_say(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    uid = sidecar.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: 30.0 in sidecar.asked)
    answered = listening.reports[uid].answered_at
    listening.probe(uid)
    await until(lambda: listening.reports[uid].answered_at != answered)
    assert sidecar.asked.count(0.0) == 2


async def test_directive_reaches_the_sidecar_as_it_was_written(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    world = World()
    while not any(isinstance(action, Push) for action in world.last.after):
        world.tick()
    push = next(action for action in world.last.after if isinstance(action, Push))
    uid = sidecar.report.pod_uid
    listening.follow({uid: HOST})
    await listening.push(uid, push.directive)
    assert sidecar.directives == [push.directive]
    report = heard(listening, uid)
    assert report is not None
    assert report.revision == push.directive.revision


async def test_sidecar_that_stops_answering_is_silent_from_then_on(
    tmp_path: Path, listening: JobSidecars
) -> None:
    stand_in = StandIn(some_report())
    runner = await serve(stand_in, CREDENTIALS, tmp_path)
    uid = stand_in.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: heard(listening, uid))
    await runner.cleanup()
    await until(lambda: listening.reports[uid].silent_since)
    known = listening.reports[uid]
    assert known.report == stand_in.report, "what it said last is not forgotten"
    assert known.answered_at is not None
    runner = await serve(stand_in, CREDENTIALS, tmp_path)
    await until(lambda: listening.reports[uid].silent_since is None)
    await runner.cleanup()


@pytest.mark.parametrize("first_port", [None, 12470], ids=["usual ports", "ports of its own"])
async def test_host_that_refuses_is_told_from_one_that_takes_connections_and_from_silence(
    monkeypatch: pytest.MonkeyPatch, first_port: int | None
) -> None:
    port = first_port or names.CONTROL_PORT
    monkeypatch.setattr(sidecars, "_KNOCK", 0.2)
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None, call_seconds=0.2)
    with socket.socket() as listener, contextlib.ExitStack() as callers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        client.follow({"pod": join_address(HOST, first_port)})
        await until(lambda: client.reports["pod"].host is HostSign.REFUSED)
        listener.listen(_QUEUE)  # the kernel accepts, and nobody answers
        await until(lambda: client.reports["pod"].host is HostSign.ACCEPTED)
        for _ in range(
            2 * _QUEUE
        ):  # its queue is full then: the kernel drops what asks, as if the host were gone
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((HOST, port))
        await until(lambda: client.reports["pod"].host is HostSign.NOTHING)
        await client.close()


async def test_silence_counts_from_the_call_in_vain_and_the_host_was_looked_at_before_it_is_told() -> None:
    told: list[tuple[float, HostSign]] = []

    def look() -> None:
        known = client.reports.get("pod")
        if known is not None and known.silent_since is not None:
            told.append((known.silent_since, known.host))

    client = JobSidecars("job-uid", CREDENTIALS, look, call_seconds=0.5)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, names.CONTROL_PORT))
        listener.listen(_QUEUE)  # the kernel accepts, and nobody answers
        began = time.time()
        client.follow({"pod": HOST})
        await until(lambda: told)
        since, host = told[0]
        assert host is HostSign.ACCEPTED, "else a busy sidecar would be taken for a dead host for a moment"
        assert since - began < 0.5 <= time.time() - began, "it was due at once, and had half a second for it"
        await client.close()


async def test_step_of_a_trainer_is_heard_but_not_what_a_restarted_sidecar_learns_of_old_ones(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    uid, attempt = sidecar.report.pod_uid, sidecar.report.attempt
    listening.follow({uid: HOST})
    await until(lambda: heard(listening, uid))

    async def hear(**trainer: object) -> float | None:
        sidecar.tell(trainer=dataclasses.replace(sidecar.report.trainer, **trainer))  # type: ignore[arg-type]
        await until(lambda: heard(listening, uid) == sidecar.report)
        return listening.reports[uid].stepped_at

    assert await hear(step=None) is None
    assert await hear(step=500) is None, "nobody knows when"
    first = await hear(step=501)
    assert first is not None
    assert await hear(step=501, reason="x") == first
    later = await hear(step=502)
    assert later is not None
    assert later > first
    sidecar.tell(attempt=attempt + 1)
    assert await hear(step=503) == later, "of another attempt"


async def test_sidecar_of_another_job_is_refused(tmp_path: Path, listening: JobSidecars) -> None:
    stand_in = StandIn(some_report())
    runner = await serve(stand_in, issue("job-uid"), tmp_path)
    uid = stand_in.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: listening.reports[uid].silent_since)
    assert heard(listening, uid) is None
    assert stand_in.asked == []
    await runner.cleanup()


async def test_another_pod_at_the_same_address_is_not_taken_for_ours(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    listening.follow({"older-pod": HOST})
    await until(lambda: listening.reports["older-pod"].silent_since)
    assert heard(listening, "older-pod") is None


async def test_pod_that_is_not_followed_cannot_be_told_anything(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    world = World()
    while not any(isinstance(action, Push) for action in world.last.after):
        world.tick()
    push = next(action for action in world.last.after if isinstance(action, Push))
    with pytest.raises(SidecarError):
        await listening.push("nobody", push.directive)


@pytest.mark.parametrize("between", TURNS)
async def test_listening_ends_when_it_is_told_to_even_if_somebody_probes_at_the_same_moment(
    between: int,
) -> None:
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None)
    client.follow({"pod": HOST})
    asked = client._asked["pod"] = Woken()
    await until_turn(lambda: asked.waits == 2)  # the first time beside the call, which nobody answers
    client.probe("pod")
    await turns(between)
    await ends(client.close())


async def test_times_of_a_sidecar_whose_clock_is_wrong_are_told_by_ours(
    sidecar: StandIn, listening: JobSidecars
) -> None:
    ahead = 3600.0
    sidecar.headers["Date"] = email.utils.formatdate(time.time() + ahead, usegmt=True)
    ended = time.time() - 5
    trainer = dataclasses.replace(sidecar.report.trainer, ended_at=ended + ahead)
    sidecar.tell(trainer=trainer)
    uid = sidecar.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: heard(listening, uid))
    report = heard(listening, uid)
    assert report is not None
    assert report.trainer.ended_at == pytest.approx(ended, abs=30.0)
