"""Chooses a pod's node, or says in the real scheduler's words why there is none.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_operator.model.quantity import parse_amount

Object = Mapping[str, Any]

SAME_JOB = ("tiercheck.io/job", "job-name", "batch.kubernetes.io/job-name")
"""Labels whose pods are spread over the nodes, unless the pod says itself how it wants to be spread."""


@dataclass(frozen=True)
class Chosen:
    node: str


@dataclass(frozen=True)
class Nowhere:
    """`message` is for the PodScheduled condition."""

    message: str


def choose(pod: Object, nodes: Sequence[Object], pods: Sequence[Object]) -> Chosen | Nowhere:
    """Of the nodes that admit `pod` those that it prefers, of them the one that keeps its kind spread most
    evenly, then the one with the fewest pods.

    `pods` are all that are bound or about to be; finished ones do not count.
    """
    present: dict[str, list[Object]] = {node["metadata"]["name"]: [] for node in nodes}
    for other in pods:
        if other["spec"].get("nodeName") in present and not is_finished(other):
            present[other["spec"]["nodeName"]].append(other)
    refusals: Counter[str] = Counter()
    admitted = []
    for node in nodes:
        name = node["metadata"]["name"]
        reasons = refusal(pod, node, present[name])
        refusals.update(reasons)
        if not reasons:
            crowd = _crowd(pod, node, nodes, present) or [_same_job(pod, present[name])]
            admitted.append((-_liking(pod, node), crowd, len(present[name]), name))
    if admitted:
        return Chosen(min(admitted)[3])
    counted = ", ".join(f"{count} {reason}" for reason, count in sorted(refusals.items()))
    if not nodes:
        return Nowhere("no nodes available to schedule pods")
    return Nowhere(f"0/{len(nodes)} nodes are available: {counted}.")


def refusal(pod: Object, node: Object, present: Sequence[Object]) -> list[str]:
    """Why this node does not take the pod; empty if it does."""
    taint = _untolerated(pod, node)
    if node["spec"].get("unschedulable") and not _tolerates(
        pod, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return ["node(s) were unschedulable"]
    if taint is not None:
        return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    if ready_status(node) != "True":
        return ["node(s) were not ready"]
    if not _selected(pod, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    if _host_ports(pod) & {port for other in present for port in _host_ports(other)}:
        return ["node(s) didn't have free ports for the requested pod ports"]
    return _lacking(pod, node, present)


def _host_ports(pod: Object) -> set[int]:
    """Ports of the node that it takes as long as it lives. In the node's network those are all that it
    names."""
    spec = pod["spec"]
    lasting = [entry for entry in spec.get("initContainers") or [] if entry.get("restartPolicy") == "Always"]
    ports = [port for entry in [*lasting, *spec["containers"]] for port in entry.get("ports") or []]
    key = "containerPort" if spec.get("hostNetwork") else "hostPort"
    return {int(port[key]) for port in ports if port.get(key)}


def is_finished(pod: Object) -> bool:
    """Its containers will not run again, so it takes no room."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def ready_status(item: Object) -> str:
    """Of a node or a pod: True, False or Unknown."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((str(c["status"]) for c in conditions if c["type"] == "Ready"), "Unknown")


def requests(pod: Object) -> dict[str, Decimal]:
    """What the pod asks for: main containers and sidecars together, or the largest init container if that is
    more."""
    running: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    spec = pod["spec"]
    for container in spec.get("initContainers") or []:
        wanted = _sum(running, _asked(container))
        if container.get("restartPolicy") == "Always":
            running = wanted
        peak = _largest(peak, wanted)
    for container in spec["containers"]:
        running = _sum(running, _asked(container))
    return _largest(running, peak)


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in {*one, *other}}


def _largest(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {*one, *other}}


def _asked(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_amount(amount) for name, amount in wanted.items()}


def _lacking(pod: Object, node: Object, present: Sequence[Object]) -> list[str]:
    room = {name: parse_amount(amount) for name, amount in node["status"].get("allocatable", {}).items()}
    reasons = []
    if len(present) + 1 > room.get("pods", 110):
        reasons.append("Too many pods")
    used: dict[str, Decimal] = {}
    for other in present:
        used = _sum(used, requests(other))
    for name, amount in sorted(requests(pod).items()):
        if amount > 0 and used.get(name, Decimal(0)) + amount > room.get(name, Decimal(0)):
            reasons.append(f"Insufficient {name}")
    return reasons


def _untolerated(pod: Object, node: Object) -> Object | None:
    taints: Sequence[Object] = node["spec"].get("taints") or []
    for taint in taints:
        if taint["effect"] in {"NoSchedule", "NoExecute"} and not _tolerates(pod, taint):
            return taint
    return None


def _tolerates(pod: Object, taint: Object) -> bool:
    return toleration(pod, taint) is not None


def toleration(pod: Object, taint: Object) -> Object | None:
    """The pod's toleration of this taint; the one that lasts longest if there are several."""

    def matches(entry: Object) -> bool:
        if entry.get("effect") and entry["effect"] != taint["effect"]:
            return False
        if entry.get("key") and entry["key"] != taint["key"]:
            return False
        if entry.get("operator", "Equal") == "Exists":
            return True
        return bool(entry.get("key")) and (entry.get("value") or "") == (taint.get("value") or "")

    found = [entry for entry in pod["spec"].get("tolerations") or [] if matches(entry)]
    return max(found, key=lambda entry: entry.get("tolerationSeconds", float("inf")), default=None)


def _selected(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    return any(_term_holds(term, node) for term in affinity.get("nodeSelectorTerms") or [])


def _liking(pod: Object, node: Object) -> int:
    """Weight of the pod's preferred node affinity that holds for this node."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return sum(
        int(entry["weight"])
        for entry in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        if _term_holds(entry["preference"], node)
    )


def _term_holds(term: Object, node: Object) -> bool:
    metadata = node["metadata"]
    if not term.get("matchExpressions") and not term.get("matchFields"):  # an empty term selects nothing
        return False
    return matches_selector(
        {"matchExpressions": term.get("matchExpressions")}, metadata.get("labels") or {}
    ) and matches_selector({"matchExpressions": term.get("matchFields")}, {"metadata.name": metadata["name"]})


def _crowd(
    pod: Object, node: Object, nodes: Sequence[Object], present: Mapping[str, list[Object]]
) -> list[int]:
    """For each of the pod's topologySpreadConstraints, in order: how many matching pods the node's domain has
    already.

    Pods that are being deleted do not count, as in the real scheduler.
    """
    counts = []
    for constraint in pod["spec"].get("topologySpreadConstraints") or []:
        key = constraint["topologyKey"]
        selector = constraint.get("labelSelector") or {}
        domain = (node["metadata"].get("labels") or {}).get(key)
        counts.append(
            sum(
                matches_selector(selector, other["metadata"].get("labels") or {})
                and other["metadata"].get("namespace") == pod["metadata"].get("namespace")
                and not other["metadata"].get("deletionTimestamp")
                for peer in nodes
                if (peer["metadata"].get("labels") or {}).get(key) == domain
                for other in present[peer["metadata"]["name"]]
            )
        )
    return counts


def _same_job(pod: Object, present: Sequence[Object]) -> int:
    labels = pod["metadata"].get("labels") or {}
    for key in SAME_JOB:
        if key in labels:
            return sum(
                (other["metadata"].get("labels") or {}).get(key) == labels[key]
                and other["metadata"].get("namespace") == pod["metadata"].get("namespace")
                for other in present
            )
    return 0
