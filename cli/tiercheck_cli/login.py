"""Finds the API server and the user's credentials as kubectl does.

Kubeconfigs, and the programs that they name for credentials, are the business of the kubernetes package; its
model classes are not used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
from kubernetes.client.rest import RESTClientObject

from tiercheck_operator.kubernetes.api_server import ApiServer


class UserAccess:
    """What a kubeconfig says: proxies, authorities, and a token that is fetched anew when it ends."""

    def __init__(self, configuration: kubernetes.client.Configuration) -> None:
        # One try of each call: whoever waits wants to know, and nothing is to be written twice.
        configuration.retries = False
        self._configuration = configuration
        self._pool: urllib3.PoolManager = RESTClientObject(configuration).pool_manager
        self.server = str(configuration.host)

    def pool(self) -> urllib3.PoolManager:
        return self._pool

    def headers(self) -> Mapping[str, str]:
        token = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return {"Authorization": token} if token else {}


def open_local(kubeconfig: Path) -> ApiServer:
    """The server of the laptop cluster that this file names: many calls at once, no proxy between."""
    configuration, _ = configured(str(kubeconfig), None)
    configuration.proxy = None
    configuration.connection_pool_maxsize = 16
    return ApiServer(UserAccess(configuration), timeout=30.0)


def configured(kubeconfig: str | None, context: str | None) -> tuple[kubernetes.client.Configuration, str]:
    """Where the server is and who we are, as kubectl finds it, and the namespace to look into.

    That is the given kubeconfig, $KUBECONFIG, ~/.kube/config, or the pod's own service account. Raises
    ConfigException.
    """
    configuration = kubernetes.client.Configuration()
    config: Any = kubernetes.config
    # The client looks at $KUBECONFIG only once, when it is imported.
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
