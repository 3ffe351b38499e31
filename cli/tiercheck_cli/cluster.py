"""Reads a job and what belongs to it from the API server, as the user of the kubeconfig. Nothing is ever written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import kubernetes
import urllib3
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError, InsecureRequestWarning

from tiercheck.protocol import names
from tiercheck.protocol.plain_json import parse_json
from tiercheck.redaction import redacted
from tiercheck_cli.failure import NO_ACCESS, NOT_FOUND, USAGE, CannotDo
from tiercheck_cli.terminal import remark
from tiercheck_operator.planning.saved_placement import SavedPlacement, placement_name, read_placement_data

Object = dict[str, Any]

_PAGE = 500
_CORE = "/api/v1"
_JOBS = f"/apis/{names.API_GROUP}/{names.API_VERSION}"


class Refused(CannotDo):
    """The API server understood and said no (403): some views can do without what was asked for."""


class Cluster:
    """One API server, one namespace. Every method raises CannotDo."""

    def __init__(self, configuration: kubernetes.client.Configuration, namespace: str, timeout: float = 15.0) -> None:
        # One try of each call: a person who waits wants to know, not to wait three times as long.
        configuration.retries = False
        if not configuration.verify_ssl and str(configuration.host).startswith("https"):
            urllib3.disable_warnings(InsecureRequestWarning)  # two lines for each request
            remark(
                f"the certificate of {configuration.host} is not checked: the kubeconfig has insecure-skip-tls-verify"
            )
        self._client = kubernetes.client.ApiClient(configuration)
        self._timeout = timeout
        self.namespace = namespace
        self.server = str(configuration.host)

    @staticmethod
    def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
        """As kubectl finds it: the given kubeconfig, $KUBECONFIG, ~/.kube/config, or the pod's own service account."""
        configuration = kubernetes.client.Configuration()
        config: Any = kubernetes.config
        # The client looks at $KUBECONFIG only once, when it is imported.
        path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        try:
            config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
            current = config.list_kube_config_contexts(config_file=path)
        except config.ConfigException as error:
            if kubeconfig is None and context is None:
                try:
                    config.load_incluster_config(client_configuration=configuration)
                    return Cluster(configuration, namespace or _own_namespace())
                except config.ConfigException:
                    pass
            raise CannotDo(
                f"no cluster to talk to: {_first_line(error)}. Set KUBECONFIG, or give --kubeconfig and --context",
                USAGE,
            ) from error
        contexts, active = current
        chosen = next((entry for entry in contexts if entry["name"] == context), active)
        return Cluster(configuration, namespace or chosen["context"].get("namespace") or "default")

    def job(self, name: str) -> Object:
        found = self._find(f"{_JOBS}/namespaces/{self._ns}/{names.PLURAL}/{quote(name)}")
        if found is None:
            raise CannotDo(
                f'there is no TierCheckJob "{name}" in namespace "{self.namespace}"; list them with: tiercheck status -A',
                NOT_FOUND,
            )
        return found

    def jobs(self, everywhere: bool = False) -> list[Object]:
        where = "" if everywhere else f"/namespaces/{self._ns}"
        return self._list(f"{_JOBS}{where}/{names.PLURAL}")

    def pods(self, job: Mapping[str, Any]) -> list[Object]:
        """Of this job, not of a namesake that was deleted."""
        return self._list(
            f"{_CORE}/namespaces/{self._ns}/pods", labelSelector=f"{names.LABEL_JOB_UID}={job['metadata']['uid']}"
        )

    def placement(self, job: Mapping[str, Any]) -> SavedPlacement | None:
        """None before the first attempt."""
        found = self.placement_object(job)
        try:
            return None if found is None else read_placement_data(found.get("data") or {})
        except ValueError as error:
            raise CannotDo(
                f"ConfigMap {placement_name(job['metadata']['name'])} cannot be read: {error}. "
                "Use the tiercheck that belongs to the operator's version"
            ) from error

    def placement_object(self, job: Mapping[str, Any]) -> Object | None:
        metadata = job["metadata"]
        found = self._find(f"{_CORE}/namespaces/{self._ns}/configmaps/{quote(placement_name(metadata['name']))}")
        owners = (found or {}).get("metadata", {}).get("ownerReferences") or []
        return found if any(owner.get("uid") == metadata["uid"] for owner in owners) else None

    def nodes(self) -> list[Object]:
        """Raises Refused where the user may not read nodes, which are not of any namespace."""
        return self._list(f"{_CORE}/nodes")

    def events(self, job: Mapping[str, Any]) -> list[Object]:
        """Of the job itself, oldest first."""
        metadata = job["metadata"]
        selector = f"involvedObject.kind={names.KIND},involvedObject.name={metadata['name']}"
        found = self._list(f"{_CORE}/namespaces/{self._ns}/events", fieldSelector=selector)
        return [event for event in found if event["involvedObject"].get("uid") in (None, "", metadata["uid"])]

    def log(self, namespace: str, pod: str, container: str | None = None, lines: int = 2000) -> str:
        query = {"tailLines": str(lines), "timestamps": "true"} | ({"container": container} if container else {})
        return self._raw(f"{_CORE}/namespaces/{quote(namespace)}/pods/{quote(pod)}/log?{urlencode(query)}").decode(
            errors="replace"
        )

    def pod_page(self, pod: str, port: int, path: str) -> str:
        """What a pod serves over plain HTTP, by way of the API server."""
        return self._raw(f"{_CORE}/namespaces/{self._ns}/pods/{quote(pod)}:{port}/proxy/{path}").decode(
            errors="replace"
        )

    def pods_labelled(self, selector: str) -> list[Object]:
        """In any namespace."""
        return self._list(f"{_CORE}/pods", labelSelector=selector)

    def uid(self) -> str:
        """What other clusters know this one by; empty where the user may not read the namespace kube-system."""
        try:
            found = self._find(f"{_CORE}/namespaces/kube-system") or {}
        except Refused:
            return ""
        return str((found.get("metadata") or {}).get("uid") or "")

    def version(self) -> str:
        return str(self._json("/version").get("gitVersion", "unknown"))

    @property
    def _ns(self) -> str:
        return quote(self.namespace)

    def _find(self, path: str) -> Object | None:
        try:
            return self._json(path)
        except CannotDo as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _list(self, path: str, **query: str) -> list[Object]:
        items: list[Object] = []
        following = ""
        while True:
            page = {"limit": str(_PAGE), **query} | ({"continue": following} if following else {})
            answer = self._json(f"{path}?{urlencode(page)}")
            items += answer.get("items") or []
            following = (answer.get("metadata") or {}).get("continue") or ""
            if not following:
                return items

    def _json(self, path: str) -> Object:
        try:
            return dict(parse_json(self._raw(path)))
        except (TypeError, ValueError) as error:
            raise CannotDo(f"the answer of the API server {self.server} cannot be read: {error}", NO_ACCESS) from error

    def _raw(self, path: str) -> bytes:
        try:
            request = self._client.param_serialize(
                "GET", path, header_params={"Accept": "application/json"}, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=self._timeout)
            data: bytes = response.read()  # type: ignore[no-untyped-call]
            status, said = int(response.status), _sentence(data) or str(response.reason)
        except ApiException as error:
            status, said, data = int(error.status or 0), _sentence(error.body) or str(error.reason), b""
        except (HTTPError, OSError) as error:
            raise CannotDo(
                f"the API server {self.server} does not answer: {_first_line(error)}. Check the context and the network",
                NO_ACCESS,
            ) from error
        except ValueError as error:  # a header that cannot be sent, and the error quotes it
            raise CannotDo(
                f"the API server {self.server} cannot be asked: {redacted(_first_line(error))}. Look at the token in the kubeconfig",
                NO_ACCESS,
            ) from None
        if 200 <= status < 300:
            return data
        if status == 404 and path.startswith(_JOBS) and "could not find" in said.lower():
            raise CannotDo(
                "this cluster does not know TierCheckJobs: install the chart, or check that the context is the right one"
            )
        if status == 404:
            raise CannotDo(said, NOT_FOUND)
        if status == 401:
            raise CannotDo(f"the API server {self.server} does not accept your credentials; log in again", NO_ACCESS)
        if status == 403:
            raise Refused(
                f"{said}. Ask for the chart's role tiercheck-viewer, or for view, in that namespace", NO_ACCESS
            )
        raise CannotDo(f"the API server answered {status}: {said}", NO_ACCESS)


def _own_namespace() -> str:
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip() or "default"
    except OSError:
        return "default"


def _sentence(body: bytes | str | None) -> str:
    """The message of a Status object."""
    try:
        return str(parse_json(body or b"{}").get("message") or "")
    except (ValueError, AttributeError):
        return (body.decode(errors="replace") if isinstance(body, bytes) else str(body or ""))[:300].strip()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
