"""Brings the versions that the coordinator names to the remote tier, at the rate that the job allows.

Worker 0 also writes the manifest, once every rank's object is there, and forgets what is older than the job
keeps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, Manifest, RankArtifact, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.offload.remote_inventory import RemoteListing
from tiercheck_sidecar.offload.remote_source import JobStore
from tiercheck_sidecar.remote import RemoteConfigError, RemoteCorrupt, RemoteError, RemoteStore
from tiercheck_sidecar.vault import NotHeld, Vault
from tiercheck_sidecar.vault.verification import evict_if_bad

log = logging.getLogger(__name__)

_BACKOFF = (0.5, 15.0)
_ISOLATED = 60.0
"""Seconds without a word from the controller or any peer after which nothing more is uploaded: the job has
probably moved on."""
_LONELY = (
    "neither the controller nor any peer has been heard for a minute, so nothing is uploaded. "
    "Check the node's network"
)


class Uploader:
    """Thread-safe; `run` is one thread. Does nothing where the job has no remote tier."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        stores: JobStore,
        inventory: RemoteListing,
        due_manifest: Callable[[], Manifest | None],
    ) -> None:
        """`due_manifest`: the one to write now, if there is one; the coordinator knows."""
        self._state, self._vault, self._stores = state, vault, stores
        self._inventory, self._due_manifest = inventory, due_manifest
        self._lock = threading.Lock()
        self._uploaded: dict[int, RankArtifact] = {}
        self._announced = 0
        """The attempt that this worker has made known in the remote tier."""

    def uploaded(self, rank: int, verdict: TierVerdict | None) -> tuple[RankArtifact, ...]:
        """The rank's upload of the version that is wanted now, if it is done."""
        with self._lock:
            artifact = self._uploaded.get(rank)
        return (artifact,) if artifact and verdict and artifact.version == verdict.upload else ()

    def run(self) -> None:
        if not self._stores.is_configured:
            return
        try:
            store = self._stores.get()
        except RemoteConfigError as error:
            self._state.problem("RemoteMisconfigured", str(error))
            self._state.report_remote(False, str(error))
            return
        seen, failures = -1, 0
        while not self._state.stopping:
            try:
                self._step(store)
            except RemoteError as error:
                failures += 1
                log.warning("remote tier: %s", error)
                self._state.report_remote(False, f"{error.reason.value}: {error}")
                self._state.problem(f"Remote{error.reason.value}", str(error))
                self._inventory.look_again()
                pause = min(_BACKOFF[1], _BACKOFF[0] * 2 ** min(failures, 8))
                self._state.wait_until(lambda: False, pause)
                continue
            failures = 0
            seen = self._state.wait(seen, timeout=1.0)

    def _step(self, store: RemoteStore) -> None:
        with self._state.lock:
            directive, verdict = self._state.directive, self._state.verdict
            ready = self._state.restore.state is RestoreState.READY
        self._inventory.list_when_due(store, verdict)
        if directive is not None and self._state.config.worker == 0 and self._announced != directive.attempt:
            store.begin_attempt(directive.job_uid, directive.attempt, directive.signature)
            self._announced = directive.attempt
        if directive is None or not ready or self._state.fenced:
            return
        lonely = self._state.isolated(_ISOLATED)
        self._state.problem("Isolated", _LONELY if lonely else "")
        if lonely:
            return
        if verdict is not None and verdict.upload is not None:
            self._upload(store, directive, verdict.upload)
        manifest = self._due_manifest()
        if manifest is not None and self._is_ours(store, directive):
            self._commit(store, directive, manifest)

    def _is_ours(self, store: RemoteStore, directive: Directive) -> bool:
        """Whether no newer attempt has announced itself. Asked before anything that readers could see is made
        or deleted: the versions of the next attempt must not be pushed out by ours, which nobody will read.
        """
        self._inventory.learn_attempts(store)
        return not self._state.fenced and self._state.attempt == directive.attempt

    def _upload(self, store: RemoteStore, directive: Directive, version: Version) -> None:
        done = {rank for rank, artifact in self._uploaded.items() if artifact.version == version}
        due = [rank for rank in self._vault.ranks if rank not in done]
        # Once for all ranks: what an attempt that is over uploads is seen by nobody before there is a
        # manifest.
        if not due or not self._is_ours(store, directive):
            return
        for rank in due:
            seal = self._vault.find(Artifact(rank, version), Tier.LOCAL)
            if seal is None:
                continue  # the coordinator learns that from our next report, and names another version
            try:
                with self._vault.pin(Artifact(rank, version), Tier.LOCAL) as slot, slot.mapped() as view:
                    limit = directive.policy.remote_bandwidth
                    artifact = store.put_artifact(rank, version, slot.path, seal.digests, limit, mapped=view)
            except RemoteCorrupt:
                # What has rotted is no longer held: the coordinator learns that, and names another version.
                evict_if_bad(self._state, self._vault, seal.artifact, Tier.LOCAL)
                raise
            except NotHeld:
                continue  # freed meanwhile
            except OSError as error:
                raise RemoteCorrupt(
                    f"The slot of rank {rank}, {version}, cannot be read ({error})."
                ) from error
            with self._lock:
                self._uploaded[rank] = artifact
            self._state.count(uploaded=1)
            self._state.bump()

    def _commit(self, store: RemoteStore, directive: Directive, manifest: Manifest) -> None:
        if not store.commit(manifest):
            log.error("%s is in the remote tier already, with other content", manifest.version)
        self._inventory.publish(store, tuple(store.versions()))
        self._state.bump()
        policy = directive.policy
        if not self._is_ours(store, directive):
            return
        left = store.retain(
            policy.remote_keep, {manifest.version}, policy.remote_keep_seconds, directive.history
        )
        self._inventory.publish(store, left)
