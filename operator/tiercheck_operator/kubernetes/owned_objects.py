"""The job's Service, Secret and placement ConfigMap: read once, kept in mind, made when missing."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from tiercheck_operator.kubernetes.certificates import issue
from tiercheck_operator.kubernetes.client import CORE, ApiFailure, Kube
from tiercheck_operator.manifests import owned
from tiercheck_operator.manifests.gang import GANGS, build_gang
from tiercheck_operator.manifests.owned import (
    Credentials,
    build_budget,
    build_placement,
    build_secret,
    build_service,
    parse_placement,
    parse_secret,
)
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.saved_placement import SavedPlacement

log = logging.getLogger(__name__)

_SECRET = CORE + "/secrets/{name}"
_SERVICE = CORE + "/services/{name}"
_PLACEMENT = CORE + "/configmaps/{name}"
_BUDGETS = "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"


class Belongings:
    """Of one job. `refresh` asks the API server; every method raises ApiFailure."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.credentials: Credentials | None = None
        self.placement: SavedPlacement | None = None
        self.have_service = False
        self.have_secret = False
        self.budget: int | None = None
        self.budget_problem = ""
        self.have_gang = False
        self.gang_problem = ""

    async def refresh(self, job: JobView) -> None:
        """Look at what is there. Credentials once known are kept: running sidecars hold them, whatever
        becomes of the Secret."""
        secret = await self._kube.get(_SECRET, namespace=job.namespace, name=owned.credentials_name(job))
        self.have_secret = secret is not None and _owned_by(secret, job)
        if secret is not None and self.have_secret:
            try:
                self.credentials = parse_secret(secret)
            except ValueError as error:
                log.error("%s/%s: Secret %s: %s", job.namespace, job.name, owned.credentials_name(job), error)
        service = await self._kube.get(_SERVICE, namespace=job.namespace, name=owned.service_name(job))
        self.have_service = service is not None and _owned_by(service, job)
        saved = await self._kube.get(_PLACEMENT, namespace=job.namespace, name=owned.placement_name(job))
        self.placement = None
        if saved is not None and _owned_by(saved, job):
            try:
                self.placement = parse_placement(saved)
            except ValueError as error:
                log.error(
                    "%s/%s: ConfigMap %s: %s", job.namespace, job.name, owned.placement_name(job), error
                )
        self.gang_problem = ""  # worth another try
        if job.spec.attach is None:
            await self._refresh_budget(job)

    async def _refresh_budget(self, job: JobView) -> None:
        """A budget is worth having, and worth no failure."""
        self.budget, self.budget_problem = None, ""
        try:
            found = await self._kube.get(
                _BUDGETS + "/{name}", namespace=job.namespace, name=owned.budget_name(job)
            )
        except ApiFailure as error:
            if not error.refused:
                raise
            self._no_budget(job, f"the PodDisruptionBudget {owned.budget_name(job)} cannot be read: {error}")
            return
        if found is not None and _owned_by(found, job):
            self.budget = _min_available(found)
        elif found is not None:
            self._no_budget(
                job,
                f"the PodDisruptionBudget {owned.budget_name(job)} is not this job's; remove or rename it",
            )

    async def ensure_gang(self, job: JobView) -> None:
        """Raises ApiFailure if the server did not answer; what it refuses is said by `gang_problem` until the
        next `refresh`."""
        if self.gang_problem or job.spec.gang is None:
            return
        kind, name = GANGS[job.spec.gang], owned.gang_name(job)
        try:
            await self._kube.create(kind.path, build_gang(job), namespace=job.namespace)
        except ApiFailure as error:
            if error.conflict:
                found = await self._kube.get(kind.path + "/{name}", namespace=job.namespace, name=name)
                if found is None or not _owned_by(found, job):
                    self.gang_problem = (
                        f"the PodGroup {name} is not this job's; if it stays, remove or rename it"
                    )
                    return
                if any(
                    (found.get("spec") or {}).get(key) != value
                    for key, value in build_gang(job)["spec"].items()
                ):
                    # Of another size, from before a suspension that we did not see the end of.
                    await self.remove_gang(job)
                    return
            elif error.not_found:
                self.gang_problem = (
                    f"spec.gang.scheduler is {job.spec.gang}, and this cluster does not serve "
                    f"{kind.served}. Install that scheduler, or leave "
                    "spec.gang out"
                )
                return
            elif error.refused:
                self.gang_problem = (
                    f"the PodGroup {name} is refused: {error}. The operator needs rights "
                    "to it (chart: rbac.gangSchedulers)"
                )
                return
            else:
                raise
        self.have_gang = True

    async def remove_gang(self, job: JobView) -> None:
        if job.spec.gang is not None:
            path = GANGS[job.spec.gang].path + "/{name}"
            await self._kube.delete(path, {}, namespace=job.namespace, name=owned.gang_name(job))
        self.have_gang = False

    async def ensure_budget(self, job: JobView, min_available: int) -> None:
        """Raises nothing: what went wrong is said by `budget_problem`, and looked at again with the next
        `refresh`."""
        if self.budget_problem:
            return
        names = {"namespace": job.namespace, "name": owned.budget_name(job)}
        body = build_budget(job, min_available)
        try:
            if self.budget is None:
                await self._kube.create(_BUDGETS, body, namespace=job.namespace)
            else:
                await self._kube.merge(_BUDGETS + "/{name}", {"spec": body["spec"]}, **names)
            self.budget = min_available
        except ApiFailure as error:
            if error.refused:
                self._no_budget(
                    job, f"the PodDisruptionBudget {owned.budget_name(job)} cannot be written: {error}"
                )
            else:
                log.info("%s/%s: PodDisruptionBudget: %s", job.namespace, job.name, error)
                if error.conflict or error.not_found:
                    with contextlib.suppress(ApiFailure):
                        await self._refresh_budget(job)

    async def remove_budget(self, job: JobView) -> None:
        """As `ensure_budget`."""
        try:
            await self._kube.delete(
                _BUDGETS + "/{name}", {}, namespace=job.namespace, name=owned.budget_name(job)
            )
            self.budget = None
        except ApiFailure as error:
            log.warning("%s/%s: PodDisruptionBudget was not removed: %s", job.namespace, job.name, error)
            if error.refused:
                self.budget = None

    def _no_budget(self, job: JobView, problem: str) -> None:
        self.budget_problem = problem[:500]
        log.warning("%s/%s: %s", job.namespace, job.name, problem)

    async def ensure_credentials(self, job: JobView) -> None:
        credentials = self.credentials or issue(job.uid)
        try:
            await self._kube.create(
                CORE + "/secrets", build_secret(job, credentials), namespace=job.namespace
            )
        except ApiFailure as error:
            if not error.conflict:
                raise
            await self.refresh(job)
            if not self.have_secret:
                await self._refuse_strangers(_SECRET, "Secret", owned.credentials_name(job), job)
            return
        self.credentials, self.have_secret = credentials, True

    async def ensure_service(self, job: JobView) -> None:
        try:
            await self._kube.create(CORE + "/services", build_service(job), namespace=job.namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
            await self._refuse_strangers(_SERVICE, "Service", owned.service_name(job), job)
        self.have_service = True

    async def save_placement(self, job: JobView, placement: SavedPlacement) -> None:
        body = build_placement(job, placement)
        try:
            await self._kube.create(CORE + "/configmaps", body, namespace=job.namespace)
        except ApiFailure as error:
            if not error.conflict:
                raise
            await self._refuse_strangers(_PLACEMENT, "ConfigMap", owned.placement_name(job), job)
            await self._kube.replace(
                _PLACEMENT, body, namespace=job.namespace, name=owned.placement_name(job)
            )
        self.placement = placement

    async def _refuse_strangers(self, path: str, kind: str, name: str, job: JobView) -> None:
        """Of a job of the same name that was just deleted, and goes with it; or a person's."""
        found = await self._kube.get(path, namespace=job.namespace, name=name)
        if found is not None and not _owned_by(found, job):
            raise ApiFailure(422, f"{kind} {name} is not this job's; if it stays, remove or rename it")


def _min_available(raw: dict[str, Any]) -> int:
    """-1, which nobody wants, if it is not as we write it."""
    found = (raw.get("spec") or {}).get("minAvailable")
    return found if isinstance(found, int) else -1


def _owned_by(raw: dict[str, Any], job: JobView) -> bool:
    """A job deleted and created again must not take over what its namesake left behind."""
    metadata = raw.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return any(owner.get("uid") == job.uid for owner in owners or [])
