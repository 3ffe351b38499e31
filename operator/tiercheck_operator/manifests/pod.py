"""Builds the pod of a worker or a spare: the user's template with sidecar and launcher.

The sidecar is a native one (init container with restartPolicy Always): it starts before the trainer, outlives
it, and its restart does not restart the trainer. The trainer's image is unchanged: a volume provides the
library.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tiercheck.protocol import names
from tiercheck_operator.manifests import owned, pod_settings
from tiercheck_operator.manifests.resources import Resources, compute_resources
from tiercheck_operator.model.observed import ANNOTATION_AVOIDED, ANNOTATION_GIVEN_UP, JobView
from tiercheck_operator.model.serialization import parse_quantity
from tiercheck_operator.planning.topology import levels_from_spec, spread_level

HOSTNAME = "kubernetes.io/hostname"
GROUP = 65532
"""Group ID of the fsGroup: sidecar and trainer may both write the memory volume, whatever their users."""
_GRACE = 30
"""Seconds between SIGTERM and SIGKILL if the template sets none; Kubernetes' own default."""
_GRACE_WITH_REMOTE = 300
"""Seconds for the same with a remote tier: once trainers end, the sidecar may still have to upload."""

_OF_ONE_POD = (
    names.LABEL_WORKER, names.LABEL_INCARNATION, names.LABEL_SPARE, ANNOTATION_AVOIDED, ANNOTATION_GIVEN_UP
)  # fmt: skip
"""Labels and annotations that a template may have from a pod, and that are not about each new one."""

_NODE_MEMORY = pod_settings.NodeMemory()

_RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Unbuildable(ValueError):
    """Raised if no pod can be made of the job's template; the message is a sentence."""


class _Hosts(NamedTuple):
    """Host names of nodes to avoid, to avoid if possible, and to prefer."""

    avoid: Sequence[str]
    unwelcome: Sequence[str]
    prefer: str = ""


class SidecarSetup(NamedTuple):
    worker: str
    """The worker's value in the containers' environment."""
    ports: int
    """The first of its ports if the pod is in its node's network."""
    image: str
    node_memory: pod_settings.NodeMemory


def build_pod(
    job: JobView,
    worker: int,
    incarnation: int,
    avoid_nodes: Sequence[str],
    sidecar_image: str,
    *,
    prefer: str = "",
    unwelcome: Sequence[str] = (),
    node_memory: pod_settings.NodeMemory = _NODE_MEMORY,
) -> dict[str, Any]:
    """Builds the pod of `worker`. Raises Unbuildable.
    It is never scheduled onto `avoid_nodes`; if possible onto `prefer` and not onto `unwelcome` (host names).
    """
    labels = owned.worker_labels(worker, incarnation)
    name = owned.pod_name(job, worker, incarnation)
    ports = pod_settings.worker_ports(job.identity, worker, incarnation)
    setup = SidecarSetup(str(worker), ports, sidecar_image, node_memory)
    return _build(job, name, labels, _Hosts(avoid_nodes, unwelcome, prefer), setup)


def build_spare(
    job: JobView,
    number: int,
    avoid_nodes: Sequence[str],
    sidecar_image: str,
    *,
    unwelcome: Sequence[str] = (),
    node_memory: pod_settings.NodeMemory = _NODE_MEMORY,
) -> dict[str, Any]:
    """Builds a pod as a worker's, but without identity, which it gets later. Raises Unbuildable."""
    name, ports = owned.spare_name(job, number), pod_settings.spare_ports(job.identity, number)
    setup = SidecarSetup(names.SPARE_WORKER, ports, sidecar_image, node_memory)
    return _build(job, name, {names.LABEL_SPARE: str(number)}, _Hosts(avoid_nodes, unwelcome), setup)


def type_mismatch_message(error: Exception) -> str:
    """Returns the message for `error`, caused by a template field of another type than a Pod's.
    The CRD's schema does not check most types."""
    return (
        f"spec.template cannot be made a pod ({type(error).__name__}: {str(error)[:200]}); "
        "compare the types of its fields with those of a Pod (kubectl explain pod.spec)"
    )


def unbuildable(job: JobView) -> str:
    """Returns why no pod can be made of the template, as a sentence; empty: one can."""
    try:
        build_pod(job, 0, 0, ["one"], "sidecar", prefer="another", unwelcome=["a third"])
    except Unbuildable as error:
        return str(error)
    return ""


@contextmanager
def _raise_unbuildable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a field of another type than a Pod's may fail in any way
        raise Unbuildable(type_mismatch_message(error)) from error


@_raise_unbuildable()
def _build(
    job: JobView, name: str, labels: Mapping[str, str], place: _Hosts, setup: SidecarSetup
) -> dict[str, Any]:
    spec: dict[str, Any] = _without_nulls(dict(job.spec.template.get("spec") or {}))
    if spec.get("nodeName"):
        place = _Hosts((), ())  # no scheduler sees it, and a kubelet refuses a pod that avoids its node
    metadata = owned.metadata(job, name)
    template_metadata = job.spec.template.get("metadata") or {}
    theirs, notes = (
        {key: value for key, value in (template_metadata.get(part) or {}).items() if key not in _OF_ONE_POD}
        for part in ("labels", "annotations")
    )
    metadata["labels"] = {**theirs, **job.queue_labels, **metadata["labels"], **labels}
    metadata["annotations"] = {**notes, **job.queue_annotations}
    if place.avoid:
        metadata["annotations"][ANNOTATION_AVOIDED] = ",".join(sorted(place.avoid))
    owned.join_gang(job, metadata, spec)
    spec["restartPolicy"] = "OnFailure"
    spec["automountServiceAccountToken"] = False
    spec["hostname"] = metadata["name"]
    spec["subdomain"] = owned.service_name(job)
    if spec.get("terminationGracePeriodSeconds") is None:
        spec["terminationGracePeriodSeconds"] = _GRACE if job.spec.remote is None else _GRACE_WITH_REMOTE
    pod_settings.resolve_cluster_names(spec)
    inject_sidecar(job, spec, names.TRAINER_CONTAINER, setup)
    if place.avoid:
        _avoid(spec, sorted(place.avoid))
    if place.prefer:
        _prefer(spec, "In", [place.prefer])
    if place.unwelcome:
        _prefer(spec, "NotIn", sorted(place.unwelcome))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def inject_sidecar(job: JobView, spec: dict[str, Any], trainer: str, setup: SidecarSetup) -> None:
    """Adds to `spec`, any PodSpec, what makes it a worker's pod. `trainer`: the container to wrap."""
    shares = compute_resources(job.spec, spec)
    spec["securityContext"] = _pod_security(spec)
    if shares.pod is not None:
        spec["resources"] = shares.pod
    spec["initContainers"] = [
        _library(spec, setup.image, shares.init),
        *pod_settings.preparation(job, setup.node_memory, setup.image, _security(spec), shares.init),
        _sidecar(job, spec, setup, shares.sidecar),
        *(spec.get("initContainers") or []),
    ]
    spec["containers"] = [
        _trainer(job, setup.worker, entry) if entry.get("name") == trainer else entry
        for entry in spec.get("containers") or []
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(job, setup.node_memory)]
    spec.setdefault("topologySpreadConstraints", _soft_spread(job, setup.worker))


def _without_nulls(value: Any) -> Any:
    """Copies a part of the template without fields that are null: Kubernetes takes them for absent."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _library(spec: Mapping[str, Any], image: str, resources: Resources) -> dict[str, Any]:
    return {
        "name": names.LIBRARY_CONTAINER,
        "image": image,
        "command": ["python3", "-m", "tiercheck_sidecar.install_library", names.LIBRARY_DIR],
        "securityContext": _security(spec),
        "resources": copy.deepcopy(resources),
        "volumeMounts": [{"name": "tiercheck-library", "mountPath": names.LIBRARY_DIR}],
    }


def _sidecar(
    job: JobView, spec: Mapping[str, Any], setup: SidecarSetup, resources: Resources
) -> dict[str, Any]:
    on_host = pod_settings.is_on_host(spec)
    first = setup.ports if on_host else names.CONTROL_PORT
    grace = spec["terminationGracePeriodSeconds"]  # negative: one second, as for the API server
    env = [
        *_identity(job, setup.worker),
        {"name": names.ENV_CREDENTIALS_DIR, "value": names.CREDENTIALS_DIR},
        {"name": names.ENV_MEMORY_LIMIT, "value": str(parse_quantity(job.spec.size_limit))},
        {"name": names.ENV_GRACE_SECONDS, "value": str(grace if grace >= 0 else 1)},
        *(pod_settings.environment(setup.node_memory) if job.spec.node_memory else []),
        *([{"name": names.ENV_FIRST_PORT, "value": str(first)}] if on_host else []),
    ]
    mounts = [
        {"name": "tiercheck-memory", "mountPath": names.MEMORY_DIR},
        {"name": "tiercheck-run", "mountPath": names.RUN_DIR},
        {"name": "tiercheck-credentials", "mountPath": names.CREDENTIALS_DIR, "readOnly": True},
    ]
    if (remote := pod_settings.remote_environment(job)) is not None:
        env.append({"name": names.ENV_REMOTE, "value": remote})
        env += [{"name": names.ENV_CLUSTER, "value": job.cluster}] if job.cluster else []
    mounts += [{"name": volume["name"], **mount} for volume, mount in pod_settings.remote_volumes(job)]
    ours = {entry["name"] for entry in env}
    env = [*(dict(entry) for entry in job.spec.sidecar_env if entry["name"] not in ours), *env]
    container: dict[str, Any] = {
        "name": names.SIDECAR_CONTAINER,
        "image": setup.image,
        "command": ["python3", "-m", "tiercheck_sidecar"],
        "restartPolicy": "Always",
        "env": env,
        "ports": [
            {"name": names.CONTROL_PORT_NAME, "containerPort": first},
            {"name": "exchange", "containerPort": first + 1},
            {"name": "tc-metrics", "containerPort": first + 2},
        ],
        "resources": resources,
        "securityContext": _security(spec),
        "startupProbe": _probe("/healthz", first + 2, period=1, failures=120),
        "livenessProbe": _probe("/healthz", first + 2, period=10, failures=6),
        "readinessProbe": _probe("/readyz", first + 2, period=5, failures=2),
        "volumeMounts": mounts,
    }
    if secret := pod_settings.credentials_secret(job):
        container["envFrom"] = [{"secretRef": {"name": secret, "optional": True}}]
        env.append({"name": names.ENV_REMOTE_CREDENTIALS_DIR, "value": names.REMOTE_CREDENTIALS_DIR})
    return container


def _trainer(job: JobView, worker: str, container: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = dict(container)
    wrapped["command"] = [
        "python3", names.LAUNCHER, "--",
        *(container.get("command") or []), *(container.get("args") or []),
    ]  # fmt: skip
    wrapped.pop("args", None)
    identity = _identity(job, worker)
    # These override variables of the same name from the template, the image or envFrom.
    ours = {entry["name"] for entry in identity}
    theirs = [entry for entry in container.get("env") or [] if entry.get("name") not in ours]
    wrapped["env"] = [*identity, *theirs]
    wrapped["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": "tiercheck-memory", "mountPath": names.MEMORY_DIR},
        {"name": "tiercheck-run", "mountPath": names.RUN_DIR},
        {"name": "tiercheck-library", "mountPath": names.LIBRARY_DIR, "readOnly": True},
    ]
    return wrapped


def _identity(job: JobView, worker: str) -> list[dict[str, Any]]:
    return [
        {"name": names.ENV_JOB, "value": f"{job.namespace}/{job.name}"},
        {"name": names.ENV_JOB_UID, "value": job.identity},
        {"name": names.ENV_WORKER, "value": worker},
        {"name": names.ENV_PROCS_PER_WORKER, "value": str(job.spec.procs_per_worker)},
        {"name": names.ENV_POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": names.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": names.ENV_MEMORY_DIR, "value": names.MEMORY_DIR},
        {"name": names.ENV_RUN_DIR, "value": names.RUN_DIR},
    ]


def _volumes(job: JobView, node_memory: pod_settings.NodeMemory) -> list[dict[str, Any]]:
    memory: dict[str, Any] = {"emptyDir": {"medium": "Memory", "sizeLimit": job.spec.size_limit}}
    volumes: list[dict[str, Any]] = [
        {
            "name": "tiercheck-memory",
            **(pod_settings.memory_volume(job, node_memory) if job.spec.node_memory else memory),
        },
        *([pod_settings.node_volume(node_memory)] if job.spec.node_memory else []),
        {"name": "tiercheck-run", "emptyDir": {}},
        {"name": "tiercheck-library", "emptyDir": {}},
        {
            "name": "tiercheck-credentials",
            "secret": {
                "secretName": owned.credentials_name(job),
                "defaultMode": 0o440,
                # Without the operator's key: a compromised sidecar must not be able to sign as the operator.
                "items": [{"key": key, "path": key} for key in owned.SIDECAR_CREDENTIALS],
            },
        },
    ]
    return [*volumes, *(volume for volume, _ in pod_settings.remote_volumes(job))]


def _pod_security(spec: Mapping[str, Any]) -> dict[str, Any]:
    theirs = spec.get("securityContext") or {}
    if theirs.get("fsGroup") is not None:
        return dict(theirs)
    # Without the policy the kubelet would walk through every file of the user's own volumes before each
    # start.
    return {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch", **theirs}


def _security(spec: Mapping[str, Any]) -> dict[str, Any]:
    # In a pod that runs as root, runAsNonRoot would refuse our containers, so they set a user of their own.
    if (spec.get("securityContext") or {}).get("runAsUser") == 0:
        return {**_RESTRICTED, "runAsUser": GROUP}
    return dict(_RESTRICTED)


def _probe(path: str, port: int, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _soft_spread(job: JobView, worker: str) -> list[dict[str, Any]]:
    """Returns constraints that spread workers evenly over domains and nodes, as far as there is room.
    Holders are in other domains, which is impossible for all workers of a domain with more than half of them.
    So a replacement belongs where the lost pod was, and spares are not counted. A spare's constraints count
    both, so that it is placed where workers and other spares are fewest."""
    selector: dict[str, Any] = {"matchLabels": {names.LABEL_JOB_UID: job.identity}}
    if worker != names.SPARE_WORKER:
        selector["matchExpressions"] = [{"key": names.LABEL_WORKER, "operator": "Exists"}]
    try:
        levels = levels_from_spec(job.spec.topology_preset, job.spec.topology_levels)
        wanted = spread_level(levels, job.spec.spread_level).label
    except ValueError:  # reported where the members are placed
        wanted = HOSTNAME
    return [
        {"maxSkew": 1, "topologyKey": label, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
        for label in dict.fromkeys((wanted, HOSTNAME))
    ]


def _prefer(spec: dict[str, Any], operator: str, nodes: list[str]) -> None:
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    wanted = {"matchExpressions": [{"key": HOSTNAME, "operator": operator, "values": nodes}]}
    affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", []).append(
        {"weight": 100, "preference": wanted}
    )


def _avoid(spec: dict[str, Any], nodes: list[str]) -> None:
    affinity = spec.setdefault("affinity", {})
    required = affinity.setdefault("nodeAffinity", {}).setdefault(
        "requiredDuringSchedulingIgnoredDuringExecution", {}
    )
    # Terms are alternatives, so each of them must refuse the nodes.
    for term in required.setdefault("nodeSelectorTerms", []) or [{}]:
        term.setdefault("matchExpressions", []).append(
            {"key": HOSTNAME, "operator": "NotIn", "values": nodes}
        )
        if term not in required["nodeSelectorTerms"]:
            required["nodeSelectorTerms"].append(term)
