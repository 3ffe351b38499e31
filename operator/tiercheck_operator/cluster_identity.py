"""What a cluster is known by to other clusters that share its bucket: the UID of its namespace kube-system, which lives as long as it does."""

from __future__ import annotations

import logging

from tiercheck_operator.kube import ApiFailure, Kube

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
                        "the namespace kube-system cannot be read (%s): a job that is created again under its old name has to take "
                        "over its remote tier explicitly. Give the operator the right to get it (deploy/operator.yaml)",
                        error,
                    )
                self._warned, found = True, {}
            self._uid = str((found.get("metadata") or {}).get("uid") or "")
        return self._uid
