"""What the loop of one job costs the API server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from world_in_memory import TEMPLATE, World

from tiercheck_operator.config import Config
from tiercheck_operator.controller.loop import JobLoop, Surroundings
from tiercheck_operator.controller.observation import PodView
from tiercheck_operator.kube import Kube
from tiercheck_operator.metrics import Metrics


class CountingKube:
    """Has nothing, and says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get(self, path: str, **names: str) -> None:
        self.asked.append(path)


def finished_job() -> dict[str, Any]:
    return {
        "apiVersion": "tiercheck.io/v1alpha1",
        "kind": "TierCheckJob",
        "metadata": {"name": "j", "namespace": "default", "uid": "u", "resourceVersion": "1", "generation": 1},
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
    kube = CountingKube()
    world = World()
    world.until("Running")
    pod: PodView = replace(next(iter(world.pods.values())), phase=phase, job_uid="u")
    around = Surroundings(lambda uid: [pod], dict, cast(Kube, kube), Config(), Metrics())
    loop = JobLoop(finished_job(), around)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_observe", _stop)
        with pytest.raises(_Seen):
            await loop._reconcile()
    assert bool(kube.asked) is asks


class _Seen(Exception):
    pass


def _stop(_: object) -> Any:
    raise _Seen
