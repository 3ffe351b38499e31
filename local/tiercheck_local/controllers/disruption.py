"""Keeps the status of PodDisruptionBudgets, without which the API server refuses evictions."""

from __future__ import annotations

from tiercheck_cli.api_server import DISRUPTION_BUDGETS, Object
from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_local.client import Cache, Client, WokenController, attempt
from tiercheck_local.controllers.scheduler import is_finished, ready_status


class Disruption(WokenController):
    """To be woken after every change of a pod or a budget. minAvailable as a number only."""

    def __init__(self, client: Client, pods: Cache, budgets: Cache) -> None:
        super().__init__(client, [pods, budgets])
        self._pods, self._budgets = pods, budgets

    async def work(self) -> None:
        for budget in list(self._budgets.objects.values()):
            await attempt(f"budget {budget['metadata']['name']}", self._update(budget))

    async def _update(self, budget: Object) -> None:
        wanted = budget_status(budget, list(self._pods.objects.values()))
        known = budget.get("status") or {}
        counts = isinstance((budget.get("spec") or {}).get("minAvailable"), int)
        if counts and any(known.get(key) != value for key, value in wanted.items()):
            await self._client.patch_as_read(
                DISRUPTION_BUDGETS, budget, {"status": wanted}, subresource="status"
            )


def budget_status(budget: Object, pods: list[Object]) -> Object:
    """What the disruption controller would write: evictions are allowed while enough Ready pods are left."""
    metadata, spec = budget["metadata"], budget.get("spec") or {}
    covered = [
        pod
        for pod in pods
        if pod["metadata"].get("namespace") == metadata["namespace"]
        and matches_selector(spec.get("selector") or {}, pod["metadata"].get("labels") or {})
        and not is_finished(pod)
    ]
    healthy = sum(
        ready_status(pod) == "True" and not pod["metadata"].get("deletionTimestamp") for pod in covered
    )
    desired = spec.get("minAvailable") or 0
    return {
        "observedGeneration": metadata.get("generation", 0),
        "expectedPods": len(covered),
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": max(0, healthy - desired),
    }
