"""Decides whose pod is given up before Kubernetes knows, from what all hear of each other.

Acting early is safe because the attempt fences whoever is left behind; acting wrongly only costs a restart.
So the rule asks for two independent observers where seconds count, and for none where nothing else can
explain what is seen:

1. A pod that does not answer the controller is given up after `accused` seconds if a pod that does answer
   has heard nothing from its host for as long, and nothing comes back from there to the controller; after
   `suspect` if its host answers peers but its sidecar does not, or if training broke elsewhere; after
   `silent` in any case. If no pod answers at all, it is the controller that is cut off, and nobody is
   given up. If more than half are silent, only `silent` counts: so much memory is not thrown away for a
   switch that is being restarted. A silent host is not left before every other pod has answered once more
   after these seconds, or is silent as well, for at most `together` seconds more: what fails together,
   one a moment after the other, is left together, and no new pod goes to a node that is next.
2. Pods that answer the controller are given up only if one node explains every broken connection among
   those who answer, its connections to at least two other nodes are broken, one of these says so itself,
   most pods are elsewhere, and all that has lasted for `isolated` seconds. So no confused peer moves
   anybody, itself or others, and of a network that fell apart at most one side is given up: the one that
   cannot be heard, or one node.
3. A step of training takes every rank, so whoever makes one vouches for all: seconds count from the last
   step that was heard of. Who is silent while training goes on is left alone.
4. A kubelet that says that a sidecar has ended, or starts again, lives, and so does the pod. It is given up
   only if training waits for it, and the kubelet will not start it for longer than `held` seconds, or is
   late by `overdue`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_PACES = 5.0
"""Steps that may be due before training counts as standing still, where a few seconds more cost little."""


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
    host_answers: bool = False
    """While it is silent: something came back from its host all the same."""
    heard: float = 0.0
    """Seconds since it last answered the controller."""
    held: float | None = None
    """While it is silent: seconds until its kubelet, which knows, starts it again; negative: that is late."""
    takes_part: bool = True
    """It is a member of the attempt: each step takes it."""
    failed: bool = False
    """Its training command failed in this attempt."""
    accuses: tuple[Accusation, ...] = ()
    """Its last word; counts only while it answers."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    accused: float = 2.0
    together: float = 4.0
    suspect: float = 10.0
    silent: float = 60.0
    isolated: float = 30.0
    held: float = 30.0
    overdue: float = 150.0


@dataclass(frozen=True)
class Training:
    """How the job as a whole gets on, in seconds."""

    stepped: float = math.inf
    """Since it was last heard to have made a step in this attempt, or somebody is there who could tell."""
    pace: float = 0.0
    """Of a step; 0: not known."""
    waits: bool = False
    """It does not train: the next attempt is not released yet."""


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


_UNKNOWN = Training()


def suspects(
    witnesses: Sequence[Witness], limits: Limits, training: Training = _UNKNOWN
) -> dict[str, Suspicion]:
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
            if accusation.pod == witness.pod and _counts(accusation, limits)
        }
        host_silent = not witness.host_answers and any(
            accusation.host_silent for accusation in named.values()
        )
        quiet = seconds_quiet(witness, training)
        if witness.held is not None and not host_silent:
            wanted = broken or training.waits
            gone = wanted and not -limits.overdue <= witness.held <= limits.held
        elif most:
            gone = quiet > max(limits.silent, _PACES * training.pace)
        elif host_silent:
            asked = find_unconfirmed(witnesses, quiet, limits)
            gone = quiet > limits.accused + (limits.together if asked else 0.0)
        elif broken or (named and training.waits):
            gone = quiet > limits.suspect
        else:
            gone = quiet > max(limits.suspect if named else limits.silent, _PACES * training.pace)
        if gone:
            found[witness.pod] = Suspicion(quiet, tuple(sorted(named)), host_silent)
    return {**found, **_isolated(answering, witnesses, limits, training)}


def seconds_quiet(witness: Witness, training: Training = _UNKNOWN) -> float:
    """Seconds for which nothing has spoken for a witness; 0: it answers."""
    return min(witness.silent or 0.0, training.stepped) if witness.takes_part else witness.silent or 0.0


def find_unconfirmed(witnesses: Sequence[Witness], quiet: float, limits: Limits) -> set[str]:
    """Pods without answer since one that is `quiet` was to be given up: they may be about to fall silent."""
    late = quiet - limits.accused
    return (
        {other.pod for other in witnesses if other.silent is None and other.heard > late}
        if late > 0
        else set()
    )


def _counts(accusation: Accusation, limits: Limits) -> bool:
    """Whether it is more than an answer that is late: of a silence that just began peers tell at once."""
    return accusation.seconds > limits.accused or not accusation.host_silent


def _isolated(
    answering: Sequence[Witness], witnesses: Collection[Witness], limits: Limits, training: Training
) -> dict[str, Suspicion]:
    """The answering pods of the one node that no other node can reach."""
    if training.stepped <= max(limits.isolated, _PACES * training.pace):
        return {}
    node_of = {witness.pod: witness.node for witness in answering}
    links = [
        (frozenset((witness.node, node_of[accusation.pod])), witness, accusation)
        for witness in answering
        for accusation in witness.accuses
        if node_of.get(accusation.pod, witness.node) != witness.node and _counts(accusation, limits)
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
