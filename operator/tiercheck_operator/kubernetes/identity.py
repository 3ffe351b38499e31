"""Who this operator is: the Deployment that owns its objects, and the cluster it runs in.

What the operator makes for itself belongs to its Deployment, so that Kubernetes removes it when the operator
is uninstalled. The reference is set when such a thing is made, and never changed: to change one, an account
must be allowed to delete the thing.

Clusters that share a bucket know each other by the UID of the namespace kube-system, which lives as long as
its cluster does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tiercheck_operator.kubernetes.client import ApiFailure, Kube

DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


def owner_metadata(deployment: Mapping[str, Any] | None) -> dict[str, Any]:
    """To be merged into an object's metadata; nothing without a Deployment, as for an operator that was
    started by hand."""
    if deployment is None:
        return {}
    metadata = deployment["metadata"]
    reference = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {"ownerReferences": [reference]}


log = logging.getLogger(__name__)

_PATH = "/api/v1/namespaces/kube-system"


class ClusterIdentity:
    """Asked for when a pod is made, and remembered."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._uid = ""
        self._warned = False

    async def uid(self) -> str:
        """Empty if this operator may not know it. Raises ApiFailure if the server does not answer."""
        if not self._uid:
            try:
                found = await self._kube.get(_PATH) or {}
            except ApiFailure as error:
                if not error.refused:
                    raise
                if not self._warned:
                    log.warning(
                        "the namespace kube-system cannot be read (%s): a job that is created again "
                        "under its old name has to take "
                        "over its remote tier explicitly. Give the operator the right to get it "
                        "(deploy/operator.yaml)",
                        error,
                    )
                self._warned, found = True, {}
            self._uid = str((found.get("metadata") or {}).get("uid") or "")
        return self._uid
