"""Binds pods that have no node, whenever a pod or a node changes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck_local.apiserver.store.selectors import matches_selector
from tiercheck_local.client import Cache, Client, WokenController, attempt
from tiercheck_operator.kubernetes.api_server import PODS, Object
from tiercheck_operator.model.serialization import parse_amount
from tiercheck_operator.model.status import rfc3339

# Pure.
Item = Mapping[str, Any]

SAME_JOB = ("tiercheck.io/job", "job-name", "batch.kubernetes.io/job-name")
"""Labels of pods that are spread over the nodes, unless the pod has its own spread constraints."""


@dataclass(frozen=True)
class Chosen:
    node: str


@dataclass(frozen=True)
class NoNodeFits:
    """The result if no node admits the pod; `message` is for the PodScheduled condition."""

    message: str


def choose(pod: Item, nodes: Sequence[Item], pods: Sequence[Item]) -> Chosen | NoNodeFits:
    """Chooses a node for `pod`, or explains why none admits it.

    Of the nodes that admit the pod, those with the highest affinity come first; of these, the one that
    spreads its kind most evenly, then the one with the fewest pods. `pods` are all that are bound or about to
    be; finished ones do not count.
    """
    present: dict[str, list[Item]] = {node["metadata"]["name"]: [] for node in nodes}
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
            crowd = _spread_counts(pod, node, nodes, present) or [_same_job(pod, present[name])]
            admitted.append((-_affinity_weight(pod, node), crowd, len(present[name]), name))
    if admitted:
        return Chosen(min(admitted)[3])
    counted = ", ".join(f"{count} {reason}" for reason, count in sorted(refusals.items()))
    if not nodes:
        return NoNodeFits("no nodes available to schedule pods")
    return NoNodeFits(f"0/{len(nodes)} nodes are available: {counted}.")


def refusal(pod: Item, node: Item, present: Sequence[Item]) -> list[str]:
    """Returns the reasons why this node does not admit the pod; empty if it does."""
    taint = _untolerated(pod, node)
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    if node["spec"].get("unschedulable") and toleration(pod, cordon) is None:
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


def _host_ports(pod: Item) -> set[int]:
    """Returns the node's ports that the pod occupies: with hostNetwork, all that it declares."""
    spec = pod["spec"]
    lasting = [entry for entry in spec.get("initContainers") or [] if entry.get("restartPolicy") == "Always"]
    ports = [port for entry in [*lasting, *spec["containers"]] for port in entry.get("ports") or []]
    key = "containerPort" if spec.get("hostNetwork") else "hostPort"
    return {int(port[key]) for port in ports if port.get(key)}


def is_finished(pod: Item) -> bool:
    """Returns whether the pod's containers will not run again, so that it takes no room."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def ready_status(item: Item) -> str:
    """Returns the Ready condition's status of a node or a pod: True, False or Unknown."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((str(c["status"]) for c in conditions if c["type"] == "Ready"), "Unknown")


def with_condition(item: Item, condition: Object) -> list[Object]:
    """Returns the conditions of a node or a pod with `condition` in place of the one of its type."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return [*(each for each in conditions if each["type"] != condition["type"]), condition]


def requests(pod: Item) -> Counter[str]:
    """Returns the pod's requests: main containers and sidecars, or the largest init container if more."""
    running: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    spec = pod["spec"]
    for container in spec.get("initContainers") or []:
        wanted = running + _asked(container)
        if container.get("restartPolicy") == "Always":
            running = wanted
        peak |= wanted
    for container in spec["containers"]:
        running += _asked(container)
    return running | peak


def _asked(container: Item) -> Counter[str]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    # A Counter adds and compares decimals as well as the integers of its type.
    return Counter({name: parse_amount(amount) for name, amount in wanted.items()})


def _lacking(pod: Item, node: Item, present: Sequence[Item]) -> list[str]:
    room = {name: parse_amount(amount) for name, amount in node["status"].get("allocatable", {}).items()}
    reasons = []
    if len(present) + 1 > room.get("pods", 110):
        reasons.append("Too many pods")
    used = sum(map(requests, present), requests(pod))
    lacking = (name for name in sorted(requests(pod)) if used[name] > room.get(name, 0))
    return [*reasons, *(f"Insufficient {name}" for name in lacking)]


def _untolerated(pod: Item, node: Item) -> Item | None:
    taints: Sequence[Item] = node["spec"].get("taints") or []
    for taint in taints:
        if taint["effect"] in {"NoSchedule", "NoExecute"} and toleration(pod, taint) is None:
            return taint
    return None


def toleration(pod: Item, taint: Item) -> Item | None:
    """Returns the pod's toleration of this taint; the one that lasts longest if there are several."""

    def matches(entry: Item) -> bool:
        if entry.get("effect") and entry["effect"] != taint["effect"]:
            return False
        if entry.get("key") and entry["key"] != taint["key"]:
            return False
        if entry.get("operator", "Equal") == "Exists":
            return True
        return bool(entry.get("key")) and (entry.get("value") or "") == (taint.get("value") or "")

    found = [entry for entry in pod["spec"].get("tolerations") or [] if matches(entry)]
    return max(found, key=lambda entry: entry.get("tolerationSeconds", float("inf")), default=None)


def _selected(pod: Item, node: Item) -> bool:
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


def _affinity_weight(pod: Item, node: Item) -> int:
    """Returns the weight of the pod's preferred node affinity that holds for this node."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return sum(
        int(entry["weight"])
        for entry in affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        if _term_holds(entry["preference"], node)
    )


def _term_holds(term: Item, node: Item) -> bool:
    metadata = node["metadata"]
    if not term.get("matchExpressions") and not term.get("matchFields"):  # an empty term selects nothing
        return False
    return matches_selector(
        {"matchExpressions": term.get("matchExpressions")}, metadata.get("labels") or {}
    ) and matches_selector({"matchExpressions": term.get("matchFields")}, {"metadata.name": metadata["name"]})


def _spread_counts(
    pod: Item, node: Item, nodes: Sequence[Item], present: Mapping[str, list[Item]]
) -> list[int]:
    """Counts the matching pods in the node's domain per topologySpreadConstraint, in order.

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


def _same_job(pod: Item, present: Sequence[Item]) -> int:
    labels = pod["metadata"].get("labels") or {}
    for key in SAME_JOB:
        if key in labels:
            return sum(
                (other["metadata"].get("labels") or {}).get(key) == labels[key]
                and other["metadata"].get("namespace") == pod["metadata"].get("namespace")
                for other in present
            )
    return 0


log = logging.getLogger(__name__)

NAME = "default-scheduler"


class Scheduler(WokenController):
    """Binds pods to nodes; to be woken after every change."""

    def __init__(self, client: Client, pods: Cache, nodes: Cache) -> None:
        super().__init__(client, [pods, nodes])
        self._pods, self._nodes = pods, nodes
        self._assumed: dict[str, str] = {}
        """The nodes of pods bound here but not yet seen so; else two pods could take the last place."""

    async def work(self) -> None:
        known = self._pods.objects
        self._assumed = {
            uid: node
            for uid, node in self._assumed.items()
            if uid in known and not known[uid]["spec"].get("nodeName")
        }
        waiting = [pod for uid, pod in known.items() if uid not in self._assumed and _waits(pod)]
        for pod in sorted(waiting, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"])):
            await attempt(f"pod {pod['metadata']['name']}", self._schedule(pod))

    async def _schedule(self, pod: Object) -> None:
        metadata = pod["metadata"]
        placed = [
            {**other, "spec": {**other["spec"], "nodeName": self._assumed[uid]}}
            if uid in self._assumed
            else other
            for uid, other in self._pods.objects.items()
        ]
        nodes = sorted(self._nodes.objects.values(), key=lambda node: str(node["metadata"]["name"]))
        choice = choose(pod, nodes, placed)
        if isinstance(choice, NoNodeFits):
            await self._explain(pod, choice.message)
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "target": {"apiVersion": "v1", "kind": "Node", "name": choice.node},
        }
        self._assumed[metadata["uid"]] = choice.node
        try:
            await self._client.bind(metadata["namespace"], metadata["name"], binding)
        except BaseException:
            del self._assumed[metadata["uid"]]
            raise
        log.info("pod %s/%s goes to %s", metadata["namespace"], metadata["name"], choice.node)

    async def _explain(self, pod: Object, message: str) -> None:
        conditions = (pod.get("status") or {}).get("conditions") or []
        before: Object = next((c for c in conditions if c["type"] == "PodScheduled"), {})
        if before.get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": before.get("lastTransitionTime") or rfc3339(time.time()),
        }
        change: Object = {"status": {"conditions": with_condition(pod, condition)}}
        await self._client.patch_as_read(PODS, pod, change, subresource="status")


def _waits(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        not spec.get("nodeName")
        and not pod["metadata"].get("deletionTimestamp")
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", NAME) == NAME
        and not is_finished(pod)
    )
