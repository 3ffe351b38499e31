"""A job's series say what its status says, go when it goes, and are served to whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.operator.world_in_memory import World, make_spec
from tiercheck_local.markers import free_ports
from tiercheck_operator.controller.members.lost_nodes import find_silent_members
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_operator.metrics import Metrics, Pages
from tiercheck_operator.model.status import PlacementRecord, SparesRecord


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"namespace": "ns", "tiercheck_job": "j", **labels})


def test_what_a_recovery_cost_is_counted_once() -> None:
    world, metrics = World(make_spec(workers=4)), Metrics()
    world.running(7)
    before = world.job
    world.crash(1)
    attempt = world.status.attempt
    world.until("Running", attempt=attempt + 1)
    ended = world.summary
    metrics.status_written(before, world.status)
    metrics.status_written(world.job, world.status)
    assert value(metrics, "tiercheck_restores_total", cause="TrainerCrash") == 1
    assert value(metrics, "tiercheck_lost_steps_total") == ended["lostSteps"]
    assert value(metrics, "tiercheck_lost_seconds_total") == ended["lostSteps"] * (
        world.status.step_seconds or 0
    )
    assert value(metrics, "tiercheck_recovery_duration_seconds_count", phase="total") == 1


def test_placements_that_change_are_counted_and_the_first_one_is_no_change() -> None:
    world, metrics = World(), Metrics()
    placed = [PlacementRecord(name, "rack", (), 0) for name in ("a", "a", "b")]
    statuses = [replace(world.status, placement=placement) for placement in (None, *placed)]
    for old, new in itertools.pairwise(statuses):
        metrics.status_written(replace(world.job, status=old), new)
    ended = [replace(status, last_recovery={"cause": "x", "attempt": 1}) for status in statuses[:1]]
    metrics.status_written(world.job, ended[0])
    assert value(metrics, "tiercheck_placement_changes_total") == 1


def test_sidecars_that_do_not_answer_are_counted_until_they_do() -> None:
    world, metrics = World(), Metrics()
    world.until("Running")
    for killed in (False, True):
        if killed:
            world.kill_sidecar(world.member(1))
            world.poll()
        metrics.job_seen(world.job, len(find_silent_members(world.observe())))
        assert value(metrics, "tiercheck_sidecars_away") == killed


def test_no_series_of_a_job_outlives_it() -> None:
    world, metrics = World(), Metrics()
    world.until("Running")
    job = replace(world.job, status=replace(world.status, spares=SparesRecord(2, 1)))
    metrics.job_seen(job)
    assert value(metrics, "tiercheck_spares", state="ready") == 1
    assert b'tiercheck_job="j"' in metrics.text()
    metrics.job_gone("ns", "j")
    assert b'tiercheck_job="j"' not in metrics.text()


def test_first_recovery_is_an_increase_because_counters_begin_at_zero() -> None:
    world, metrics = World(), Metrics()
    metrics.job_seen(world.job)
    assert value(metrics, "tiercheck_restores_total", cause="TrainerCrash") == 0
    assert value(metrics, "tiercheck_lost_steps_total") == 0
    assert value(metrics, "tiercheck_restored_ranks_total", tier="peer") == 0


# The port on which they are served.


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ROOM = 8


@contextlib.asynccontextmanager
async def opened(patience: float) -> AsyncIterator[int]:
    (port,) = free_ports(1)
    served = Pages(lambda: b"m 1\n", lambda: "", lambda: True, patience)
    await served.start("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        await served.stop()


async def dial(port: int, first: bytes = b"", address: str = "127.0.0.9") -> Streams:
    streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    streams[1].write(first)
    return streams


async def ask(port: int, page: str) -> bytes:
    reader, writer = await dial(
        port, f"GET {page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(), "127.0.0.1"
    )
    with contextlib.closing(writer):
        return await reader.read()


async def test_each_page_answers() -> None:
    async with opened(60.0) as port:
        assert [(await ask(port, page)).split(b"\r\n\r\n")[1] for page in ("/metrics", "/healthz",
            "/readyz")] == [
            b"m 1\n", b"ok\n", b"ready\n",
        ]  # fmt: skip


async def test_pages_by_tls_show_a_renewed_certificate_at_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    served = Pages(lambda: b"m 1\n", lambda: "", lambda: True, 60.0, tls=str(tmp_path))
    await served.start("127.0.0.1", port)
    try:
        for _ in range(2):
            pair = issue_pair("metrics", ["127.0.0.1"], timedelta(days=1), datetime.now(UTC))
            (tmp_path / "tls.crt").write_bytes(pair.certificate)
            (tmp_path / "tls.key").write_bytes(pair.key)
            context = ssl.create_default_context(cadata=pair.ca.decode())
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).endswith(b"m 1\n")
                writer.close()
    finally:
        await served.stop()


@pytest.mark.parametrize("first", [b"", b"GET /healthz HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_no_connection_lasts(first: bytes) -> None:
    async with opened(0.2) as port:
        reader, writer = await dial(port, first)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.read()  # to its end, or the test runs out of time


@pytest.mark.parametrize("addresses", [1, 5, 3 * ROOM])
async def test_a_crowd_that_says_nothing_keeps_no_probe_out(
    monkeypatch: pytest.MonkeyPatch, addresses: int
) -> None:
    monkeypatch.setattr("tiercheck_operator.metrics._MOST", ROOM)
    async with opened(600.0) as port:
        crowd = [await dial(port, b"", f"127.0.0.{n % addresses + 9}") for n in range(3 * ROOM)]
        assert b" 200 " in await ask(port, "/healthz")
        gone = 0
        for reader, _ in crowd[: 2 * ROOM]:
            with contextlib.suppress(ConnectionError):
                gone += await reader.read() == b""
        assert gone
        for _, writer in crowd:
            writer.close()
