"""The remote tier as a source of restores: what it has of a rank, and how to read it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, Digests, Manifest, Version
from tiercheck_sidecar.bounded_calls import SourceCorrupt, SourceFailed
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.remote import (
    Claimant,
    RemoteConfigError,
    RemoteCorrupt,
    RemoteError,
    RemoteStore,
    open_store,
)
from tiercheck_sidecar.vault import Seal, Vault

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


class RemoteSource:
    """Thread-safe."""

    def __init__(self, state: SidecarState, vault: Vault, stores: JobStore) -> None:
        self._state, self._vault, self._stores = state, vault, stores
        self._lock = threading.Lock()
        self._manifests: dict[Version, Manifest] = {}

    def listed(self, rank: int, version: Version) -> dict[Artifact, int]:
        """The newest snapshots of `rank` in the remote tier up to `version` that the history accepts, with
        bytes. Raises SourceFailed."""
        directive = self._state.directive
        assert directive is not None
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

    def fetch(self, rank: int, version: Version, heard: Callable[[int], None]) -> Seal:
        """Copy one rank's snapshot from the remote tier into an own slot. Raises SourceFailed, SourceCorrupt,
        NoFreeSlot, NotASlot, OSError."""
        with self._opened() as store:
            artifact, world_size = store.artifact(rank, version), self._manifest(store, version).world_size
            assert artifact.digests is not None
            draft = self._vault.draft(Seal(rank, version, world_size, Tier.LOCAL, artifact.digests))
            try:
                store.fetch(artifact, draft.view, heard=heard)
                draft.keep()
            finally:
                draft.release()
            return draft.seal

    def digests(self, artifact: Artifact) -> Digests:
        """Of a snapshot of a complete version. Raises SourceFailed, SourceCorrupt."""
        with self._opened() as store:
            found = store.artifact(artifact.rank, artifact.version).digests
            assert found is not None
            return found

    def fetch_chunks(
        self, artifact: Artifact, indices: Sequence[int], into: memoryview, heard: Callable[[int], None]
    ) -> None:
        """Fill these chunks of `into`, verified. Raises SourceFailed, SourceCorrupt."""
        with self._opened() as store:
            store.fetch(store.artifact(artifact.rank, artifact.version), into, indices, heard)

    def fetch_chunk(self, artifact: Artifact, digests: Digests, index: int, into: memoryview) -> None:
        """Read one chunk into `into`, which is as long as it, verified; for those who keep nothing of it.
        Raises SourceFailed, SourceCorrupt."""
        with self._opened() as store:
            named = self._manifest(store, artifact.version).artifacts
            of_rank = next((each for each in named if each.rank == artifact.rank), None)
            if of_rank is None:
                raise SourceFailed(f"the manifest of {artifact.version} does not name rank {artifact.rank}")
            detailed = dataclasses.replace(of_rank, digests=digests)
            store.fetch_stretch(detailed, index * digests.chunk, into)

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
