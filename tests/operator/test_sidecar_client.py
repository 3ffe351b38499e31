"""The operator listens to a sidecar over TLS with the job's credentials, and hears silence."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import gc
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tests.operator.sidecar_over_https import (
    CREDENTIALS,
    HOST,
    TURNS,
    ServedSidecar,
    ends,
    heard,
    serve,
    some_report,
    turns,
    until,
    until_turn,
)
from tests.operator.world_in_memory import World
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Directive, Restore, Source, SourceTable, Tier
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.names import join_address
from tiercheck.protocol.report import Holding, Report
from tiercheck.protocol.version import Version
from tiercheck_operator import sidecars
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.model.actions import Push
from tiercheck_operator.model.observed import HostProbe
from tiercheck_operator.sidecars import (
    DirectiveEncoder,
    FollowedSidecar,
    JobSidecars,
    Lines,
    SidecarError,
    in_pieces,
    read_report,
)

_QUEUE = 128


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[ServedSidecar]:
    served = ServedSidecar()
    runner = await serve(served, CREDENTIALS, tmp_path)
    yield served
    await runner.cleanup()


async def follow(sidecar: ServedSidecar, client: JobSidecars, polls: bool = False) -> str:
    """Returns the pod's UID once the client has heard of it, or (`polls`) waits for news in a long poll."""
    uid = sidecar.report.pod_uid
    client.follow({uid: HOST})
    await until(lambda: 30.0 in sidecar.asked if polls else heard(client, uid))
    return uid


@pytest.fixture
async def listening() -> AsyncIterator[JobSidecars]:
    woken = asyncio.Event()
    client = JobSidecars("job-uid", CREDENTIALS, woken.set, poll_seconds=30.0, call_seconds=5.0)
    yield client
    await client.close()


async def test_what_a_sidecar_claims_of_a_newer_attempt_counts_if_the_operator_signed_it(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid, key = sidecar.report.pod_uid, Ed25519PrivateKey.from_private_bytes(CREDENTIALS.operator_key)
    statement = signing.attempt_statement("job-uid", 40)
    signature = key.sign(statement).hex()
    listening.follow({uid: HOST})
    for claimed, given, believed in ((41, signature, 0), (1000, "", 0), (-1, "²", 0), (40, signature, 40)):
        sidecar.tell(newest_attempt=claimed, newest_signature=given)
        serial = sidecar.report.serial
        await until(lambda serial=serial: (found := heard(listening, uid)) and found.serial == serial)
        assert heard(listening, uid).newest_attempt == believed  # type: ignore[union-attr]


async def test_each_pod_is_shown_a_signature_of_its_own_and_gets_that_of_the_attempt(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening)
    directive = sidecar.model.told
    await listening.push(uid, dataclasses.replace(directive, number=directive.number + 1))
    public = Ed25519PublicKey.from_public_bytes(CREDENTIALS.operator_public)
    public.verify(bytes.fromhex(sidecar.shown), signing.pod_statement(uid))
    public.verify(bytes.fromhex(sidecar.signature), signing.attempt_statement("job-uid", directive.attempt))


async def test_news_arrives_while_a_long_poll_waits(sidecar: ServedSidecar, listening: JobSidecars) -> None:
    uid = await follow(sidecar, listening)
    await until(lambda: 30.0 in sidecar.asked)
    sidecar.tell(attempt=9)
    await until(lambda: heard(listening, uid) == sidecar.report)


async def test_probe_is_answered_beside_a_long_poll_that_has_nothing_to_say(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening, polls=True)
    answered = listening.reports[uid].answered_at
    listening.probe(uid)
    await until(lambda: listening.reports[uid].answered_at != answered)
    assert sidecar.asked.count(0.0) == 2


async def test_sidecar_without_snapshots_is_given_the_size_of_the_others(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    """So that memory for one is there before it is to restore."""
    uid, memory = sidecar.report.pod_uid, dataclasses.replace(sidecar.report.memory, snapshot=0)
    sidecar.tell(memory=memory)
    listening.follow({uid: HOST})
    await until(lambda: len(sidecar.asked) == 2)
    sidecar.tell(memory=dataclasses.replace(memory, snapshot=7000))
    await until(lambda: len(sidecar.asked) == 3)
    assert sidecar.expects == ["", "", ""], "it has told it itself"
    sidecar.tell(memory=memory)
    await until(lambda: len(sidecar.asked) == 4)
    assert sidecar.expects[-1] == "7000"


HELD = (Holding(0, Version(5, 1), Tier.LOCAL, 1),)


async def told_once(sidecar: ServedSidecar, listening: JobSidecars, held: int) -> float:
    """When it told what it holds, under that number; the next poll is under way, and waits for news."""
    uid = sidecar.report.pod_uid
    sidecar.tell(holdings=HELD, held=held)
    listening.follow({uid: HOST})
    await until(lambda: len(sidecar.asked) == 2)
    told = listening.reports[uid].holdings_at
    assert told is not None
    return told


async def test_what_is_held_is_asked_for_only_while_it_is_wanted(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = sidecar.report.pod_uid
    sidecar.tell(holdings=HELD)
    listening.want_holdings(False)
    await follow(sidecar, listening, polls=True)
    assert sidecar.bare == [True, True]
    sidecar.tell(attempt=8)
    await until(lambda: listening.reports[uid].report == bare(sidecar.report))
    assert listening.reports[uid].holdings_at is None
    listening.want_holdings(True)
    await until(lambda: listening.reports[uid].holdings_at)
    assert listening.reports[uid].report == sidecar.report
    listening.want_holdings(False)
    assert listening.reports[uid].report == bare(sidecar.report), "and is kept only so long"


async def test_what_was_held_is_as_new_as_the_last_answer_that_names_it(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    """While a job recovers each worker has news again and again, and what it holds is most of a report."""
    uid, told = sidecar.report.pod_uid, await told_once(sidecar, listening, held=3)
    name = f"{sidecar.report.instance}.3"
    assert sidecar.knows == [""], "of the first question; the second waits"
    sidecar.tell(attempt=8, held=3)
    await until(lambda: len(sidecar.asked) == 3)
    assert sidecar.knows == ["", name]
    known = listening.reports[uid]
    assert known.report == dataclasses.replace(sidecar.report, has_holdings=False)
    assert known.holdings_at == known.answered_at
    assert known.answered_at is not None
    assert known.answered_at > told
    more = (*HELD, Holding(0, Version(6, 1), Tier.LOCAL, 1))
    sidecar.tell(holdings=more, held=4)
    await until(lambda: len(sidecar.asked) == 4)
    assert heard(listening, uid) == sidecar.report, "others are told"


async def test_what_was_held_grows_old_when_an_answer_that_leaves_it_out_names_another(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid, told = sidecar.report.pod_uid, await told_once(sidecar, listening, held=3)
    sidecar.changed = asyncio.Event()  # the poll under way goes on waiting: its answer would tell
    directive = a_directive()
    sidecar.model.accept(directive)
    more = dataclasses.replace(sidecar.model.report(), holdings=(), held=4)
    with patch.object(sidecar.model, "report", lambda: more):
        await listening.push(uid, directive)
    known = listening.reports[uid]
    assert known.report is not None
    assert (known.report.holdings, known.report.held, known.holdings_at) == (HELD, 3, told)
    assert known.answered_at is not None
    assert known.answered_at > told
    listening.probe(uid)
    await until(lambda: heard(listening, uid) == sidecar.report)
    assert f"{more.instance}.3" in sidecar.knows


async def test_what_is_held_is_not_kept_of_a_poll_that_asked_for_it_in_time(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening, polls=True)
    listening.want_holdings(False)
    sidecar.tell(holdings=HELD, attempt=8088)
    await until(lambda: listening.reports[uid].report == bare(sidecar.report))
    await until(lambda: sidecar.bare[-1])
    told = [each for each in gc.get_objects() if isinstance(each, Report) and each.attempt == 8088]
    assert [each for each in told if each.holdings] == [sidecar.report], "nor by who waits for the next one"


async def test_answer_that_a_later_one_has_overtaken_changes_nothing(listening: JobSidecars) -> None:
    report = some_report()
    listening.follow({report.pod_uid: HOST})
    followed = listening._followed[report.pod_uid]
    listening._record_report(followed, report)
    listening._record_report(
        followed, dataclasses.replace(report, serial=report.serial - 1, revision="older")
    )
    assert heard(listening, report.pod_uid) == report
    restarted = dataclasses.replace(report, serial=1, instance="another")
    listening._record_report(followed, restarted)
    assert heard(listening, report.pod_uid) == restarted


async def test_polls_of_many_workers_are_longer_and_rest_between_two_answers() -> None:
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None, poll_seconds=5.0)
    paces = []
    for workers in (4, 64, 2000, 4000):
        client._followed = {f"{n}": FollowedSidecar(f"{n}", HOST, "") for n in range(workers)}
        paces.append(client._pace())
    client._followed = {}
    await client.close()
    assert paces == [(5.0, 0.05), (5.0, 0.05), (5.0, 0.5), (10.0, 1.0)]


def test_table_that_many_directives_share_is_written_once_and_read_by_everybody() -> None:
    table = SourceTable((), (), (Source(Tier.REMOTE),), ((9, 0),))
    restore = Restore(Version(5, 1), table, world_size=9)
    ordinary, first = a_directive(), dataclasses.replace(a_directive(), restore=restore)
    second = dataclasses.replace(first, worker=1)
    other = dataclasses.replace(
        first, restore=dataclasses.replace(restore, table=SourceTable((), (), (), ()))
    )
    encoder = DirectiveEncoder()
    for directive in (first, second, ordinary, other, first):
        assert from_json(b"".join(encoder.encode(directive)), Directive) == directive


async def test_table_of_thousands_of_sources_leaves_no_room_behind_and_arrives_whole(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening)
    hosts = tuple(f"10.{worker // 250}.{worker % 250}.1" for worker in range(9000))
    table = SourceTable(tuple(range(9000)), hosts, (), ((8, 8999),))
    told = dataclasses.replace(a_directive(), restore=Restore(Version(5, 1), table, 8))
    sent: list[int] = []

    def note(parts: Iterable[bytes]) -> AsyncIterator[memoryview]:
        async def pieces() -> AsyncIterator[memoryview]:
            async for piece in in_pieces(parts):
                sent.append(len(piece))
                yield piece

        return pieces()

    with patch("tiercheck_operator.sidecars.in_pieces", note):
        await listening.push(uid, told)
    assert sidecar.directives == [told]
    assert max(sent) <= 32 * 1024, "TLS keeps room for as much as it was given at once"


async def test_equal_parts_of_what_is_held_are_one_object() -> None:
    held = tuple(
        Holding(rank, Version(step, 1), Tier.LOCAL, 2**40) for rank in (1000, 1001) for step in (5, 6)
    )
    report = dataclasses.replace(some_report(), holdings=held)
    found = read_report(to_json(report))
    assert found == report
    assert len({id(each.version) for each in found.holdings}) == 2
    assert len({id(each.bytes) for each in found.holdings}) == 1


async def test_of_thousands_of_workers_some_second_connections_are_kept(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    for most, closed in ((1, False), (0, True)):
        listening.follow({})
        with patch("tiercheck_operator.sidecars._MOST_KEPT", most):
            uid = await follow(sidecar, listening)
        await listening.push(uid, a_directive(attempt=2))
        assert (sidecar.connection.lower() == "close") is closed


async def test_second_connections_of_all_jobs_together_are_bounded(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    other = JobSidecars("other-uid", CREDENTIALS, lambda: None, lines=listening._lines)
    with patch("tiercheck_operator.sidecars._MOST_KEPT", 1):
        other.follow({"other-pod": "127.0.0.2"})
        uid = await follow(sidecar, listening)
        await listening.push(uid, a_directive(attempt=2))
        assert sidecar.connection.lower() == "close"
        await other.close()
        listening.follow({})
        await follow(sidecar, listening)
        await listening.push(uid, a_directive(attempt=2))
        assert sidecar.connection.lower() != "close"


async def test_no_second_connection_is_kept_in_a_first_attempt(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening)
    await listening.push(uid, a_directive(attempt=1))
    assert sidecar.connection.lower() == "close"


@pytest.mark.parametrize("authority", [CREDENTIALS.ca, issue("job-uid").ca])
async def test_certificate_of_another_job_is_not_believed_and_nothing_is_sent_to_who_shows_it(
    authority: bytes, sidecar: ServedSidecar
) -> None:
    uid = sidecar.report.pod_uid
    other = dataclasses.replace(CREDENTIALS, ca=authority, certificate=issue("job-uid").certificate)
    client = JobSidecars("job-uid", other, lambda: None)
    try:
        client.follow({uid: HOST})
        await until(lambda: client.reports[uid].silent_since)
        assert heard(client, uid) is None
        with pytest.raises(SidecarError, match="Fingerprint"):
            await client.push(uid, a_directive())
        assert not sidecar.asked
        assert not sidecar.connection
    finally:
        await client.close()


async def test_calls_of_all_jobs_begin_a_few_at_a_time_and_who_does_not_answer_gives_way() -> None:
    began: list[int] = []
    lines, never = Lines(), asyncio.Event()

    async def call(number: int) -> None:
        async with lines.take_turn():
            began.append(number)
            await never.wait()

    with patch("tiercheck_operator.sidecars._TURN", 60.0):
        calls = [asyncio.create_task(call(number)) for number in range(2 * sidecars._BEGUN)]
        await until(lambda: len(began) == sidecars._BEGUN)
        calls[0].cancel()
        await until(lambda: len(began) == sidecars._BEGUN + 1)
    with patch("tiercheck_operator.sidecars._TURN", 0.01):
        calls[1].cancel()
        await until(lambda: len(began) == sidecars._BEGUN + 2)
        calls += [asyncio.create_task(call(number)) for number in range(2)]
        calls[2].cancel()
        await until(lambda: len(began) >= sidecars._BEGUN + 3)
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    assert lines._free._value == sidecars._BEGUN, "each turn is given back once"


def bare(report: Report) -> Report:
    return dataclasses.replace(report, holdings=(), has_holdings=False)


def first_push() -> tuple[World, Push]:
    world = World()
    world.tick_until(lambda: any(isinstance(action, Push) for action in world.last.after))
    return world, next(action for action in world.last.after if isinstance(action, Push))


def a_directive(attempt: int = 1) -> Directive:
    return dataclasses.replace(first_push()[1].directive, attempt=attempt)


async def test_directive_reaches_the_sidecar_as_it_was_written(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    world, push = first_push()
    model = world.make_sidecar(push.pod_uid, push.directive.worker)
    model.instance = push.directive.instance
    sidecar.become(model)
    listening.follow({push.pod_uid: HOST})
    await listening.push(push.pod_uid, push.directive)
    assert sidecar.directives == [push.directive]
    report = heard(listening, push.pod_uid)
    assert report is not None
    assert (report.revision, report.phase) == (push.directive.revision, push.directive.phase)


async def test_sidecar_that_stops_answering_is_silent_from_then_on(
    tmp_path: Path, listening: JobSidecars
) -> None:
    served = ServedSidecar()
    runner = await serve(served, CREDENTIALS, tmp_path)
    uid = await follow(served, listening)
    await runner.cleanup()
    await until(lambda: listening.reports[uid].silent_since)
    known = listening.reports[uid]
    assert known.report == served.report, "what it said last is not forgotten"
    assert known.answered_at is not None
    runner = await serve(served, CREDENTIALS, tmp_path)
    await until(lambda: listening.reports[uid].silent_since is None)
    await runner.cleanup()


def drops(connection: socket.socket) -> None:
    """As a policy that lets nothing through, once it is there."""


def resets(connection: socket.socket) -> None:
    """As a mesh in STRICT mode."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def speaks_plainly(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


FAILURES = {"refused": None, "reset": resets, "broken by TLS": speaks_plainly, "timed out": drops}


@pytest.mark.parametrize("failure", FAILURES)
async def test_what_becomes_of_calls_that_fail_is_known(failure: str) -> None:
    meddle, held = FAILURES[failure], list[socket.socket]()
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None, call_seconds=0.5)
    with socket.create_server((HOST, names.CONTROL_PORT)) as listener:
        if meddle is None:
            listener.close()
        else:

            def serve_all() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        held.append(listener.accept()[0])
                        meddle(held[-1])

            threading.Thread(target=serve_all, daemon=True).start()
        client.follow({"pod": HOST})
        await until(lambda: client.reports["pod"].failure)
        assert client.reports["pod"].failure == failure
        await client.close()
        if meddle is not None:
            listener.shutdown(socket.SHUT_RDWR)


async def refuse(_: web.Request) -> web.Response:
    return web.Response(status=503)


async def test_sidecar_that_answers_as_another_proxy_would_is_named_so(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    sidecar.answer = refuse
    listening.follow({"pod": HOST})
    await until(lambda: listening.reports["pod"].failure)
    assert listening.reports["pod"].failure == "answered with 503"


async def test_long_poll_ends_once_a_call_beside_it_has_shown_that_it_waits_in_vain(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid = await follow(sidecar, listening, polls=True)
    sidecar.answer = refuse
    listening.probe(uid)
    await until(lambda: listening.reports[uid].silent_since)
    sidecar.answer = None
    await until(lambda: listening.reports[uid].silent_since is None)


def bound(port: int) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((HOST, port))
    return found


@pytest.mark.parametrize("first_port", [None, 12470], ids=["usual ports", "ports of its own"])
async def test_host_that_refuses_is_told_from_one_that_takes_connections_and_from_silence(
    monkeypatch: pytest.MonkeyPatch, first_port: int | None
) -> None:
    port = first_port or names.CONTROL_PORT
    monkeypatch.setattr(sidecars, "_KNOCK", 0.2)
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None, call_seconds=0.2)
    with bound(port) as listener, contextlib.ExitStack() as callers:
        client.follow({"pod": join_address(HOST, first_port)})
        await until(lambda: client.reports["pod"].host is HostProbe.REFUSED)
        listener.listen(_QUEUE)  # the kernel accepts, and nobody answers
        await until(lambda: client.reports["pod"].host is HostProbe.ACCEPTED)
        # Its queue is full then: the kernel drops what asks, as if the host were gone.
        for _ in range(2 * _QUEUE):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((HOST, port))
        await until(lambda: client.reports["pod"].host is HostProbe.NOTHING)
        await client.close()


async def test_silence_counts_from_the_call_in_vain_and_the_host_was_looked_at_before_it_is_told() -> None:
    told: list[tuple[float, HostProbe]] = []

    def look() -> None:
        known = client.reports.get("pod")
        if known is not None and known.silent_since is not None:
            told.append((known.silent_since, known.host))

    client = JobSidecars("job-uid", CREDENTIALS, look, call_seconds=0.5)
    with bound(names.CONTROL_PORT) as listener:
        listener.listen(_QUEUE)  # the kernel accepts, and nobody answers
        began = time.time()
        client.follow({"pod": HOST})
        await until(lambda: told)
        since, host = told[0]
        assert host is HostProbe.ACCEPTED, "else a busy sidecar would be taken for a dead host for a moment"
        assert since - began < 0.5 <= time.time() - began, "it was due at once, and had half a second for it"
        await client.close()


async def test_host_is_tried_while_its_sidecars_answer_is_late(
    sidecar: ServedSidecar, listening: JobSidecars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pod is given up by is known when its time is over, not a second later."""
    monkeypatch.setattr(sidecars, "_AT_ONCE", 1.5)
    uid, never, order = await follow(sidecar, listening), asyncio.Event(), list[str]()
    request = listening._request

    async def no_answer(_: web.Request) -> web.StreamResponse:
        await never.wait()
        raise AssertionError

    async def asking(*positional: object, **named: object) -> Report:
        try:
            return await request(*positional, **named)  # type: ignore[arg-type]
        finally:
            order.append("asked")

    async def knock(_: str) -> HostProbe:
        order.append("tried")
        return HostProbe.NOTHING

    monkeypatch.setattr(listening, "_request", asking)
    monkeypatch.setattr(sidecars, "_knock", knock)
    sidecar.answer = no_answer
    listening.probe(uid)
    await until(lambda: listening.reports[uid].silent_since)
    assert order[:2] == ["tried", "asked"]
    never.set()


async def test_silence_counts_from_the_question_that_somebody_wanted_asked(
    sidecar: ServedSidecar, listening: JobSidecars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer heard nothing from there, say: who is asked then, and does not answer, is silent since."""
    monkeypatch.setattr(sidecars, "_AT_ONCE", 0.5)
    uid, never = await follow(sidecar, listening), asyncio.Event()

    async def no_answer(_: web.Request) -> web.StreamResponse:
        await never.wait()
        raise AssertionError

    sidecar.answer, asked = no_answer, time.time()
    listening.probe(uid)
    await until(lambda: listening.reports[uid].silent_since)
    since = listening.reports[uid].silent_since
    assert since is not None
    assert since - asked < 0.5 <= time.time() - asked
    never.set()


async def test_step_of_a_trainer_is_heard_but_not_what_a_restarted_sidecar_learns_of_old_ones(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    uid, attempt = await follow(sidecar, listening), sidecar.report.attempt

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
    served = ServedSidecar()
    runner = await serve(served, issue("job-uid"), tmp_path)
    uid = served.report.pod_uid
    listening.follow({uid: HOST})
    await until(lambda: listening.reports[uid].silent_since)
    assert heard(listening, uid) is None
    assert served.asked == []
    await runner.cleanup()


async def test_another_pod_at_the_same_address_is_not_taken_for_ours(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    listening.follow({"older-pod": HOST})
    await until(lambda: listening.reports["older-pod"].silent_since)
    assert heard(listening, "older-pod") is None


async def test_pod_that_is_not_followed_cannot_be_told_anything(listening: JobSidecars) -> None:
    with pytest.raises(SidecarError):
        await listening.push("nobody", a_directive())


@pytest.mark.parametrize("between", TURNS)
async def test_listening_ends_when_it_is_told_to_even_if_somebody_probes_at_the_same_moment(
    between: int,
) -> None:
    client = JobSidecars("job-uid", CREDENTIALS, lambda: None)
    client.follow({"pod": HOST})
    await until_turn(lambda: client.reports["pod"].silent_since is not None)  # nobody answers
    client.probe("pod")
    await turns(between)
    await ends(client.close())


async def test_times_of_a_sidecar_whose_clock_is_wrong_are_told_by_ours(
    sidecar: ServedSidecar, listening: JobSidecars
) -> None:
    ahead = 3600.0
    sidecar.headers["Date"] = email.utils.formatdate(time.time() + ahead, usegmt=True)
    ended = time.time() - 5
    trainer = dataclasses.replace(sidecar.report.trainer, ended_at=ended + ahead)
    sidecar.tell(trainer=trainer)
    uid = await follow(sidecar, listening)
    report = heard(listening, uid)
    assert report is not None
    assert report.trainer.ended_at == pytest.approx(ended, abs=30.0)
