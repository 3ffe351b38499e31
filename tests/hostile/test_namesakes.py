"""Somebody else's ConfigMap under a placement's name is neither overwritten nor believed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tiercheck_operator.kubernetes.client import ApiFailure, Kube
from tiercheck_operator.kubernetes.owned_objects import Belongings
from tiercheck_operator.model.parsing import parse_job
from tiercheck_operator.model.saved_placement import SavedPlacement

JOB = parse_job(
    {
        "metadata": {"name": "j", "namespace": "default", "uid": "u"},
        "spec": {"workers": 1, "template": {"spec": {}}},
    }
)


class Server:
    """Has one ConfigMap."""

    def __init__(self, owners: list[dict[str, Any]]) -> None:
        self.found = {"metadata": {"name": "j-placement", "ownerReferences": owners}, "data": {"mine": "yes"}}
        self.replaced = 0

    async def create(self, path: str, body: dict[str, Any], **names: str) -> dict[str, Any]:
        raise ApiFailure(409, "exists")

    async def get(self, path: str, **names: str) -> dict[str, Any]:
        return self.found

    async def replace(self, path: str, body: dict[str, Any], **names: str) -> dict[str, Any]:
        self.replaced += 1
        return body


async def test_placement_of_somebody_else_is_left_as_it_is() -> None:
    server = Server([{"uid": "another"}])
    belongings = Belongings(cast(Kube, server))
    with pytest.raises(ApiFailure, match="j-placement is not this job's") as refused:
        await belongings.save_placement(JOB, SavedPlacement(1, ()))
    assert refused.value.refused, "said in the job's status"
    assert (server.replaced, belongings.placement) == (0, None)


async def test_placement_of_the_job_itself_is_written_anew() -> None:
    server = Server([{"uid": "u"}])
    await Belongings(cast(Kube, server)).save_placement(JOB, SavedPlacement(1, ()))
    assert server.replaced == 1
