"""A worker's pod as the operator builds it, and what the operator would tell its sidecar."""

from __future__ import annotations

import dataclasses
import http.client
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.images.building import ROOT
from tests.images.conftest import StartPod
from tests.images.container import Container
from tests.images.pods import Pod
from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Directive, Peer, Phase
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Branch, History
from tiercheck_local.addresses import free_ports
from tiercheck_operator.controller.attempt.directives import build_policy
from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.manifests.owned import build_secret
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.model.parsing import parse_job

_RESTRICTED = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
"""What a careful user writes into the template."""


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
        sidecar.wait_for(lambda: answers(f"{pod.ip}:{names.METRICS_PORT}", "/readyz"), "readiness")
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


def answers(address: str, path: str) -> bool:
    """Whether the page is there, by plain HTTP."""
    host, _, port = address.rpartition(":")
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
