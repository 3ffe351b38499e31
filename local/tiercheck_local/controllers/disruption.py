"""Keeps the status of PodDisruptionBudgets, without which the API server refuses evictions."""

from __future__ import annotations

import asyncio
import logging

from tiercheck_cli.api_server import DISRUPTION_BUDGETS, Object, RequestFailed
from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_local.client import Cache, Client

log = logging.getLogger(__name__)


class Disruption:
    """`wake` after every change of a pod or a budget; `run` never ends. minAvailable as a number only."""

    def __init__(self, client: Client, pods: Cache, budgets: Cache) -> None:
        self._client, self._pods, self._budgets = client, pods, budgets
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not (self._pods.synced and self._budgets.synced):
                continue
            for budget in list(self._budgets.objects.values()):
                try:
                    await self._update(budget)
                except RequestFailed as failure:
                    if failure.code not in {404, 409}:  # deleted or changed meanwhile: the watch will tell
                        log.warning("budget %s: %s", budget["metadata"]["name"], failure)

    async def _update(self, budget: Object) -> None:
        metadata, spec = budget["metadata"], budget.get("spec") or {}
        wanted = budget_status(budget, list(self._pods.objects.values()))
        known = budget.get("status") or {}
        if isinstance(spec.get("minAvailable"), int) and any(
            known.get(key) != value for key, value in wanted.items()
        ):
            body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": wanted}
            await self._client.patch(
                DISRUPTION_BUDGETS, metadata["namespace"], metadata["name"], body, subresource="status"
            )


def budget_status(budget: Object, pods: list[Object]) -> Object:
    """What the disruption controller would write: an eviction is allowed as long as enough Ready pods are
    left."""
    metadata, spec = budget["metadata"], budget.get("spec") or {}
    covered = [
        pod
        for pod in pods
        if pod["metadata"].get("namespace") == metadata["namespace"]
        and matches_selector(spec.get("selector") or {}, pod["metadata"].get("labels") or {})
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    ]
    healthy = sum(_is_ready(pod) for pod in covered)
    desired = spec.get("minAvailable") or 0
    return {
        "observedGeneration": metadata.get("generation", 0),
        "expectedPods": len(covered),
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": max(0, healthy - desired),
    }


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")
