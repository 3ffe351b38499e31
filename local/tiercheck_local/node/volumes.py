"""Makes volumes folders of the host: memory ones in shared memory, others under a short path.

Short, because a Unix socket's path has 107 bytes at most. Sizes are not enforced; `sizeLimit` is for the
reader.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercheck_local.node.environment import BadReference, Lookup, PodFacts, field


class PathTranslation:
    """Call it with a text; it returns the text as the host process must see it.

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


Object = Mapping[str, Any]

_NODE_MEMORY = ("/dev/shm", "/run")
"""Where a Linux node has a tmpfs."""


@dataclass(frozen=True)
class Roots:
    """Where a node keeps its pods' folders. `claims` is shared by the nodes of a cluster."""

    memory: Path
    scratch: Path
    claims: Path

    def of_pod(self, uid: str) -> tuple[Path, Path]:
        """Memory and scratch folder of one pod."""
        return self.memory / uid[:13], self.scratch / uid[:13]

    def on_node(self, path: Path) -> Path:
        """Where a hostPath lies. The nodes share this machine's disk, but each has a memory of its own, gone
        when it is killed."""
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
    """Make every volume of the pod; name to folder (a hostPath: file). Idempotent. Raises BadReference."""
    return {
        volume["name"]: _prepare(volume, facts, roots, lookup)
        for volume in facts.pod["spec"].get("volumes") or []
    }


def mounts(container: Object, volumes: Mapping[str, Path]) -> dict[str, str]:
    """Mount path to host path. Raises BadReference for a mount without volume."""
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
