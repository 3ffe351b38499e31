"""Parses API objects into the controller's views; a malformed object must not stop a decision."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck.protocol.report import SPARE
from tiercheck_operator.model.observed import (
    ANNOTATION_AVOIDED,
    ANNOTATION_GIVEN_UP,
    ContainerState,
    ContainerView,
    JobView,
    NodeView,
    PodView,
)
from tiercheck_operator.model.serialization import from_api
from tiercheck_operator.model.status import parse_time

_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_LOST_TAINTS = {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready", _OUT_OF_SERVICE}
UNREADABLE = "unreadable"
"""Key under which a shell (`object_reader`) states why the object could not be read; no API field."""
LONGEST_ATTACHMENT = 4096
"""Characters of an annotation that are read: any user of the namespace may write one."""
_LONGEST_TEXT, _MOST_NAMES = 1000, 128
"""Characters of a text, and names in a list, that are kept per pod: a job may have thousands of pods."""
_MOST_INCARNATIONS = 10**6
"""A larger number on a pod is not the operator's, and would make the next pod's name too long."""
_BACK_OFF = re.compile(r"back-off ((?:\d+h)?(?:\d+m)?(?:\d+(?:\.\d+)?s)?) restarting failed container")
"""The kubelet's message for a container in CrashLoopBackOff, with a Go duration: 40s, 2m40s, 5m0s."""


# Sources of the taints: kubernetes/autoscaler `utils/taints`, Karpenter's "Disruption" page,
# aws-node-termination-handler's configuration (TAINT_NODE), and what GKE's maintenance handler sets. Soft
# ones (DeletionCandidateOfClusterAutoscaler, rebalance-recommendation) are omitted: most are removed again.
LEAVING_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # before Karpenter 1.0
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
    }
)
"""Taints of controllers that will end the node's pods, after a while or at a deadline."""


@dataclass(frozen=True)
class NodeSigns:
    """The operator's settings about nodes."""

    taints: frozenset[str] = frozenset()
    """Taint keys that count as LEAVING_TAINTS do."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of node conditions that mark a node as bad, such as ("KernelDeadlock", "True")."""
    cordon_moves: bool = False
    """True if a cordon alone makes pods leave; else it only keeps new pods and copies away."""

    def leaving(self, spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
        """Returns why pods should leave the node, as a clause; empty: they may stay."""
        for taint in spec.get("taints") or []:
            if taint.get("key") in LEAVING_TAINTS | self.taints and taint.get("effect") != "PreferNoSchedule":
                return f"it is tainted {taint['key']}"
        for entry in status.get("conditions") or []:
            if (entry.get("type"), entry.get("status")) in self.conditions:
                said = f" ({entry['message']})" if entry.get("message") else ""
                return f"it has the condition {entry['type']}={entry['status']}{said}"[:300]
        return "it is cordoned" if self.cordon_moves and spec.get("unschedulable") else ""


NO_SETTINGS = NodeSigns()


def parse_signs(taints: str, conditions: str, cordon: str) -> NodeSigns:
    """Parses the settings: `taints` and `conditions` separated by commas, `cordon` Avoid or Move.

    A condition is Type or Type=Status. Raises ValueError with a sentence.
    """
    if cordon not in ("", "Avoid", "Move"):
        raise ValueError(f"{cordon!r} is neither Avoid nor Move")
    pairs = [entry.partition("=") for entry in _listed(conditions)]
    return NodeSigns(
        taints=frozenset(_listed(taints)),
        conditions=frozenset((kind, status or "True") for kind, _, status in pairs),
        cordon_moves=cordon == "Move",
    )


def _listed(text: str) -> Sequence[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def parse_job(raw: Mapping[str, Any]) -> JobView:
    """Parses a job. Raises KeyError, TypeError or ValueError on what violates the CRD's schema."""
    if UNREADABLE in raw:
        raise ValueError(raw[UNREADABLE])
    return from_api(JobView, raw)


def identity_of(raw: Mapping[str, Any]) -> str:
    """Returns the UID by which a raw TierCheckJob's pods identify it (`JobView.identity`)."""
    owner = ((raw.get("spec") or {}).get("attach") or {}).get("owner") or {}
    return str(owner.get("uid") or raw["metadata"]["uid"])


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def parse_pod(raw: Mapping[str, Any]) -> PodView | None:
    """Parses a pod of a job; None unless its labels and controller match a job or an attached workload.

    Any user may label pods. Even with the right to write owner references, a user stays confined to one
    namespace, because pods are only looked up in their job's. May raise anything on invalid objects.
    """
    if UNREADABLE in raw:
        raise ValueError(raw[UNREADABLE])
    metadata, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    owners = metadata.get("ownerReferences") or []
    maker: Mapping[str, Any] = next((entry for entry in owners if entry.get("controller")), {})
    own = _group(maker) == names.API_GROUP
    attached = "" if own else str(annotations.get(names.ANNOTATION_ATTACHED) or _lost_attachment(spec))
    if not (own or attached) or labels.get(names.LABEL_JOB_UID) not in _allowed_job_uids(maker, labels):
        return None
    try:
        spare = int(labels[names.LABEL_SPARE]) if names.LABEL_SPARE in labels else None
        is_spare = spare is not None and names.LABEL_WORKER not in labels
        worker = SPARE if is_spare else int(labels[names.LABEL_WORKER])
        incarnation = int(labels.get(names.LABEL_INCARNATION, 0))
        job_uid = _shared(labels[names.LABEL_JOB_UID])
    except (KeyError, ValueError):
        return None
    conditions = {entry.get("type"): entry for entry in status.get("conditions") or []}
    disrupted = conditions.get("DisruptionTarget") or {}
    scheduled = conditions.get("PodScheduled") or {}
    disruption = disrupted.get("reason") if disrupted.get("status") == "True" else ""
    avoided = str(annotations.get(ANNOTATION_AVOIDED) or "").split(",", _MOST_NAMES)[:_MOST_NAMES]
    held = _held(status)
    gates = tuple(_text(entry.get("name")) for entry in (spec.get("schedulingGates") or [])[:_MOST_NAMES])
    unschedulable = scheduled.get("status") == "False" and not gates
    sidecar = _named(spec.get("initContainers"), names.SIDECAR_CONTAINER)
    created = parse_time(metadata.get("creationTimestamp")) or 0.0
    deletion = parse_time(metadata.get("deletionTimestamp"))
    grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
    return PodView(
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        job_uid=job_uid,
        worker=worker,
        incarnation=incarnation if incarnation < _MOST_INCARNATIONS else 0,
        node=_shared(spec.get("nodeName") or "") or None,
        ip=status.get("podIP") or None,
        phase=_shared(status.get("phase") or "Pending"),
        created=created,
        namespace=_shared(metadata.get("namespace") or ""),
        # `Attachment.to_json` writes ASCII only, so any other text counts as invalid.
        attached=attached[: LONGEST_ATTACHMENT + 1] if attached.isascii() else "-",
        deleting=deletion is not None,
        deleted_at=None if deletion is None else deletion - grace,
        disruption=_text(disruption or status.get("reason")),
        message=_text(_pod_message(status, scheduled if unschedulable else {})),
        held=_shared(_text(held[1]) if held else ""),
        # A kubelet that accepts a pod sets its startTime (PodStatus of the API reference).
        claimed=not spec.get("nodeName") or bool(status.get("startTime")),
        unschedulable_since=(parse_time(scheduled.get("lastTransitionTime")) or created)
        if unschedulable
        else None,
        sidecar_image=_shared(_text(sidecar.get("image"))),
        avoided=frozenset(_shared(name) for name in avoided if name),
        trainer=_container(
            spec.get("containers"),
            status.get("containerStatuses"),
            trainer_name(attached),
            policy=str(spec.get("restartPolicy") or "Always"),
        ),
        spare=spare,
        ill=_ill_device(status),
        remade_since=1.0 if _makes_sandbox_anew(status, conditions) else None,
        gates=gates,
        resource_version=str(metadata.get("resourceVersion") or ""),
        given_up=_text(annotations.get(ANNOTATION_GIVEN_UP)),
        first_port=_first_port(sidecar),
        sidecar=_container(
            spec.get("initContainers"), status.get("initContainerStatuses"), names.SIDECAR_CONTAINER
        ),
    )


def _text(value: object) -> str:
    return str(value or "")[:_LONGEST_TEXT]


def _shared(text: object) -> str:
    """Interns a text that many pods share: such texts are most of the memory of thousands of pods."""
    return sys.intern(str(text))


def _group(maker: Mapping[str, Any]) -> str:
    return str(maker.get("apiVersion") or "").partition("/")[0]


def _allowed_job_uids(maker: Mapping[str, Any], labels: Mapping[str, str]) -> set[Any]:
    """Returns the job UIDs that a pod of this controller may claim: its job's or attached workload's."""
    group = _group(maker)
    if not maker.get("uid") or (group == names.API_GROUP and maker.get("kind") != names.KIND):
        return set()
    found = {maker["uid"]}
    if group == "batch" and names.LABEL_JOBSET_UID in labels:
        found.add(labels[names.LABEL_JOBSET_UID])  # pods of a JobSet have a Job between them and it
    return found


def _lost_attachment(spec: Mapping[str, Any]) -> str:
    """Returns as much of an attached pod's annotation as the pod shows without it; empty: it is not attached.
    A user or policy that took the annotation off must not make a pod that trains count as gone."""
    if not _named(spec.get("initContainers"), names.SIDECAR_CONTAINER):
        return ""
    for container in spec.get("containers") or []:
        if any(mount.get("mountPath") == names.RUN_DIR for mount in container.get("volumeMounts") or []):
            return json.dumps({"container": container["name"]})
    return ""


def trainer_name(attached: str) -> str:
    """Returns the name of the training container; an attached pod's annotation names it."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(parse_json(attached, LONGEST_ATTACHMENT)["container"])
    return names.TRAINER_CONTAINER


def _named(entries: Any, name: str) -> Mapping[str, Any]:
    return next((entry for entry in entries or [] if entry.get("name") == name), {})


def _container(specs: Any, statuses: Any, name: str, policy: str = "Always") -> ContainerView:
    spec, status = _named(specs, name), _named(statuses, name)
    # A restarted container has its last end in lastState; one that has not restarted may have it in state.
    state, last = status.get("state") or {}, status.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    return ContainerView(
        restarts=int(status.get("restartCount") or 0),
        ended_reason=_text(ended.get("reason")),
        ended_at=parse_time(ended.get("finishedAt")),
        exit_code=_int(ended.get("exitCode")),
        memory_limit=_text(((spec.get("resources") or {}).get("limits") or {}).get("memory")),
        state=_container_state(status),
        back_off=_back_off(str((state.get("waiting") or {}).get("message") or "")),
        restartable=(spec.get("restartPolicy") or policy) != "Never",
    )


def _makes_sandbox_anew(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Returns whether a pod's sandbox is being recreated (KEP-3085); `date_pod` sets `remade_since`."""
    ready = (conditions.get("PodReadyToStartContainers") or {}).get("status")
    return status.get("phase") == "Running" and ready == "False"


def _ill_device(status: Mapping[str, Any]) -> str:
    """Returns the first unhealthy device in `allocatedResourcesStatus` (KEP-4680) as a clause."""
    for container in status.get("containerStatuses") or []:
        for resource in container.get("allocatedResourcesStatus") or []:
            for device in resource.get("resources") or []:
                if device.get("health") == "Unhealthy":
                    return f"device {device.get('resourceID')} ({resource.get('name')}) is Unhealthy"[:200]
    return ""


def _first_port(sidecar: Mapping[str, Any]) -> int | None:
    port = _int(_named(sidecar.get("ports"), names.CONTROL_PORT_NAME).get("containerPort"))
    return None if port == names.CONTROL_PORT else port


def _container_state(status: Mapping[str, Any]) -> ContainerState:
    state = status.get("state") or {}
    if "running" in state:
        return ContainerState.UP if status.get("started") else ContainerState.STARTING
    if "terminated" in state:
        return ContainerState.ENDED
    ran = status.get("restartCount") or "terminated" in (status.get("lastState") or {})
    return ContainerState.HELD_BACK if ran else ContainerState.NOT_STARTED


def _back_off(message: str) -> float:
    found, units = _BACK_OFF.search(message), {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"([\d.]+)([hms])", found[1]) if found else ()
    return sum((float(number) * units[unit] for number, unit in parts), 0.0)


def _pod_message(status: Mapping[str, Any], scheduled: Mapping[str, Any]) -> str:
    if scheduled:
        return f"{scheduled.get('reason') or 'Unschedulable'}: {scheduled.get('message') or 'no node fits'}"
    if held := _held(status):
        return f"container {held[0]}: {held[1]}: {held[2]}".rstrip(": ")
    return str(status.get("message") or "")


def _held(status: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Returns the first container that is not started, and the kubelet's reason and message."""
    for entry in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "", "PodInitializing", "ContainerCreating"):
            return str(entry.get("name")), str(waiting["reason"]), str(waiting.get("message") or "")
    return None


def parse_node(raw: Mapping[str, Any], signs: NodeSigns = NO_SETTINGS) -> NodeView:
    """Parses a node. Raises ValueError if the object could not be read."""
    if UNREADABLE in raw:
        raise ValueError(raw[UNREADABLE])
    metadata, spec, status = raw.get("metadata") or {}, raw.get("spec") or {}, raw.get("status") or {}
    conditions = [entry for entry in status.get("conditions") or [] if entry.get("type")]
    ready: Mapping[str, Any] = next((entry for entry in conditions if entry["type"] == "Ready"), {})
    taints, lost = spec.get("taints") or [], ""
    if ready.get("status") in ("False", "Unknown"):
        lost = f"node is not ready ({ready.get('reason') or ready['status']})"
    for taint in taints:
        if taint.get("key") in _LOST_TAINTS and taint.get("effect") == "NoExecute":
            lost = lost or f"node is tainted {taint['key']}"
    return NodeView(
        name=str(metadata.get("name") or ""),
        labels=dict(metadata.get("labels") or {}),
        lost=lost,
        out_of_service=any(
            taint.get("key") == _OUT_OF_SERVICE and taint.get("effect") == "NoExecute" for taint in taints
        ),
        kubelet=str((status.get("nodeInfo") or {}).get("kubeletVersion") or ""),
        leaving=signs.leaving(spec, status),
        conditions={str(entry["type"]): str(entry.get("status") or "") for entry in conditions},
        cordoned=bool(spec.get("unschedulable")),
        schedulable=not spec.get("unschedulable")
        and not any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in taints),
    )
