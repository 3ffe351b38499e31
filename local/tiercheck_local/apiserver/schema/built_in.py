"""Adds the server's defaults to built-in objects, and refuses changes that it would refuse.

It covers the part of the real server's defaults and checks that clients of this project can notice.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from typing import Any

from tiercheck_local.apiserver.errors import FieldCause, Object, bad_request

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
DNS_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start "
    "and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_DNS_LABEL_NAMES = frozenset({"/namespaces", "/services"})
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must "
    "start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used "
    "for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_KEY_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


def name_faults(collection: str, name: str) -> list[FieldCause]:
    """Returns the reasons why `name` cannot be the name of an object in this collection."""
    if collection in _DNS_LABEL_NAMES:
        limit, pattern, rule = 63, DNS_LABEL, DNS_LABEL_RULE
    else:
        limit, pattern, rule = 253, _SUBDOMAIN, _SUBDOMAIN_RULE
    shown = f'Invalid value: "{name}": '
    if len(name) > limit:
        return [FieldCause("metadata.name", f"{shown}must be no more than {limit} characters")]
    return [] if pattern.fullmatch(name) else [FieldCause("metadata.name", shown + rule)]


def metadata_faults(metadata: Object) -> list[FieldCause]:
    """Returns what is wrong with the rest of the metadata."""
    keys = metadata.get("annotations") or {}
    annotations = (fault for key in keys for fault in _key_faults("metadata.annotations", key, any_case=True))
    return [*_label_faults(metadata), *annotations, *_owner_faults(metadata)]


def _label_faults(metadata: Object) -> Iterator[FieldCause]:
    for key, value in (metadata.get("labels") or {}).items():
        yield from _key_faults("metadata.labels", key)
        if len(value) > 63:
            yield FieldCause("metadata.labels", f'Invalid value: "{value}": must be no more than 63 bytes')
        if not _LABEL_VALUE.fullmatch(value):
            yield FieldCause("metadata.labels", f'Invalid value: "{value}": {_LABEL_VALUE_RULE}')


def _key_faults(field: str, key: str, any_case: bool = False) -> Iterator[FieldCause]:
    prefix, slash, name = key.rpartition("/")
    if slash and not _SUBDOMAIN.fullmatch(prefix.lower() if any_case else prefix):
        yield FieldCause(field, f'Invalid value: "{key}": prefix part {_SUBDOMAIN_RULE}')
    if len(name) > 63:
        yield FieldCause(field, f'Invalid value: "{key}": name part must be no more than 63 bytes')
    if not _KEY_NAME.fullmatch(name):
        yield FieldCause(field, f'Invalid value: "{key}": {_KEY_RULE}')


def _owner_faults(metadata: Object) -> Iterator[FieldCause]:
    for owner in metadata.get("ownerReferences") or []:
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                why = "version must not be empty" if field == "apiVersion" else "must not be empty"
                yield FieldCause(f"metadata.ownerReferences.{field}", f'Invalid value: "": {why}')
    controllers = [o for o in metadata.get("ownerReferences") or [] if o.get("controller")]
    if len(controllers) > 1:
        why = "Only one reference can have Controller set to true"
        yield FieldCause("metadata.ownerReferences", f"Invalid value: {len(controllers)}: {why}")


_NO_EXECUTE_SECONDS = 300
_PROBE_DEFAULTS = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def _pod_defaults(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("securityContext", {})
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    spec.setdefault("priority", 0)
    if "serviceAccountName" in spec:
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        image = container.get("image", "")
        latest = image.endswith(":latest") or ":" not in image.rpartition("/")[2]
        container.setdefault("imagePullPolicy", "Always" if latest and "@" not in image else "IfNotPresent")
        for port in container.get("ports", []):
            port.setdefault("protocol", "TCP")
        for variable in container.get("env", []):
            if "fieldRef" in (source := variable.get("valueFrom") or {}):
                source["fieldRef"].setdefault("apiVersion", "v1")
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            if probe in container:
                container[probe] = found = _PROBE_DEFAULTS | container[probe]
                if "httpGet" in found:
                    found["httpGet"] = {"path": "/", "scheme": "HTTP"} | found["httpGet"]
    for volume in spec.get("volumes", []):
        if set(volume) == {"name"}:
            volume["emptyDir"] = {}
        for source in ("secret", "configMap", "projected"):
            if source in volume:
                volume[source].setdefault("defaultMode", 420)
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(_tolerates_no_execute(t, key) for t in tolerations):
            added = {"key": key, "operator": "Exists", "effect": "NoExecute"}
            tolerations.append({**added, "tolerationSeconds": _NO_EXECUTE_SECONDS})
    pod["status"] = {"phase": "Pending", "qosClass": _quality(spec)}


def _tolerates_no_execute(toleration: Object, key: str) -> bool:
    return bool(toleration.get("key", key) == key and toleration.get("effect", "NoExecute") == "NoExecute")


def _quality(spec: Object) -> str:
    """Returns the QoS class: Guaranteed if every container's cpu and memory limits equal its requests."""
    guaranteed, any_set = True, False
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        limits = container["resources"].get("limits") or {}
        requests = container["resources"].get("requests") or {}
        any_set = any_set or bool(limits or requests)
        guaranteed = guaranteed and all(
            name in limits and requests.get(name, limits[name]) == limits[name] for name in ("cpu", "memory")
        )
    return "Guaranteed" if guaranteed and any_set else "Burstable" if any_set else "BestEffort"


def _pod_faults(pod: Object) -> list[FieldCause]:
    containers = pod["spec"].get("containers") or []
    faults = [] if containers else [FieldCause("spec.containers", "Required value", "FieldValueRequired")]
    seen: set[str] = set()
    for field in ("initContainers", "containers"):
        for index, container in enumerate(pod["spec"].get(field) or []):
            at, name = f"spec.{field}[{index}]", container.get("name", "")
            if not name:
                faults.append(FieldCause(f"{at}.name", "Required value", "FieldValueRequired"))
            elif name in seen:
                faults.append(FieldCause(f"{at}.name", f'Duplicate value: "{name}"', "FieldValueDuplicate"))
            elif not DNS_LABEL.fullmatch(name):
                faults.append(FieldCause(f"{at}.name", f'Invalid value: "{name}": {DNS_LABEL_RULE}'))
            seen.add(name)
            if not container.get("image"):
                faults.append(FieldCause(f"{at}.image", "Required value", "FieldValueRequired"))
    return faults


def _node_defaults(node: Object) -> None:
    spec = node.setdefault("spec", {})
    node.setdefault("status", {})
    taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    if taint not in (taints := spec.setdefault("taints", [])):
        taints.append(taint)  # admission does this, so that nothing lands on a node before it was seen ready


def _namespace_defaults(namespace: Object) -> None:
    namespace.setdefault("spec", {})["finalizers"] = ["kubernetes"]
    labels = namespace["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = namespace["metadata"]["name"]
    namespace["status"] = {"phase": "Active"}


def _service_defaults(service: Object) -> None:
    spec = service.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    spec.setdefault("internalTrafficPolicy", "Cluster")
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    for port in spec.get("ports", []):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])
    if "clusterIP" in spec:
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    service["status"] = {"loadBalancer": {}}


def _secret_defaults(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    written = secret.pop("stringData", None) or {}
    if written:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in written.items()}
        secret["data"] = {**(secret.get("data") or {}), **encoded}


def _event_defaults(event: Object) -> None:
    for field in ("firstTimestamp", "lastTimestamp", "eventTime"):
        event.setdefault(field, None)
    event.setdefault("source", {})
    event.setdefault("reportingComponent", "")
    event.setdefault("reportingInstance", "")


def _event_faults(event: Object) -> list[FieldCause]:
    about, own = (event.get("involvedObject") or {}).get("namespace"), event["metadata"]["namespace"]
    if (about or "default") == own:
        return []
    why = f'Invalid value: "{about or ""}": does not match event.namespace'
    return [FieldCause("involvedObject.namespace", why)]


def check_types(kind: str, value: Object) -> None:
    """Raises ApiError 400 if a ConfigMap or Secret has a value that is no string, or not base64."""
    if kind not in ("ConfigMap", "Secret"):
        return
    for field in ("data", "stringData", "binaryData"):
        for item in (value.get(field) or {}).values():
            if not isinstance(item, str):
                why = (
                    f"json: cannot unmarshal {type(item).__name__} into Go struct field {kind}.{field} "
                    "of type string"
                )
                raise bad_request(f'{kind} in version "v1" cannot be handled as a {kind}: {why}')
            if kind == "Secret" and field == "data" and not _is_base64(item):
                why = "illegal base64 data at input byte 0"
                raise bad_request(f'Secret in version "v1" cannot be handled as a Secret: {why}')


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


_NO_DISRUPTION = {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0}
_ON_CREATE: dict[str, Callable[[Object], None]] = {
    "/pods": _pod_defaults,
    "/nodes": _node_defaults,
    "/namespaces": _namespace_defaults,
    "/services": _service_defaults,
    "/secrets": _secret_defaults,
    "/events": _event_defaults,
    "policy/poddisruptionbudgets": lambda budget: budget.update(status=dict(_NO_DISRUPTION)),
}


def prepare_new(collection: str, value: Object) -> list[FieldCause]:
    """Sets in place what the server sets on a new built-in object. Returns what is wrong with it."""
    if collection in _ON_CREATE:
        _ON_CREATE[collection](value)
    if collection == "/pods":
        return _pod_faults(value)
    if collection == "/events":
        return _event_faults(value)
    return []


def prepare_update(collection: str, new: Object, old: Object) -> list[FieldCause]:
    """Does the same for a change of the main resource. Returns the changes that are not allowed."""
    if collection == "/secrets":
        _secret_defaults(new)
        if new["type"] != old["type"]:
            return [FieldCause("type", f'Invalid value: "{new["type"]}": field is immutable')]
    if collection == "/services":
        old_ip = old["spec"].get("clusterIP")
        new_ip = new["spec"].setdefault("clusterIP", old_ip)
        if new_ip != old_ip:
            return [FieldCause("spec.clusterIPs[0]", f'Invalid value: ["{new_ip}"]: may not change once set')]
    if collection == "/pods":
        return _pod_update_faults(new["spec"], old["spec"])
    return []


def _pod_update_faults(new: Object, old: Object) -> list[FieldCause]:
    if _frozen(new) != _frozen(old) or not all(
        t in new.get("tolerations", []) for t in old.get("tolerations", [])
    ):
        message = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions "
            "to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it "
            "was previously negative)"
        )
        return [FieldCause("spec", message, "FieldValueForbidden")]
    return []


def _frozen(spec: Object) -> Object:
    def imageless(containers: list[Any]) -> list[Any]:
        return [{k: v for k, v in container.items() if k != "image"} for container in containers]

    kept = {k: v for k, v in spec.items() if k not in ("activeDeadlineSeconds", "tolerations")}
    return kept | {f: imageless(spec.get(f) or []) for f in ("containers", "initContainers")}
