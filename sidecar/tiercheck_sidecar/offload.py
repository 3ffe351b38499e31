"""Lists the remote tier, brings the versions to it that the coordinator names, and reads them again.

What is brought takes no more than the rate that the job allows. Worker 0 also tries the tier out before it
counts, writes the manifest, once every rank's object is there, and forgets what is older than the job keeps.
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
"""Versions that a restore is told of: the newest, and some to fall back on if that one is damaged."""


class JobStore:
    """The job's folder in the remote tier, opened once by whatever needs it first: the upload or a restore.
    Thread-safe."""

    def __init__(self, config: SidecarConfig, make: Callable[[], RemoteStore] | None = None) -> None:
        """`make`: opens another store than the one that the job names."""
        self._config, self._make = config, make or self._open
        self._lock = threading.Lock()
        self._store: RemoteStore | None = None

    @property
    def is_configured(self) -> bool:
        """Whether the job has a remote tier."""
        return self._config.remote is not None

    def get(self) -> RemoteStore:
        """The store; `close` ends what it does. Raises RemoteConfigError."""
        with self._lock:
            self._store = self._store or self._make()
            return self._store

    def close(self) -> None:
        """Whatever the store does ends."""
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
        """The newest snapshots of `rank` up to `version` that the history accepts."""
        directive = self._state.directive
        assert directive is not None
        with self._lock:  # what follows reads anew what describes them
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
        """All local ranks ask for the same few."""
        with self._lock:
            known = self._manifests.get(version)
        if known is None:
            known = store.read_manifest(version)
            with self._lock:
                self._manifests = {version: known, **dict(list(self._manifests.items())[: _LISTED - 1])}
        return known

    @contextlib.contextmanager
    def _opened(self) -> Iterator[RemoteStore]:
        """The store, its errors in the words of a restore."""
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
"""Reason of the problem that the store does not keep a promise that is relied on. It lasts; other troubles of
the store come and go."""
_EXAMINATIONS = 3
"""Times that a store is tried out, if it could not be to the end."""


class RemoteListing:
    """Used by one thread."""

    def __init__(self, state: SidecarState, tell_stored: Callable[[tuple[Version, ...]], None]) -> None:
        """`tell_stored`: tells the coordinator what worker 0 has found."""
        self._state, self._tell_stored = state, tell_stored
        self._listed_at: float | None = None
        self._listed_for: Version | None = None
        self._listed_as: int | None = None
        """Which worker this was then."""
        self._worlds: dict[Version, int] = {}
        """By how many ranks each stored version was made, 0 if that cannot be read."""
        self._examinations = 0
        self._broken: dict[str, str] = {}
        """What was found when the store was tried out, by the name of the check."""

    def look_again(self) -> None:
        """The store was in trouble: what this worker knows of it counts no more."""
        self._listed_at = None

    def list_when_due(self, store: RemoteStore, verdict: TierVerdict | None, *, announced: bool) -> None:
        """Each sidecar at its start, so that it is known whether its node reaches the store; later only
        worker 0, who tells the others, once this attempt is `announced` in the store: one before it may
        still delete what is listed until then."""
        now = time.monotonic()
        self._tell_broken(store)
        mark = verdict.watermarks.remote if verdict else None
        if self._listed_at is None:
            store.check()
            self._tell_broken(store)
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
        """Learn of newer attempts that are announced in the store."""
        state = self._state
        for told in store.newest_attempts(state.config.job_uid, state.newest_attempt.attempt):
            state.learn(told)

    def publish(self, store: RemoteStore, versions: tuple[Version, ...], *, announced: bool = True) -> None:
        """The store holds these versions."""
        self._found(versions, self._ranks_of(store, versions))
        # What another one found long ago is no more true when it takes that place.
        if announced and self._state.config.worker == 0:
            self._tell_stored(versions)

    def _examine(self, store: RemoteStore) -> None:
        """Once, by one worker: what the store does not do as it should is said before it does harm. Nothing
        is left undone for it."""
        findings = list(store.examine())
        for finding in findings:
            log.log(
                logging.INFO if finding.ok else logging.WARNING,
                "remote tier: %s: %s",
                finding.name,
                finding.message,
            )
        self._broken = {each.name: each.message for each in findings if not each.ok and not each.passing}
        self._tell_broken(store)
        self._examinations = (
            self._examinations + 1 if any(each.passing for each in findings) else _EXAMINATIONS
        )

    def _tell_broken(self, store: RemoteStore) -> None:
        """What the store showed when it was tried out comes before what is seen while it is used."""
        seen = store.shortcomings | self._broken
        told = " ".join(f"{name}: {message}" for name, message in seen.items() if message)
        self._state.problem(_NOT_SAFE, told)

    def _ranks_of(self, store: RemoteStore, versions: tuple[Version, ...]) -> tuple[int, ...]:
        """By how many ranks each version was made. Manifests name every rank, so one worker of the job reads
        them, each once."""
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
