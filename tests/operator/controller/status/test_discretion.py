"""No credential reaches status, Events and annotations, whoever said it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.operator.controller.test_job_loop import StandIn, new_job, surroundings
from tests.operator.kubernetes.test_event_series import JOB, Server
from tests.operator.world_in_memory import World
from tiercheck_local.controlplane.planes import write_kubeconfig
from tiercheck_operator.controller.reconciler import JobLoop
from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.events import EventPoster, ObjectEvents, without_credentials
from tiercheck_operator.kubernetes.object_reader import Access
from tiercheck_operator.model.actions import Notice
from tiercheck_operator.model.status import render_record


class Refusing(StandIn):
    """An admission plug-in that quotes the pod."""

    async def create(self, path: str, body: Mapping[str, Any], **names: str) -> dict[str, Any]:
        raise ApiFailure(403, SAID)


SECRET = "gh" + "p_" + "0f9a" * 9
SAID = f"the trainer of worker 1 ended with exit code 1: clone of https://bob:{SECRET}@git.example failed"


def test_no_text_of_a_status_holds_a_credential() -> None:
    status: dict[str, Any] = {
        "conditions": [{"type": "Protected", "status": "False", "reason": "RemoteOther", "message": SAID}],
        "recovery": {
            "cause": "ProcessFailed",
            "message": SAID,
            "reasons": [SAID],
            "detectedAt": "2026-01-01T00:00:00Z",
        },
        "recoveries": [{"message": SAID, "sources": [{"reason": SAID}]}],
        "checkpoint": {"deltas": "Off", "deltasReason": SAID},
        "placement": {"hash": "0f9a4c21", "unprotectedReason": SAID},
        "sidecarImage": "registry.example/sidecar@sha256:" + "0f9a4c21" * 8,
    }
    shown = without_credentials(status)
    assert SECRET not in str(shown)
    assert shown["conditions"][0]["message"].startswith(
        "the trainer of worker 1 ended with exit code 1: clone of https://"
    )
    assert shown["sidecarImage"] == status["sidecarImage"]
    assert without_credentials(shown) == shown, "else it would be written again at every look"
    assert SECRET in str(status), "what decisions go by is left as it is"


def test_text_full_of_credentials_is_no_longer_than_the_api_server_lets_it_be() -> None:
    shown = without_credentials({"message": "://a@" * 800})
    assert len(shown["message"]) <= 4000
    assert without_credentials(shown) == shown


def test_ordinary_status_is_written_as_it_is() -> None:
    world = World()
    world.until("Running")
    for fail in (lambda: world.crash(0), lambda: world.evict(world.member(1)), lambda: world.kill_node("n0")):
        fail()
        world.train(30)
        status = render_record(world.status)
        assert status["conditions"]
        assert without_credentials(status) == status


async def test_refusal_of_the_api_server_reaches_the_status_without_the_credential_in_it() -> None:
    kube = Refusing(new_job())
    loop = JobLoop(new_job(), surroundings(kube))
    for _ in range(2):  # the second look tells what became of the first
        with contextlib.suppress(ApiFailure):
            await loop._reconcile()
    assert kube.job is not None
    assert "clone of https://" in str(kube.job["status"])
    assert SECRET not in str(kube.job["status"])


async def test_token_that_no_header_can_hold_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9", "plainword\nmore")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    kube = Kube(Access())
    try:
        with pytest.raises(ApiFailure) as failure:
            await kube.get("/api/v1/namespaces/default/pods/p")
    finally:
        kube.close()
    assert "plainword" not in str(failure.value)
    assert failure.value.__suppress_context__, "a traceback would show what it came from"


async def test_no_event_holds_a_credential() -> None:
    server = Server()
    poster = EventPoster(server)  # type: ignore[arg-type]
    for again in range(3):
        await poster.post(JOB, [Notice("Warning", "TrainerFailed", SAID)], now=20.0 * again)
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "a", "name": "p", "uid": "u"}
    await ObjectEvents(server).warn(about, "NotAttached", SAID)  # type: ignore[arg-type]
    assert len(server.events) == 2
    assert SECRET not in str(server.events)


@pytest.mark.parametrize("length", [900, 1000, 1024, 1030])
async def test_credential_at_the_end_of_what_fits_an_event_is_not_shown_in_part(length: int) -> None:
    server = Server()
    message = "x " * (length // 2) + SECRET
    await EventPoster(server).post(JOB, [Notice("Warning", "Any", message)], now=0.0)  # type: ignore[arg-type]
    assert SECRET[:10] not in str(server.events)
