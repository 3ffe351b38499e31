"""Runs scheduler, node life-cycle, disruption budgets and garbage collection in one process.

`python -m tiercheck_local.controllers`
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from tiercheck_local import controlplane, markers
from tiercheck_local.client import Cache, Client
from tiercheck_local.controllers.manager import DEPENDENTS, Disruption, GarbageCollector, NodeLifecycle
from tiercheck_local.controllers.scheduler import Scheduler
from tiercheck_local.node.agent import LEASE_NAMESPACE
from tiercheck_operator.kubernetes.api_server import DISRUPTION_BUDGETS, LEASES, NODES, PODS, Object


async def serve(kubeconfig: Path, grace: float) -> bool:
    """Runs until it is stopped; returns whether that was because its parent process is gone."""
    async with Client.of(kubeconfig) as client:
        return await controlplane.run_until_stopped(_control(client, grace))


async def _control(client: Client, grace: float) -> None:
    async with asyncio.TaskGroup() as tasks:

        def changed(kind: str, item: Object) -> None:
            scheduler.wake()
            disruption.wake()
            if kind != "MODIFIED" or item["metadata"].get("deletionTimestamp"):
                garbage.wake()

        def synced() -> None:
            for controller in (scheduler, garbage, disruption):
                controller.wake()

        def dependent_changed(*_: object) -> None:
            garbage.wake()
            disruption.wake()

        def renewed(kind: str, _: Object) -> None:
            if kind != "MODIFIED":  # as nodes renew theirs all the time
                garbage.wake()

        pods = Cache(client, PODS, changed, on_sync=synced)
        nodes = Cache(client, NODES, changed, on_sync=synced)
        scheduler = Scheduler(client, pods, nodes)
        lifecycle = NodeLifecycle(client, nodes, pods, grace)
        leases = Cache(client, LEASES, lifecycle.lease_changed, namespace=LEASE_NAMESPACE)
        others = {
            kind: Cache(client, kind, renewed if kind == LEASES else dependent_changed, on_sync=synced)
            for kind in DEPENDENTS
            if kind != PODS
        }
        disruption = Disruption(client, pods, others[DISRUPTION_BUDGETS])
        garbage = GarbageCollector(client, tasks, {PODS: pods, **others}, nodes)
        for cache in (pods, nodes, leases, *others.values()):
            tasks.create_task(cache.run())
        for controller in (scheduler, lifecycle, disruption, garbage):
            tasks.create_task(controller.run())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local.controllers", description=__doc__)
    parser.add_argument("--kubeconfig", required=True, type=Path)
    parser.add_argument(
        "--grace", type=float, default=2.0, help="seconds without lease until a node is unreachable"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    orphaned = asyncio.run(serve(given.kubeconfig, given.grace))
    if orphaned and markers.CLUSTER in os.environ:
        markers.remove(os.environ[markers.CLUSTER])


if __name__ == "__main__":
    main()
