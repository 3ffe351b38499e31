"""Prepares a container's environment, command line and volumes, as a kubelet does."""

from __future__ import annotations

import base64
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercheck_local.client import Client
from tiercheck_operator.kubernetes.api_server import CONFIG_MAPS, SECRETS
from tiercheck_operator.model.serialization import parse_amount

Object = Mapping[str, Any]
Lookup = Callable[[str, str], Mapping[str, bytes] | None]
"""("Secret" or "ConfigMap", name) -> its data, or None."""


class BadReference(ValueError):
    """A name, key or field that the container refers to does not exist: CreateContainerConfigError."""


@dataclass(frozen=True)
class PodFacts:
    """A pod's manifest, and what the downward API provides beyond it."""

    pod: Object
    node: str
    pod_ip: str
    host_ip: str
    allocatable: Mapping[str, str]


def environment(container: Object, facts: PodFacts, lookup: Lookup) -> dict[str, str]:
    """Returns the variables that the manifest asks for. Raises BadReference."""
    result: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if key in source:
                data = _data(kind, source[key], lookup)
                result.update({source.get("prefix", "") + name: value for name, value in data.items()})
    for entry in container.get("env") or []:
        if entry.get("valueFrom"):
            value = _value_from(entry["valueFrom"], container, facts, lookup)
            if value is not None:
                result[entry["name"]] = value
        else:
            result[entry["name"]] = expand(str(entry.get("value") or ""), result)
    return result


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `$(NAME)` where NAME is known; `$$` is a literal `$`."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return re.sub(r"\$\$|\$\(([^)]+)\)", replace, text)


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Returns command and arguments. Images are not read, so a command is required. Raises BadReference."""
    words: Sequence[str] = [*(container.get("command") or []), *(container.get("args") or [])]
    if not container.get("command"):
        raise BadReference("the laptop cluster does not look into images: the container needs a command")
    return [expand(word, variables) for word in words]


def _data(kind: str, reference: Object, lookup: Lookup) -> Mapping[str, str]:
    data = lookup(kind, reference["name"])
    if data is None and not reference.get("optional"):
        raise BadReference(f"{kind.lower()} {reference['name']!r} not found")
    return {key: value.decode(errors="replace") for key, value in (data or {}).items()}


def _value_from(source: Object, container: Object, facts: PodFacts, lookup: Lookup) -> str | None:
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if key in source:
            reference = source[key]
            data = _data(kind, reference, lookup)
            if reference["key"] not in data and not reference.get("optional"):
                raise BadReference(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
            return data.get(reference["key"])
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], facts)
    if "resourceFieldRef" in source:
        return _resource(source["resourceFieldRef"], container, facts)
    raise BadReference(f"unsupported valueFrom: {', '.join(source)}")


def field(path: str, facts: PodFacts) -> str:
    """Returns a field of the downward API. Raises BadReference."""
    metadata, spec = facts.pod["metadata"], facts.pod["spec"]
    keyed = re.match(r"^metadata\.(labels|annotations)\['([^']+)'\]$", path)
    if keyed:
        return str((metadata.get(keyed.group(1)) or {}).get(keyed.group(2), ""))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "metadata.labels": _listed(metadata.get("labels")),
        "metadata.annotations": _listed(metadata.get("annotations")),
        "spec.nodeName": facts.node,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
    }
    if path not in simple:
        raise BadReference(f"unsupported fieldPath {path!r}")
    return str(simple[path])


def _listed(entries: Mapping[str, str] | None) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted((entries or {}).items()))


def _resource(reference: Object, container: Object, facts: PodFacts) -> str:
    section, _, name = reference["resource"].partition(".")
    resources = container.get("resources") or {}
    amount = (resources.get(section) or {}).get(name)
    if amount is None:  # as a kubelet: without a limit, what the node has
        amount = facts.allocatable.get(name, "0") if section == "limits" else "0"
    divisor = parse_amount(reference.get("divisor") or "1") or 1
    return str(math.ceil(parse_amount(amount) / divisor))


_COLLECTIONS = {"Secret": SECRETS, "ConfigMap": CONFIG_MAPS}


def _names(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (kind, name) of every Secret and ConfigMap that the pod's spec refers to."""
    if isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in {"secretRef", "secretKeyRef", "secret"} and isinstance(item, Mapping):
                yield "Secret", item.get("secretName") or item.get("name", "")
            elif key in {"configMapRef", "configMapKeyRef", "configMap"} and isinstance(item, Mapping):
                yield "ConfigMap", item.get("name", "")
            else:
                yield from _names(item)


async def fetch_references(client: Client, pod: Mapping[str, Any]) -> Lookup:
    """Returns a lookup over what exists now."""
    known: dict[tuple[str, str], dict[str, bytes]] = {}
    for kind, name in set(_names(pod["spec"])):
        found = await client.find(_COLLECTIONS[kind], pod["metadata"]["namespace"], name) if name else None
        if found is None:
            continue
        encoded = found.get("binaryData" if kind == "ConfigMap" else "data") or {}
        known[kind, name] = {key: base64.b64decode(value) for key, value in encoded.items()}
        if kind == "ConfigMap":
            known[kind, name] |= {key: text.encode() for key, text in (found.get("data") or {}).items()}
    return lambda kind, name: known.get((kind, name))


# Memory volumes are folders in shared memory, others lie under a short path: a Unix socket's path has 107
# bytes at most. Sizes are not enforced; `sizeLimit` is for the reader.
class PathTranslation:
    """Translates a text into the form that the host process must see.

    In environment values, command and arguments, every occurrence of a mount path of the container, alone or
    as the beginning of a longer path, is replaced. It must begin a path (start of the text, or after a
    character that no path contains, such as ":" "=" or a space, or after "://") and end at a "/" or where the
    path ends; so "/data" is found in "A:/data/x" but neither in "/srv/data" nor in "/database". The longest
    mount path wins, and what was replaced is not looked at again.
    """

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self._hosts = {path.rstrip("/"): host for path, host in mounts.items() if path.rstrip("/")}
        longest_first = sorted(self._hosts, key=len, reverse=True)
        begins = r"(?:(?<![\w./~-])|(?<=://))"
        ends = r"(?=/|[^\w.-]|\.(?![\w])|$)"
        self._pattern = (
            re.compile(begins + "(" + "|".join(map(re.escape, longest_first)) + ")" + ends)
            if longest_first
            else None
        )

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._hosts[match.group(1)], text)


_NODE_MEMORY = ("/dev/shm", "/run")
"""The folders that are a tmpfs on a Linux node."""


@dataclass(frozen=True)
class Roots:
    """The folders in which a node keeps its pods' files. `claims` is shared by the nodes of a cluster."""

    memory: Path
    scratch: Path
    claims: Path

    def of_pod(self, uid: str) -> tuple[Path, Path]:
        """Returns the memory and the scratch folder of one pod."""
        return self.memory / uid[:13], self.scratch / uid[:13]

    def on_node(self, path: Path) -> Path:
        """Returns the host path of a hostPath.

        The nodes share this machine's disk, but each has a memory of its own, gone when it is killed."""
        in_memory = any(path.is_relative_to(place) for place in _NODE_MEMORY)
        if not in_memory or path.is_relative_to(tempfile.gettempdir()):
            return path
        return self.memory / "node" / path.relative_to("/")

    def remove(self, uid: str) -> None:
        for folder in self.of_pod(uid):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_all(self) -> None:
        for folder in (self.memory, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)


def prepare(facts: PodFacts, roots: Roots, lookup: Lookup) -> dict[str, Path]:
    """Makes the pod's volumes; returns their paths by name. Idempotent. Raises BadReference."""
    return {
        volume["name"]: _prepare(volume, facts, roots, lookup)
        for volume in facts.pod["spec"].get("volumes") or []
    }


def mounts(container: Object, volumes: Mapping[str, Path]) -> dict[str, str]:
    """Returns host paths by mount path. Raises BadReference for a mount without volume."""
    result = {}
    for mount in container.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise BadReference(f"volume {mount['name']!r} is mounted but not defined")
        folder = volumes[mount["name"]]
        if mount.get("subPath"):
            folder = folder / mount["subPath"]
            if not folder.exists():
                folder.mkdir(parents=True)
        result[mount["mountPath"]] = str(folder)
    return result


def _prepare(volume: Object, facts: PodFacts, roots: Roots, lookup: Lookup) -> Path:
    memory, scratch = roots.of_pod(facts.pod["metadata"]["uid"])
    folder: Path = scratch / volume["name"]
    if "emptyDir" in volume:
        if (volume["emptyDir"] or {}).get("medium") == "Memory":
            folder = memory / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
    elif "hostPath" in volume:
        folder = roots.on_node(Path(volume["hostPath"]["path"]))
        if volume["hostPath"].get("type") == "DirectoryOrCreate":
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.exists():
            raise BadReference(f"hostPath {folder} does not exist; use type DirectoryOrCreate to make it")
    elif "persistentVolumeClaim" in volume:
        folder = (
            roots.claims / facts.pod["metadata"]["namespace"] / volume["persistentVolumeClaim"]["claimName"]
        )
        folder.mkdir(parents=True, exist_ok=True)
    else:
        files = _files(volume, facts, lookup)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (content, mode) in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_bytes(content)
            file.chmod(mode)
    return folder


def _files(volume: Object, facts: PodFacts, lookup: Lookup) -> dict[str, tuple[bytes, int]]:
    if "projected" in volume:
        result: dict[str, tuple[bytes, int]] = {}
        mode = volume["projected"].get("defaultMode", 0o644)
        for source in volume["projected"].get("sources") or []:
            result.update(_source_files(source, mode, facts, lookup))
        return result
    kinds = [kind for kind in ("secret", "configMap", "downwardAPI") if kind in volume]
    if not kinds:
        raise BadReference(f"volume {volume['name']!r} is of a kind that the laptop cluster does not have")
    return _source_files(volume, (volume[kinds[0]] or {}).get("defaultMode", 0o644), facts, lookup)


def _source_files(source: Object, mode: int, facts: PodFacts, lookup: Lookup) -> dict[str, tuple[bytes, int]]:
    if "downwardAPI" in source:
        return {
            item["path"]: (field(item["fieldRef"]["fieldPath"], facts).encode(), item.get("mode", mode))
            for item in source["downwardAPI"].get("items") or []
            if "fieldRef" in item
        }
    for kind, key in (("Secret", "secret"), ("ConfigMap", "configMap")):
        if key in source:
            reference = source[key]
            name = reference.get("secretName") or reference.get("name", "")
            data = lookup(kind, name)
            if data is None:
                if reference.get("optional"):
                    return {}
                raise BadReference(f'MountVolume.SetUp failed: {kind.lower()} "{name}" not found')
            items = reference.get("items")
            if not items:
                return {name: (content, mode) for name, content in data.items()}
            missing = [item["key"] for item in items if item["key"] not in data]
            if missing and not reference.get("optional"):
                raise BadReference(f"{kind.lower()} {name!r} has no key {missing[0]!r}")
            return {
                item["path"]: (data[item["key"]], item.get("mode", mode))
                for item in items
                if item["key"] in data
            }
    raise BadReference(f"unsupported projected source: {', '.join(source)}")
