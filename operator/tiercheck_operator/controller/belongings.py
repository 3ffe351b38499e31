"""The job's Service, Secret and placement ConfigMap: read once, kept in mind, made when missing."""

from __future__ import annotations

import logging

from tiercheck_operator.controller.observation import JobView
from tiercheck_operator.credentials import issue
from tiercheck_operator.kube import CORE, ApiFailure, Kube
from tiercheck_operator.manifests import owned
from tiercheck_operator.manifests.placement import build_placement, parse_placement
from tiercheck_operator.manifests.secret import Credentials, build_secret, parse_secret
from tiercheck_operator.manifests.service import build_service
from tiercheck_operator.planning.saved_placement import SavedPlacement

log = logging.getLogger(__name__)

_SECRET = CORE + "/secrets/{name}"
_SERVICE = CORE + "/services/{name}"
_PLACEMENT = CORE + "/configmaps/{name}"


class Belongings:
    """Of one job. `refresh` asks the API server; every method raises ApiFailure."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.credentials: Credentials | None = None
        self.placement: SavedPlacement | None = None
        self.have_service = False
        self.have_secret = False

    async def refresh(self, job: JobView) -> None:
        """Look at what is there. Credentials once known are kept: running sidecars hold them, whatever becomes of the Secret."""
        secret = await self._kube.get(_SECRET, namespace=job.namespace, name=owned.credentials_name(job))
        self.have_secret = secret is not None and _owned_by(secret, job)
        if secret is not None and self.have_secret:
            try:
                self.credentials = parse_secret(secret)
            except ValueError as error:
                log.error("%s/%s: Secret %s: %s", job.namespace, job.name, owned.credentials_name(job), error)
        service = await self._kube.get(_SERVICE, namespace=job.namespace, name=owned.service_name(job))
        self.have_service = service is not None
        saved = await self._kube.get(_PLACEMENT, namespace=job.namespace, name=owned.placement_name(job))
        self.placement = None
        if saved is not None and _owned_by(saved, job):
            try:
                self.placement = parse_placement(saved)
            except ValueError as error:
                log.error("%s/%s: ConfigMap %s: %s", job.namespace, job.name, owned.placement_name(job), error)

    async def ensure_credentials(self, job: JobView) -> None:
        credentials = self.credentials or issue(job.uid)
        try:
            await self._kube.create(CORE + "/secrets", build_secret(job, credentials), namespace=job.namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
            await self.refresh(job)
            if not self.have_secret:
                # Of a job of the same name that was just deleted, and goes with it; or a person's.
                name = owned.credentials_name(job)
                raise ApiFailure(422, f"Secret {name} is not this job's; if it stays, remove or rename it") from error
            return
        self.credentials, self.have_secret = credentials, True

    async def ensure_service(self, job: JobView) -> None:
        try:
            await self._kube.create(CORE + "/services", build_service(job), namespace=job.namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
        self.have_service = True

    async def save_placement(self, job: JobView, placement: SavedPlacement) -> None:
        body = build_placement(job, placement)
        try:
            await self._kube.create(CORE + "/configmaps", body, namespace=job.namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
            await self._kube.replace(_PLACEMENT, body, namespace=job.namespace, name=owned.placement_name(job))
        self.placement = placement


def _owned_by(raw: dict[str, object], job: JobView) -> bool:
    """A job deleted and created again must not take over what its namesake left behind."""
    metadata = raw.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return any(owner.get("uid") == job.uid for owner in owners or [])
