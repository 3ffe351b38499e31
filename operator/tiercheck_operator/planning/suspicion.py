"""Decides which pods to give up before Kubernetes does, from what sidecars report about each other.

Acting early is safe because the attempt fences every pod that is left behind; a wrong decision only costs a
restart. So the rules require two independent observers where seconds count, and none where nothing else can
explain the observations:

1. A pod that does not answer the controller is given up after `unreachable` seconds if a pod that does answer
   has received nothing from its host for as long and nothing comes back from there to the controller; after
   `suspect` if its host answers peers but its sidecar does not, or if training failed elsewhere; after
   `silent` in any case. If no pod answers at all, the controller itself is cut off, and no pod is given up.
   If more than half are silent, only `silent` counts: a switch that restarts must not cost that much memory.
   A silent host is given up only when every other pod has answered once more after these seconds or is
   silent as well, but at most `_TOGETHER` seconds later: pods that fail together, a moment apart, are given
   up together, and no new pod goes to a node that is about to fail.
2. Pods that answer the controller are given up only if one node explains every broken connection among
   the answering pods, its connections to at least two other nodes are broken, one of these nodes reports it
   too, most pods are elsewhere, and all that has lasted for `isolated` seconds. So a faulty peer cannot
   remove any pod, itself or others, and of a partitioned network at most one side is given up: the one that
   the controller cannot reach, or one node.
3. A training step takes every rank, so a rank that completes one shows that all are alive: seconds count
   from the last reported step. A pod that is silent while training continues is left alone.
4. If a kubelet reports that a sidecar has ended or is starting again, the kubelet and the pod are alive. The
   pod is given up only if training waits for it, and the kubelet will not start it for longer than `_HELD`
   seconds, or is late by `_OVERDUE`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiercheck_operator.model.observed import Patience

_TOGETHER, _HELD, _OVERDUE = 4.0, 30.0, 150.0
"""Seconds. The module's docstring explains them, and those in `Patience`."""
_PACES = 5.0
"""The number of overdue steps after which training counts as hung, in rules where seconds cost little."""


@dataclass(frozen=True)
class UnreachableReport:
    """A pod's report that it cannot reach another pod."""

    pod: str
    seconds: float
    """Seconds since the pod that cannot be reached last answered."""
    host_silent: bool
    """True if nothing comes back at all; otherwise the host answers and the sidecar does not."""


@dataclass(frozen=True)
class PodEvidence:
    """One running pod of the job, as the controller sees it."""

    pod: str
    node: str
    silent: float | None = None
    """Seconds for which it has not answered the controller; None: it answers."""
    host_answers: bool = False
    """True if its host responds although its sidecar does not."""
    heard: float = 0.0
    """Seconds since it last answered the controller."""
    held: float | None = None
    """Seconds until the kubelet restarts a silent sidecar; negative: overdue; None: no restart reported."""
    takes_part: bool = True
    """True if it is a member of the attempt, so that every step needs it."""
    failed: bool = False
    """True if its training command failed in this attempt."""
    unreachable_peers: tuple[UnreachableReport, ...] = ()
    """The peers that it cannot reach, by its last report; counts only while it answers."""


@dataclass(frozen=True)
class Training:
    """The training progress of the job as a whole, in seconds."""

    stepped: float = math.inf
    """Seconds since the last reported step of this attempt, or since a sidecar is up to report one."""
    pace: float = 0.0
    """Seconds that a step takes; 0: not known."""
    waits: bool = False
    """True while it does not train because the next attempt is not released yet."""


@dataclass(frozen=True)
class Suspicion:
    """The reason why a pod is given up."""

    seconds: float
    """Seconds for which this has lasted."""
    reporters: tuple[str, ...] = ()
    """Pods that cannot reach it."""
    host_silent: bool = False
    """True if its host seems to be down or cut off, not only its sidecar."""
    answers: bool = False
    """True if it answers the controller, but its peers cannot reach it."""


_UNKNOWN = Training()


def find_suspected_pods(
    pod_evidence: Sequence[PodEvidence], patience: Patience, training: Training = _UNKNOWN
) -> dict[str, Suspicion]:
    """Returns the pods to give up, with the reason; never all of them."""
    answering = [witness for witness in pod_evidence if witness.silent is None]
    if not answering:
        return {}
    found = {}
    broken = any(witness.failed for witness in answering)
    most = 2 * len(answering) < len(pod_evidence)
    for witness in pod_evidence:
        if witness.silent is None:
            continue
        named = {
            other.pod: missed
            for other in answering
            for missed in other.unreachable_peers
            if missed.pod == witness.pod and _counts(missed, patience)
        }
        host_silent = not witness.host_answers and any(missed.host_silent for missed in named.values())
        quiet = seconds_quiet(witness, training)
        if witness.held is not None and not host_silent:
            wanted = broken or training.waits
            gone = wanted and not -_OVERDUE <= witness.held <= _HELD
        elif most:
            gone = quiet > max(patience.silent, _PACES * training.pace)
        elif host_silent:
            asked = find_unconfirmed(pod_evidence, quiet, patience)
            gone = quiet > patience.unreachable + (_TOGETHER if asked else 0.0)
        elif broken or (named and training.waits):
            gone = quiet > patience.suspect
        else:
            gone = quiet > max(patience.suspect if named else patience.silent, _PACES * training.pace)
        if gone:
            found[witness.pod] = Suspicion(quiet, tuple(sorted(named)), host_silent)
    return {**found, **_isolated(answering, pod_evidence, patience, training)}


def seconds_quiet(witness: PodEvidence, training: Training = _UNKNOWN) -> float:
    """Returns the seconds for which nothing has shown that a pod is alive; 0: it answers."""
    return min(witness.silent or 0.0, training.stepped) if witness.takes_part else witness.silent or 0.0


def find_unconfirmed(pod_evidence: Sequence[PodEvidence], quiet: float, patience: Patience) -> set[str]:
    """Returns pods that may fail too: no answer since the pod that is `quiet` was to be given up."""
    late = quiet - patience.unreachable
    return (
        {other.pod for other in pod_evidence if other.silent is None and other.heard > late}
        if late > 0
        else set()
    )


def _counts(missed: UnreachableReport, patience: Patience) -> bool:
    """Returns False for a silence that may be a late answer: peers report every silence at once."""
    return missed.seconds > patience.unreachable or not missed.host_silent


def _isolated(
    answering: Sequence[PodEvidence],
    pod_evidence: Collection[PodEvidence],
    patience: Patience,
    training: Training,
) -> dict[str, Suspicion]:
    """Returns the answering pods of the one node that no other node can reach."""
    if training.stepped <= max(patience.isolated, _PACES * training.pace):
        return {}
    node_of = {witness.pod: witness.node for witness in answering}
    links = [
        (frozenset((witness.node, node_of[missed.pod])), witness, missed)
        for witness in answering
        for missed in witness.unreachable_peers
        if node_of.get(missed.pod, witness.node) != witness.node and _counts(missed, patience)
    ]
    explaining = frozenset.intersection(*(ends for ends, _, _ in links)) if links else frozenset()
    for node in sorted(explaining):
        lasting = [link for link in links if link[2].seconds > patience.isolated]
        others = frozenset[str]().union(*(ends for ends, _, _ in lasting)) - {node}
        reporters = tuple(sorted({witness.pod for _, witness, _ in lasting if witness.node != node}))
        inside = {pod for pod, home in node_of.items() if home == node}
        if len(others) < 2 or not reporters or 2 * len(inside) >= len(pod_evidence):
            continue
        seconds = min(missed.seconds for _, _, missed in lasting)
        return {pod: Suspicion(seconds, reporters, host_silent=True, answers=True) for pod in inside}
    return {}
