"""Answers what would happen if something died now, as the operator would decide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol.directive import Tier
from tiercheck_cli.events.recoveries import PastRecovery
from tiercheck_cli.explain.estimate import AssumedFailure, Estimate, estimate
from tiercheck_cli.explain.losses import LostMemory
from tiercheck_cli.explain.what_if import Consequence, what_if
from tiercheck_cli.layout import JobLayout, policy_of
from tiercheck_cli.simulate.assumptions import PEER_BANDWIDTH, REMOTE_BANDWIDTH
from tiercheck_cli.simulate.scenario import Held, RecoveryTimes, Saving, Scenario

_BANDWIDTH = {Tier.PEER: PEER_BANDWIDTH, Tier.REMOTE: REMOTE_BANDWIDTH}
"""Bytes per second and worker."""
_NO_DELTAS_EVERY, _DELTAS_EVERY = 50, 10
"""Steps between snapshots where neither the spec nor the status says."""


@dataclass(frozen=True)
class WhatIf:
    """To one question."""

    loss: LostMemory
    consequence: Consequence
    step: int | None
    """The newest step trained; None: the job is only a plan, taken in the midst of its life."""
    lost_seconds: float | None
    """Training that has to be done again; None: not known."""
    without_training: Estimate
    from_whom: Mapping[int, tuple[int, ...]]
    """By worker that needs a peer: who would be left to give it its state."""


def scenario_of(layout: JobLayout, job: Mapping[str, Any] | None) -> tuple[Scenario, int | None]:
    """(the job as it is now, its newest step). A job that does not run is taken in the midst of its life:
    None."""
    status = (job or {}).get("status") or {}
    step = (status.get("progress") or {}).get("step")
    spec = layout.spec
    checkpoint = status.get("checkpoint") or {}
    deltas = checkpoint.get("deltas") == "EveryStep" if checkpoint.get("deltas") else spec.deltas
    every = (
        checkpoint.get("snapshotEverySteps")
        or spec.snapshot_every
        or (_DELTAS_EVERY if deltas else _NO_DELTAS_EVERY)
    )
    if step is None:
        saving = Saving(every, deltas, remote_every=spec.remote_every)
    else:
        held = {
            name: int((status.get("tiers") or {}).get(name, {}).get("step") or 0)
            for name in ("local", "peer", "remote")
        }
        saving = Held(
            every, deltas, remote_every=spec.remote_every,
            local_step=held["local"], peer_step=held["peer"], remote_step=held["remote"],
        )  # fmt: skip
    pace = (status.get("progress") or {}).get("stepSeconds")
    scenario = Scenario(
        sites=layout.sites,
        topology=layout.topology,
        policy=policy_of(spec),
        procs_per_worker=spec.procs_per_worker,
        spares=spec.spares,
        step_seconds=float(pace or 1.0),
        saving=saving,
        times=RecoveryTimes(),
        existing=layout.placement,
    )
    return scenario, None if step is None else int(step)


def answer(
    loss: LostMemory,
    layout: JobLayout,
    scenario: Scenario,
    *,
    step: int | None,
    past: tuple[PastRecovery, ...],
) -> WhatIf:
    """`step`: the newest one; None: the job is only a plan. `past`: the job's recoveries, newest first."""
    found = what_if(scenario, loss.workers, step)
    spare = 0 < len(loss.workers) <= scenario.spares
    size = (layout.spec.state_size or 0) * layout.spec.procs_per_worker
    carry = size / _BANDWIDTH[found.farthest] if found.farthest in _BANDWIDTH else 0.0
    return WhatIf(
        loss=loss,
        consequence=found,
        step=step,
        lost_seconds=None if step is None else found.lost_steps * scenario.step_seconds,
        without_training=estimate(past, AssumedFailure(found.farthest, bool(loss.workers), spare, carry)),
        from_whom={worker: _left(worker, loss, layout) for worker in found.workers.get(Tier.PEER, ())},
    )


def _left(worker: int, loss: LostMemory, layout: JobLayout) -> tuple[int, ...]:
    for group in layout.placement.groups:
        if worker in group.members:
            return tuple(other for other in group.workers if other != worker and other not in loss.workers)
    return tuple(holder for holder in layout.placement.holders[worker] if holder not in loss.workers)
