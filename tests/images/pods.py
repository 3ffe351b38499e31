"""One pod on this machine, made from its manifest as a kubelet and its runtime make it."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.images.building import Config, image_name
from tests.images.container import Container, Mount, Settings
from tiercheck_local.node import environment
from tiercheck_local.node.environment import PodFacts, Roots

Object = Mapping[str, Any]

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_DEFAULT_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
"""What a runtime gives to containers whose manifest drops nothing."""


@dataclass(frozen=True)
class Image:
    """One that lies on the node."""

    root: Path
    config: Config


@dataclass
class Pod:
    """Adds to `manifest` what an API server adds by itself. `secrets`: name -> `data`."""

    manifest: dict[str, Any]
    ip: str
    folder: Path
    images: Mapping[str, Image]
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """That every container finds in its environment."""
    account: Path | None = None
    """Folder with a service account's token."""
    hosts: str = "127.0.0.1 localhost\n"
    """/etc/hosts"""
    containers: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        metadata = self.manifest.setdefault("metadata", {})
        for key, value in (("name", "pod"), ("namespace", "default"), ("uid", "0-1-2-3")):
            metadata.setdefault(key, value)
        self.folder.mkdir(parents=True)
        (self.folder / "hosts").write_text(self.hosts)
        self._numbers = itertools.count()
        roots = Roots(self.folder / "memory", self.folder / "scratch", self.folder / "claims")
        self._facts = PodFacts(self.manifest, "node", self.ip, self.ip, {})
        self._volumes = environment.prepare(self._facts, roots, self._lookup)
        group = (self.spec.get("securityContext") or {}).get("fsGroup")
        for volume in self.spec.get("volumes") or ():
            _hand_over(self._volumes[volume["name"]], volume, group)

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.manifest["spec"]
        return spec

    def start(self, name: str) -> Container:
        """The container of that name, started anew."""
        containers = [*(self.spec.get("initContainers") or ()), *self.spec["containers"]]
        (container,) = (entry for entry in containers if entry["name"] == name)
        image = self._image(container["image"])
        where = self.folder / f"{name}-{next(self._numbers)}"
        started = Container(
            f"{self.folder.name}-{where.name}", image.root, self._settings(container, image.config), where
        )
        self.containers.append(started)
        return started

    def remove(self) -> None:
        for container in self.containers:
            container.remove()

    def _image(self, reference: str) -> Image:
        """By the name that a runtime makes of it."""
        name, _, tag = reference.rpartition("/")[2].partition(":")
        assert tag, f"{reference}: without a tag it is pulled anew at every start"
        return self.images[image_name(name.removeprefix("tiercheck-"), tag)]

    def _settings(self, container: Object, image: Config) -> Settings:
        security = {**(self.spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
        owner, _, of = image.user.partition(":")
        user, group = int(security.get("runAsUser", owner or 0)), int(security.get("runAsGroup", of or 0))
        assert user or not security.get("runAsNonRoot"), "a kubelet would refuse to run it as root"
        variables = environment.environment(container, self._facts, self._lookup)
        words = [*(container.get("command") or image.entrypoint), *(container.get("args") or ())]
        dropped = (security.get("capabilities") or {}).get("drop") or ()
        return Settings(
            args=[environment.expand(word, variables) for word in words],
            env={**image.env, **self.variables, **variables},
            cwd=container.get("workingDir") or image.cwd,
            user=user,
            group=group,
            groups=[security["fsGroup"]] if "fsGroup" in security else [],
            mounts=[*self._mounts(container), Mount(self.folder / "hosts", "/etc/hosts")],
            read_only=bool(security.get("readOnlyRootFilesystem")),
            capabilities=() if "ALL" in dropped else _DEFAULT_CAPABILITIES,
            no_new_privileges=security.get("allowPrivilegeEscalation") is False,
            hostname=self.spec.get("hostname") or self.manifest["metadata"]["name"],
        )

    def _mounts(self, container: Object) -> list[Mount]:
        read_only = {
            entry["mountPath"]: bool(entry.get("readOnly")) for entry in container.get("volumeMounts") or ()
        }
        found = environment.mounts(container, self._volumes)
        mounts = [Mount(Path(folder), path, read_only[path]) for path, folder in found.items()]
        return (
            mounts
            if self.account is None
            else [*mounts, Mount(self.account, SERVICE_ACCOUNT, read_only=True)]
        )

    def _lookup(self, kind: str, name: str) -> dict[str, bytes] | None:
        data = self.secrets.get(name) if kind == "Secret" else None
        return None if data is None else {key: base64.b64decode(value) for key, value in data.items()}


def _hand_over(place: Path, volume: Object, group: int | None) -> None:
    """To the pod's users: an emptyDir is everybody's, and the fsGroup owns what is in a volume."""
    if "hostPath" in volume:
        return
    if "emptyDir" in volume:
        place.chmod(0o777)
    if group is not None:
        for path in (place, *place.rglob("*")):
            os.chown(path, -1, group)
