"""One pod on this machine, made from its manifest as a kubelet and its runtime make it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import datetime
import http.client
import itertools
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.access import Access
from tests.cluster.jobs import page
from tests.images.building import ROOT, Config, image_name
from tests.images.container import Container, Mount, Settings
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Directive, Peer, Phase
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Branch, History
from tiercheck_local.markers import free_ports
from tiercheck_local.node import environment
from tiercheck_local.node.environment import PodFacts, Roots
from tiercheck_operator.controller.attempt.directives import build_policy
from tiercheck_operator.kubernetes.certificates import issue, issue_pair
from tiercheck_operator.manifests.owned import build_secret
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.model.parsing import parse_job

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


# A worker's pod as the operator builds it, and what the operator would tell its sidecar.

_RESTRICTED = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
"""What a careful user writes into the template."""


StartPod = Callable[..., Pod]


class Worker:
    """The only one of examples/smallest.yaml, with `arguments` for its script and `spec` over its spec.

    `secrets`: further ones of its namespace, name -> `data`.
    """

    def __init__(
        self,
        start_pod: StartPod,
        arguments: list[str],
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        **spec: Any,
    ) -> None:
        manifest = yaml.safe_load((ROOT / "examples" / "smallest.yaml").read_text())
        manifest["metadata"].update(namespace="default", uid="0-1-2-3", generation=1, resourceVersion="1")
        manifest["spec"].update(workers=1, **spec)
        template = manifest["spec"]["template"]["spec"]
        (trainer,) = template["containers"]
        trainer["command"] += arguments
        trainer["securityContext"] = _RESTRICTED
        trainer["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
        template["volumes"] = [{"name": "tmp", "emptyDir": {}}]
        template["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        self.job = parse_job(manifest)
        self.credentials = issue(self.job.identity)
        secret = build_secret(self.job, self.credentials)
        pod = build_pod(self.job, 0, 0, [], f"tiercheck-sidecar:{tag_of(trainer['image'])}")
        self.pod: Pod = start_pod(
            pod, secrets={secret["metadata"]["name"]: secret["data"], **(secrets or {})}
        )

    def train(self) -> tuple[Container, Container]:
        """Its sidecar and its trainer, released for the first attempt, after the library was installed."""
        pod = self.pod
        assert pod.start(names.LIBRARY_CONTAINER).wait() == 0
        sidecar = pod.start(names.SIDECAR_CONTAINER)
        sidecar.wait_for(lambda: page(f"{pod.ip}:{names.METRICS_PORT}", "/readyz"), "readiness")
        trainer = pod.start(names.TRAINER_CONTAINER)
        self.tell(Phase.HOLD)
        self.tell(Phase.RELEASE)
        return sidecar, trainer

    def tell(self, phase: Phase) -> None:
        """As the operator does, for the first attempt, from scratch. Raises OSError."""
        directive, known = self._directive(phase), self.report()
        ordered = dataclasses.replace(
            directive, revision=phase.value, instance=known.instance, number=known.followed + 1
        )
        self._call("PUT", "/v1/directive", to_json(ordered))

    def report(self) -> Report:
        """Of its sidecar."""
        return from_json(self._call("GET", "/v1/report", None), Report)

    def _directive(self, phase: Phase) -> Directive:
        me = Peer(0, self.pod.ip)
        return Directive(
            job_uid=self.job.identity,
            worker=0,
            workers=1,
            procs_per_worker=1,
            attempt=1,
            phase=phase,
            history=History((Branch(1, 0, 1),)),
            policy=build_policy(self.job.spec),
            restore=None,
            holders=(),
            hosted=(),
            coordinator=me,
            master_host=self.pod.ip,
            master_port=free_ports(1)[0],
            pod_uid=self.pod.manifest["metadata"]["uid"],
        )

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        context = ssl.create_default_context(cadata=self.credentials.ca.decode())
        raw = socket.create_connection((self.pod.ip, names.CONTROL_PORT), timeout=10)
        connection = http.client.HTTPConnection(self.pod.ip, names.CONTROL_PORT)
        try:
            connection.sock = context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)
            key = Ed25519PrivateKey.from_private_bytes(self.credentials.operator_key)
            signature = key.sign(signing.pod_statement(self.pod.manifest["metadata"]["uid"])).hex()
            headers = {"Authorization": f"Bearer {self.credentials.token}", signing.HEADER: signature}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()


def tag_of(image: str) -> str:
    return image.rpartition("/")[2].partition(":")[2]


# The laptop cluster's API server as pods in a cluster reach theirs: over TLS, by a service account.


@contextmanager
def in_cluster(api: Access, folder: Path, namespace: str) -> Iterator[dict[str, str]]:
    """The variables that tell a pod where it is; `folder` becomes its service account's volume."""
    target = urlsplit(api.server)
    token = api.headers.get("Authorization", "").removeprefix("Bearer ") or "nobody-looks"
    pair = issue_pair("api", ["127.0.0.1"], datetime.timedelta(days=1))
    folder.mkdir()
    for name, content in (("ca.crt", pair.ca), ("token", token.encode()), ("namespace", namespace.encode())):
        (folder / name).write_bytes(content)
    chain = folder.with_suffix(".pem")
    chain.write_bytes(pair.certificate + b"\n" + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    listening: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def connected(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        try:
            server, requests = await asyncio.open_connection(target.hostname, target.port, ssl=api.tls)
            await asyncio.gather(_copy(client, requests), _copy(server, answers))
        except (OSError, asyncio.CancelledError):
            answers.close()  # one of them went away, or the test is over

    async def serve() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            listening.set_result((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    port, loop, stop = listening.result()
    try:
        yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Until the source ends; then the sink is told so."""
    try:
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
    finally:
        sink.close()
