"""Promise: no answer of one team's sidecar takes the operator's memory or its listening."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

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
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Holding, Problem, Quarantined, RankRestore, RemoteReport
from tiercheck.protocol.version import Version
from tiercheck_operator import sidecars
from tiercheck_operator.model import conditions
from tiercheck_operator.sidecars import JobSidecars

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


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(b" " * MIB) for _ in range(size // MIB)), packer.flush()])


async def a_bomb(request: web.Request) -> web.StreamResponse:
    return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})


BOMB = bomb(96 * MIB)
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
def test_newest_reports_of_sixty_four_sidecars_stay_small_whatever_is_in_them(kind: str) -> None:
    client, text = JobSidecars("job-uid", CREDENTIALS, lambda: None), HEAVY[kind]()
    assert 200_000 < len(text) <= sidecars._MOST_BODY
    client._hosts = {f"{number}": f"{number}" for number in range(64)}
    tracemalloc.start()
    try:
        kept = [client._accept(host, text, 0.0) for host in client._hosts]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 64 * MIB
    finally:
        tracemalloc.stop()
    told = {problem.reason for report in kept for problem in report.problems}
    assert conditions.BAD_REPORT in told, "whose job it is sees why the rest is left out"
    assert kept[-1].trainer == some_report().trainer, "and training is still seen"
