"""Lists the remote tier, uploads the versions that the coordinator names, and reads them again.

Uploads take no more than the rate that the job allows. Worker 0 also tests the store before it is relied on,
writes the manifest once every rank's object is there, and deletes what is older than the job keeps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.report import SPARE, RestoreState
from tiercheck.protocol.version import Artifact, Manifest, RankArtifact, Version
from tiercheck_sidecar.artifact_source import (
    ArtifactSink,
    ArtifactSource,
    BoundedCall,
    OpenArtifact,
    SourceCorrupt,
    SourceFailed,
)
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.remote import (
    Claimant,
    RemoteArchived,
    RemoteConfigError,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
    RemoteStore,
    open_store,
)
from tiercheck_sidecar.vault import NotHeld, Seal, Vault

_LISTED = 3
"""The number of versions listed for a restore: the newest, and some in case that one is damaged."""


class JobStore:
    """The job's folder in the remote tier, opened once, at its first use. Thread-safe."""

    def __init__(self, config: SidecarConfig, make: Callable[[], RemoteStore] | None = None) -> None:
        """`make` opens another store than the one that the job names."""
        self._config, self._make = config, make or self._open
        self._lock = threading.Lock()
        self._store: RemoteStore | None = None

    @property
    def is_configured(self) -> bool:
        return self._config.remote is not None

    def get(self) -> RemoteStore:
        """Returns the store; `close` ends what it does. Raises RemoteConfigError."""
        with self._lock:
            self._store = self._store or self._make()
            return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _open(self) -> RemoteStore:
        config = self._config
        assert config.remote is not None
        return open_store(config.remote, config.job, Claimant(config.cluster, config.job_uid))


class RemoteSource(ArtifactSource):
    """Snapshots of complete versions in the remote tier. Thread-safe."""

    def __init__(self, state: SidecarState, stores: JobStore) -> None:
        self._state, self._stores = state, stores
        self._lock = threading.Lock()
        self._manifests: dict[Version, Manifest] = {}
        self._described: dict[Artifact, RankArtifact] = {}

    def list(self, rank: int, version: Version, call: BoundedCall) -> dict[Artifact, int]:
        """Returns the newest snapshots of `rank` up to `version` that the history accepts."""
        directive = self._state.directive
        assert directive is not None
        with self._lock:  # their descriptions are read again below
            self._described = {each: known for each, known in self._described.items() if each.rank != rank}
        with self._opened() as store:
            usable = [
                each for each in store.versions() if each <= version and directive.history.accepts(each)
            ]
            found = {}
            for each in usable[-_LISTED:]:
                named = next((one for one in self._manifest(store, each).artifacts if one.rank == rank), None)
                if named is not None:
                    found[Artifact(rank, each)] = named.bytes
            return found

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        rank, version = artifact.rank, artifact.version
        with self._opened() as store:
            named = self._described.get(artifact) or store.artifact(rank, version)
            with self._lock:
                others = list(self._described.items())[: _LISTED - 1]
                self._described = {artifact: named, **dict(others)}
            digests, world_size = named.digests, self._manifest(store, version).world_size
            assert digests is not None

            def read(chunks: Sequence[int], sink: ArtifactSink) -> None:
                if len(sink.view) >= digests.size:
                    store.fetch(named, sink.view, chunks, call.arrived)
                    return
                for index in chunks:
                    store.fetch_stretch(named, index * digests.chunk, sink.room(digests, index))

            yield OpenArtifact(Seal(rank, version, world_size, Tier.LOCAL, digests), read)

    def _manifest(self, store: RemoteStore, version: Version) -> Manifest:
        """Returns a manifest; it is kept, because all local ranks ask for the same few."""
        with self._lock:
            known = self._manifests.get(version)
        if known is None:
            known = store.read_manifest(version)
            with self._lock:
                self._manifests = {version: known, **dict(list(self._manifests.items())[: _LISTED - 1])}
        return known

    @contextlib.contextmanager
    def _opened(self) -> Iterator[RemoteStore]:
        """Yields the store, with its errors as those of a source."""
        if not self._stores.is_configured:
            raise SourceFailed("the job has no remote tier")
        try:
            yield self._stores.get()
        except RemoteCorrupt as error:
            raise SourceCorrupt(str(error)) from error
        except (RemoteError, RemoteConfigError) as error:
            raise SourceFailed(str(error)) from error


log = logging.getLogger(__name__)

_LIST_EVERY = 30.0
_NOT_SAFE = "RemoteNotSafe"
"""Reason of the problem that the store breaks a guarantee that is relied on.
It lasts; other troubles of the store come and go."""
_EXAMINATIONS = 3
"""The maximum number of tests of a store, if they cannot be completed."""


class RemoteListing:
    """Lists the remote tier. Used by one thread."""

    def __init__(self, state: SidecarState, on_stored: Callable[[tuple[Version, ...]], None]) -> None:
        """`on_stored` reports to the coordinator what worker 0 has found."""
        self._state, self._on_stored = state, on_stored
        self._listed_at: float | None = None
        self._listed_for: Version | None = None
        self._listed_as: int | None = None
        """The number of this worker at that time."""
        self._worlds: dict[Version, int] = {}
        """The number of ranks of each stored version, 0 if that cannot be read."""
        self._examinations = 0
        self._broken: dict[str, str] = {}
        """The failures in the test of the store, by the name of the check."""

    def look_again(self) -> None:
        """Discards the last listing, after an error of the store."""
        self._listed_at = None

    def list_when_due(self, store: RemoteStore, verdict: TierVerdict | None, *, announced: bool) -> None:
        """Lists the store if that is due.

        Each sidecar does so at its start, to find out whether its node reaches the store. Later only worker 0
        does, and informs the others once this attempt is `announced` in the store: until then an earlier one
        may still delete what is listed.
        """
        now = time.monotonic()
        self._report_broken(store)
        mark = verdict.watermarks.remote if verdict else None
        if self._listed_at is None:
            store.check()
            self._report_broken(store)
        elif self._state.config.worker != 0:
            self._listed_as = self._state.config.worker
            if verdict is not None and verdict.stored is not None:
                self._found(verdict.stored)
            return
        elif self._listed_as == 0 and mark == self._listed_for and now - self._listed_at <= _LIST_EVERY:
            return
        versions = tuple(store.versions())
        self.learn_attempts(store)
        self._listed_at, self._listed_for, self._listed_as = now, mark, self._state.config.worker
        self.publish(store, versions, announced=announced)
        if self._state.config.worker == 0 and self._examinations < _EXAMINATIONS:
            self._examine(store)

    def learn_attempts(self, store: RemoteStore) -> None:
        """Records newer attempts that are announced in the store."""
        state = self._state
        for attempt in store.newest_attempts(state.config.job_uid, state.newest_attempt.attempt):
            state.learn(attempt)

    def publish(self, store: RemoteStore, versions: tuple[Version, ...], *, announced: bool = True) -> None:
        self._found(versions, self._ranks_of(store, versions))
        # What another worker had found would be outdated when it becomes worker 0.
        if announced and self._state.config.worker == 0:
            self._on_stored(versions)

    def _examine(self, store: RemoteStore) -> None:
        """Tests the store, at one worker, to report its faults before they do harm.
        Faults do not stop the use of it."""
        findings = list(store.examine())
        for finding in findings:
            log.log(
                logging.INFO if finding.ok else logging.WARNING,
                "remote tier: %s: %s",
                finding.name,
                finding.message,
            )
        self._broken = {each.name: each.message for each in findings if not each.ok and not each.passing}
        self._report_broken(store)
        self._examinations = (
            self._examinations + 1 if any(each.passing for each in findings) else _EXAMINATIONS
        )

    def _report_broken(self, store: RemoteStore) -> None:
        """Publishes failures of the store: those of the test override those seen in use."""
        seen = store.shortcomings | self._broken
        problems = " ".join(f"{name}: {message}" for name, message in seen.items() if message)
        self._state.problem(_NOT_SAFE, problems)

    def _ranks_of(self, store: RemoteStore, versions: tuple[Version, ...]) -> tuple[int, ...]:
        """Returns the number of ranks of each version.
        Manifests name every rank, so one worker of the job reads them, each once."""
        if self._state.config.worker not in (0, SPARE):  # a spare may yet become worker 0
            return ()
        for version in set(versions) - set(self._worlds):
            try:
                self._worlds[version] = store.read_manifest(version).world_size
            except (RemoteArchived, RemoteCorrupt, RemoteMissing) as error:
                log.warning("manifest of %s: %s", version, error)
                self._worlds[version] = 0
        self._worlds = {version: self._worlds[version] for version in versions}
        return tuple(self._worlds.values())

    def _found(self, versions: tuple[Version, ...], ranks: tuple[int, ...] = ()) -> None:
        self._state.report_remote(True, "", versions, ranks)
        self._state.withdraw("Remote", but=_NOT_SAFE)


_BACKOFF = (0.5, 15.0)
_ISOLATED = 60.0
"""Seconds without contact to the controller or any peer, after which uploads stop.
The job has probably moved on."""
_LONELY = (
    "neither the controller nor any peer has called for a minute, so nothing is uploaded. "
    "Check the node's network"
)


class Uploader:
    """Uploads the named versions, if the job has a remote tier. Thread-safe; `run` is one thread."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        stores: JobStore,
        inventory: RemoteListing,
        due_manifest: Callable[[], Manifest | None],
    ) -> None:
        self._state, self._vault, self._stores = state, vault, stores
        self._inventory, self._due_manifest = inventory, due_manifest
        self._lock = threading.Lock()
        self._uploaded: dict[int, RankArtifact] = {}
        self._announced = 0
        """The attempt that this worker has announced in the remote tier."""

    def uploaded(self, rank: int, verdict: TierVerdict | None) -> tuple[RankArtifact, ...]:
        """Returns the rank's upload of the version to upload, if it is done."""
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
        announced = directive is not None and self._announced == directive.attempt
        self._inventory.list_when_due(store, verdict, announced=announced)
        if directive is not None and self._state.config.worker == 0 and not announced:
            store.begin_attempt(directive.job_uid, directive.attempt, directive.signature)
            self._announced = directive.attempt
            self._inventory.publish(store, tuple(store.versions()))
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
        """Returns whether no newer attempt has announced itself.

        It is called before anything that readers could see is made or deleted: the versions of the next
        attempt must not be pushed out by this one's, which no reader will use.
        """
        self._inventory.learn_attempts(store)
        return not self._state.fenced and self._state.attempt == directive.attempt

    def _upload(self, store: RemoteStore, directive: Directive, version: Version) -> None:
        done = {rank for rank, artifact in self._uploaded.items() if artifact.version == version}
        due = [rank for rank in self._vault.ranks if rank not in done]
        # Once for all ranks: what an attempt that is over uploads cannot be seen before there is a
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
                # What has rotted is not held any more: the coordinator learns it and names another version.
                self._vault.evict_if_bad(self._state, seal.artifact, Tier.LOCAL)
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
