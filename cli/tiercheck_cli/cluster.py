"""Finds the API server as kubectl does, and reads a job and its objects.

It acts as the user of the kubeconfig, and never writes. The kubernetes package handles kubeconfigs and the
programs that they name for credentials; its model classes are not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import kubernetes
import urllib3
from kubernetes.client.rest import RESTClientObject
from urllib3.exceptions import InsecureRequestWarning

from tiercheck.protocol import names
from tiercheck_cli.failure import NO_ACCESS, NOT_FOUND, USAGE, CannotDo, program
from tiercheck_cli.terminal import remark
from tiercheck_operator.kubernetes.api_server import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    ApiFailure,
    ApiServer,
    Object,
    first_line,
)
from tiercheck_operator.model.saved_placement import SavedPlacement, placement_name, read_placement_data


class UserAccess:
    """The access in a kubeconfig: proxies, authorities, and a token that is fetched again when it expires."""

    def __init__(self, configuration: kubernetes.client.Configuration) -> None:
        # One try of each call: the user shall see a failure at once, and nothing may be written twice.
        configuration.retries = False
        self._configuration = configuration
        self._pool: urllib3.PoolManager = RESTClientObject(configuration).pool_manager
        self.server = str(configuration.host)

    def pool(self) -> urllib3.PoolManager:
        return self._pool

    def headers(self) -> Mapping[str, str]:
        token = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return {"Authorization": token} if token else {}


def configured(kubeconfig: str | None, context: str | None) -> tuple[kubernetes.client.Configuration, str]:
    """Returns the client configuration, as kubectl finds it, and the namespace to read.
    It is from the given kubeconfig, $KUBECONFIG, ~/.kube/config, or the pod's own service account. Raises
    ConfigException."""
    configuration = kubernetes.client.Configuration()
    config: Any = kubernetes.config
    # The client reads $KUBECONFIG only once, when it is imported.
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    try:
        config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(config_file=path)
    except config.ConfigException as error:
        if kubeconfig is not None or context is not None:
            raise
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            raise error from None
        own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return configuration, (own.read_text().strip() if own.is_file() else "") or "default"
    chosen = next((entry for entry in contexts if entry["name"] == context), active)
    return configuration, chosen["context"].get("namespace") or "default"


T = TypeVar("T")

_ADVICE = {
    "NoAnswer": "Check the context and the network",
    "BadRequest": "Look at the token in the kubeconfig",
}


class Forbidden(CannotDo):
    """The API server refused the request (403); some views work without the answer."""


class Cluster:
    """One API server, one namespace. Every method raises CannotDo."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server = server
        self.namespace = namespace

    @staticmethod
    def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
        """Connects as kubectl does, with the kubeconfig, context and namespace that `configured` finds."""
        try:
            configuration, usual = configured(kubeconfig, context)
        except kubernetes.config.ConfigException as error:
            raise CannotDo(
                f"no cluster to talk to: {first_line(error)} (kubeconfig: "
                f"{kubeconfig or os.environ.get('KUBECONFIG') or '~/.kube/config'}). Set KUBECONFIG, or give "
                "--kubeconfig and --context",
                USAGE,
            ) from error
        if not configuration.verify_ssl and str(configuration.host).startswith("https"):
            urllib3.disable_warnings(InsecureRequestWarning)  # two lines for each request
            remark(
                f"the certificate of {configuration.host} is not checked: the kubeconfig has "
                "insecure-skip-tls-verify"
            )
        return Cluster(ApiServer(UserAccess(configuration)), namespace or usual)

    def job(self, name: str) -> Object:
        try:
            return self._ask(self._server.get, JOBS, self.namespace, name)
        except CannotDo as error:
            if error.status != NOT_FOUND:
                raise
            where = f'in namespace "{self.namespace}"; list them with: {program()} status -A'
            raise CannotDo(f'there is no TierCheckJob "{name}" {where}', NOT_FOUND) from error

    def jobs(self, everywhere: bool = False) -> list[Object]:
        return self._ask(self._server.list, JOBS, None if everywhere else self.namespace)

    def pods(self, job: Mapping[str, Any]) -> list[Object]:
        """Returns the pods of this job, not of a deleted job of the same name."""
        selector = f"{names.LABEL_JOB_UID}={job['metadata']['uid']}"
        return self._ask(self._server.list, PODS, self.namespace, selector)

    def placement(self, job: Mapping[str, Any]) -> SavedPlacement | None:
        """Returns the saved placement; None before the first attempt."""
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
        found = self._ask(self._server.find, CONFIG_MAPS, self.namespace, placement_name(metadata["name"]))
        owners = (found or {}).get("metadata", {}).get("ownerReferences") or []
        return found if any(owner.get("uid") == metadata["uid"] for owner in owners) else None

    def nodes(self) -> list[Object]:
        """Returns all nodes. Raises Forbidden if the user may not read nodes, which are in no namespace."""
        return self._ask(self._server.list, NODES)

    def events(self, job: Mapping[str, Any]) -> list[Object]:
        """Returns the Events about the job itself, in the API server's order."""
        metadata = job["metadata"]
        selector = f"involvedObject.kind={names.KIND},involvedObject.name={metadata['name']}"
        found = self._ask(self._server.list, EVENTS, self.namespace, "", selector)
        return [event for event in found if event["involvedObject"].get("uid") in (None, "", metadata["uid"])]

    def log(self, namespace: str, pod: str, container: str | None = None, lines: int = 2000) -> str:
        query = {"tailLines": str(lines), "timestamps": "true"} | (
            {"container": container} if container else {}
        )
        return self._text(f"{PODS.path(namespace, pod, 'log')}?{urlencode(query)}")

    def pod_page(self, pod: str, port: int, path: str) -> str:
        """Returns a page that a pod serves over plain HTTP, by way of the API server."""
        return self._text(f"{PODS.path(self.namespace, f'{pod}:{port}', 'proxy')}/{path}")

    def pods_labelled(self, selector: str) -> list[Object]:
        """Returns the pods of all namespaces that match the selector."""
        return self._ask(self._server.list, PODS, None, selector)

    def uid(self) -> str:
        """Returns the UID of namespace kube-system, which identifies the cluster; empty if unreadable."""
        try:
            found = self._ask(self._server.find, NAMESPACES, None, "kube-system") or {}
        except Forbidden:
            return ""
        return str((found.get("metadata") or {}).get("uid") or "")

    def version(self) -> str:
        return str(self._ask(self._server.request, "GET", "/version").get("gitVersion", "unknown"))

    def _text(self, path: str) -> str:
        return self._ask(self._server.read, "GET", path).decode(errors="replace")

    def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        try:
            return call(*arguments)
        except ApiFailure as failure:
            raise self._cannot(failure, at_jobs=JOBS in arguments) from failure

    def _cannot(self, failure: ApiFailure, at_jobs: bool) -> CannotDo:
        said = failure.message
        match failure.status:
            case 0:
                advice = _ADVICE.get(failure.reason)
                return CannotDo(f"{said}. {advice}" if advice else said, NO_ACCESS)
            case 404 if at_jobs and "could not find" in said.lower():
                return CannotDo(
                    "this cluster does not know TierCheckJobs: "
                    "install the chart, or check that the context is the right one"
                )
            case 404:
                return CannotDo(said, NOT_FOUND)
            case 401:
                return CannotDo(
                    f"the API server {self._server.url} does not accept your credentials; log in again",
                    NO_ACCESS,
                )
            case 403:
                return Forbidden(
                    f"{said}. Ask for the chart's role tiercheck-viewer, or for view, in that namespace",
                    NO_ACCESS,
                )
            case code:
                return CannotDo(f"the API server answered {code}: {said}", NO_ACCESS)
