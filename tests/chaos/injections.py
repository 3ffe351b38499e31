"""Lists what may strike: failpoints of real processes, and faults of nodes, networks and the store.

Pure: what a seed draws is known before anything runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_HARM = {"kill": 4, "exception": 2, "enospc": 2, "emfile": 1, "eio": 2, "stop": 1, "delay": 1}
"""Actions, and how often each comes where all are possible."""


@dataclass(frozen=True)
class Point:
    """One failpoint in the product."""

    role: str
    """Whose processes pass it: sidecar, trainer, launcher, operator."""
    provoke: str = ""
    """The fault that makes them pass it, of those in `FAULTS`; empty: they do while training goes well."""
    actions: tuple[str, ...] = tuple(_HARM)


POINTS = {
    "mid-copy": Point("trainer"),
    "before-state-word": Point("trainer"),
    "after-state-word": Point("trainer"),
    "mid-seal": Point("sidecar"),
    "after-seal": Point("sidecar"),
    "before-push": Point("sidecar"),
    "mid-chunk": Point("sidecar"),
    "before-ack": Point("sidecar"),
    "after-ack": Point("sidecar"),
    "before-reclaim": Point("sidecar"),
    "mid-reclaim": Point("sidecar"),
    "before-manifest": Point("sidecar"),
    "after-manifest": Point("sidecar"),
    "before-inventory": Point("sidecar", "sidecar"),
    "before-restore-load": Point("sidecar", "crash"),
    "after-restore": Point("sidecar", "crash"),
    "before-release": Point("sidecar", "crash"),
    "before-idle": Point("launcher", "crash"),
    "after-spawn": Point("launcher", "crash"),
    "before-status-write": Point("operator"),
    "after-status-write": Point("operator"),
    "after-lease": Point("operator"),
    "after-release": Point("operator", "crash"),
    "after-pod-create": Point("operator", "evict"),
    "before-pod-delete": Point("operator", "node"),
}
"""By name: all that there are (`test_every_failpoint_of_the_product_is_known_to_the_campaign`)."""

FIRST_WORKER_ONLY = ("before-manifest", "after-manifest")
"""Passed by the coordinator alone."""


@dataclass(frozen=True)
class Fault:
    """Something that is done to the cluster from outside."""

    weight: int
    ends: bool
    """Training may be ended by it."""
    seconds: float = 0.0
    """How long it lasts, if it does not end by itself."""
    costs_copies: bool = False
    """More than one node's memory may be gone: what was complete in memory only may be lost."""


FAULTS = {
    "crash": Fault(3, ends=True),
    "out of memory": Fault(1, ends=True),
    "container": Fault(1, ends=True),
    "evict": Fault(2, ends=True),
    "delete": Fault(1, ends=True),
    "node": Fault(3, ends=True),
    "rack": Fault(1, ends=True, costs_copies=True),
    "every pod": Fault(1, ends=True, costs_copies=True),
    "cut": Fault(2, ends=False, seconds=20.0),
    "sidecar": Fault(2, ends=False),
    "all sidecars": Fault(1, ends=False),
    "kubelet": Fault(2, ends=False, seconds=10.0),
    "deaf": Fault(2, ends=False, seconds=15.0),
    "operator": Fault(2, ends=False),
    "operator stopped": Fault(1, ends=False, seconds=20.0),
    "store down": Fault(1, ends=False, seconds=10.0),
    "store trouble": Fault(1, ends=False, seconds=15.0),
    "store slow": Fault(1, ends=False, seconds=15.0),
}
"""By name, as `LaptopStage.inflict` has them, or the store."""

_SHARE_OF_POINTS = 0.65


@dataclass(frozen=True)
class Injection:
    number: int
    name: str
    """Of a point or of a fault."""
    action: str
    """Empty: it is a fault, which has one."""
    worker: int
    skip: int
    """Passings of the point that are let through before."""

    @property
    def point(self) -> Point | None:
        return POINTS.get(self.name)

    @property
    def fault(self) -> Fault | None:
        """What is done from outside: it, or what provokes its point."""
        point = self.point
        if point is None:
            return FAULTS[self.name]
        return FAULTS[point.provoke] if point.provoke else None

    @property
    def ends(self) -> bool:
        """Whether training may be ended by it. By an error of ours never, unless it does not train at that
        moment."""
        if self.fault is not None and self.fault.ends:
            return True
        return self.point is not None and self.point.role == "trainer" and self.action in ("kill", "stop")

    @property
    def costs_copies(self) -> bool:
        return self.fault is not None and self.fault.costs_copies

    def __str__(self) -> str:
        where = f" of worker {self.worker}" if self.point is None or self.point.role != "operator" else ""
        return f"{self.name}{' ' + self.action if self.action else ''}{where}"


def drawn(number: int, rng: random.Random, workers: int, *, only: str = "") -> Injection:
    """The next injection. `only`: the one with this name."""
    points = rng.random() < _SHARE_OF_POINTS
    if only:
        points = only in POINTS
    name = only or (
        rng.choice(list(POINTS)) if points else _weighted(rng, {k: f.weight for k, f in FAULTS.items()})
    )
    action = _weighted(rng, {each: _HARM[each] for each in POINTS[name].actions}) if points else ""
    worker = 0 if name in FIRST_WORKER_ONLY else rng.randrange(workers)
    often = points and not POINTS[name].provoke and name not in FIRST_WORKER_ONLY
    return Injection(number, name, action, worker, rng.randrange(4) if often else 0)


def _weighted(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
