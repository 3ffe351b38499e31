"""Whose pod is to be given up before Kubernetes knows: one rule over what the controller and the pods hear of each other.

Acting early is safe because the attempt fences whoever is left behind; acting wrongly only costs a restart. So the rule asks for
two independent observers where seconds count, and for none where nothing else can explain what is seen:

1. A pod that does not answer the controller is given up after `accused` seconds if a pod that does answer hears nothing from its
   host either; after `suspect` if its host answers peers but its sidecar does not (it is being started again), or if training broke
   elsewhere; after `silent` in any case. If no pod answers at all, it is the controller that is cut off, and nobody is given up.
   If more than half are silent, only `silent` counts: so much memory is not thrown away for a switch that is being restarted.
2. Pods that answer the controller are given up only if one node explains every broken connection among those who answer, its
   connections to at least two other nodes are broken, one of these says so itself, most pods are elsewhere, and all that has lasted
   for `isolated` seconds. So no confused peer moves anybody, itself or others, and of a network that fell apart at most one side is
   given up: the one that cannot be heard, or one node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Accusation:
    """A pod says that it cannot reach another one."""

    pod: str
    seconds: float
    """Since the accused last answered."""
    host_silent: bool
    """Nothing comes back at all; otherwise the host answers and the sidecar does not."""


@dataclass(frozen=True)
class Witness:
    """One running pod of the job, as the controller sees it."""

    pod: str
    node: str
    silent: float | None = None
    """Seconds for which it has not answered the controller; None: it answers."""
    failed: bool = False
    """Its training command failed in this attempt."""
    accuses: tuple[Accusation, ...] = ()
    """Its last word; counts only while it answers."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    accused: float = 2.0
    suspect: float = 10.0
    silent: float = 60.0
    isolated: float = 30.0


@dataclass(frozen=True)
class Suspicion:
    """Why a pod is given up."""

    seconds: float
    """For how long it has been so."""
    accusers: tuple[str, ...] = ()
    """Pods that cannot reach it."""
    host_silent: bool = False
    """Its host seems to be down or cut off, not only its sidecar."""
    answers: bool = False
    """It answers the controller, but its peers cannot reach it."""


def suspected(witnesses: Sequence[Witness], limits: Limits) -> dict[str, Suspicion]:
    """The pods to give up. Never all of them."""
    answering = [witness for witness in witnesses if witness.silent is None]
    if not answering:
        return {}
    found = {}
    broken = any(witness.failed for witness in answering)
    most = 2 * len(answering) < len(witnesses)
    for witness in witnesses:
        if witness.silent is None:
            continue
        named = {
            other.pod: accusation
            for other in answering
            for accusation in other.accuses
            if accusation.pod == witness.pod
        }
        host_silent = any(accusation.host_silent for accusation in named.values())
        if most:
            limit = limits.silent
        elif host_silent:
            limit = limits.accused
        else:
            limit = limits.suspect if named or broken else limits.silent
        if witness.silent > limit:
            found[witness.pod] = Suspicion(witness.silent, tuple(sorted(named)), host_silent)
    return {**found, **_isolated(answering, witnesses, limits)}


def _isolated(answering: Sequence[Witness], witnesses: Collection[Witness], limits: Limits) -> dict[str, Suspicion]:
    """The answering pods of the one node that no other node can reach."""
    node_of = {witness.pod: witness.node for witness in answering}
    links = [
        (frozenset((witness.node, node_of[accusation.pod])), witness, accusation)
        for witness in answering
        for accusation in witness.accuses
        if accusation.pod in node_of and node_of[accusation.pod] != witness.node
    ]
    explaining = frozenset.intersection(*(ends for ends, _, _ in links)) if links else frozenset()
    for node in sorted(explaining):
        lasting = [link for link in links if link[2].seconds > limits.isolated]
        others = frozenset[str]().union(*(ends for ends, _, _ in lasting)) - {node}
        accusers = tuple(sorted({witness.pod for _, witness, _ in lasting if witness.node != node}))
        inside = {pod for pod, home in node_of.items() if home == node}
        if len(others) < 2 or not accusers or 2 * len(inside) >= len(witnesses):
            continue
        seconds = min(accusation.seconds for _, _, accusation in lasting)
        return {pod: Suspicion(seconds, accusers, host_silent=True, answers=True) for pod in inside}
    return {}
