"""Whatever the bucket does, training goes on, and a condition says what is wrong."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.sidecar.remote.remote_places import S3Place
from tests.sidecar.remote.s3.faulty_proxy import BUSY, CUT, FORBIDDEN, FULL, Fault, Seen, proxying
from tests.sidecar.world import World, until
from tiercheck.protocol import names
from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote.s3 import s3_transfers


def metrics(world: World, worker: int) -> str:
    with urllib.request.urlopen(
        f"http://{world.host(worker)}:{names.METRICS_PORT}/metrics", timeout=10
    ) as answer:
        return answer.read().decode()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transfers, "_BACKOFF", (0.05, 0.5))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (FULL, "RemoteFull"),
        (FORBIDDEN, "RemoteForbidden"),
        (BUSY, "RemoteUnreachable"),
        (CUT, "RemoteUnreachable"),
        (None, ""),
    ],
    ids=["full", "forbidden", "overloaded", "cut off", "stalled"],
)
def test_training_and_its_copies_go_on_while_the_bucket_is_in_trouble(
    s3_endpoint: str, s3_client: Any, make_world: Callable[..., World], fault: Fault | None, problem: str
) -> None:
    recovered = threading.Event()

    def rule(seen: Seen) -> Fault | None:
        if seen.method != "PUT" or recovered.is_set() or not seen.key.endswith(".safetensors"):
            return None
        return fault or Fault(until=recovered)

    with proxying(s3_endpoint) as proxy:
        proxy.rule = rule
        world = make_world(workers=2)
        world.remote = S3Place(proxy.url, s3_client).settings()
        world.policy = replace(world.policy, remote_every=1)
        world.start()
        world.begin()
        try:
            with world.ranks() as ranks:
                for step in (1, 2, 3):
                    for rank in ranks:
                        until(lambda rank=rank, step=step: rank.save(step), f"a slot for step {step}")
                    until(
                        lambda step=step: world.report(0).watermarks.peer == Version(step, 1),
                        f"step {step} is copied",
                    )
                if problem:
                    until(lambda: problem in {each.reason for each in world.report(0).problems}, "it is said")
                    assert f'tiercheck_problem{{reason="{problem}"}} 1.0' in metrics(world, 0)
                    assert "tiercheck_remote_reachable 0.0" in metrics(world, 0)
                assert world.report(0).watermarks.remote is None
                recovered.set()
                until(lambda: world.report(0).watermarks.remote is not None, "it is made up for")
                until(lambda: not world.report(0).problems, "the problem is withdrawn")
                until(
                    lambda: "tiercheck_remote_versions 0.0" not in metrics(world, 0),
                    "its versions are counted",
                )
        finally:
            recovered.set()
