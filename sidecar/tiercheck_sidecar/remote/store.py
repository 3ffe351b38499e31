"""Keeps versions in the remote tier that exist completely and verified, or not at all.

A version exists when its manifest does. The manifest is created after all its objects, atomically and only
once; it is deleted before any of them. So a crash in between leaves garbage, never half a version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.encoding import Malformed, from_json, to_json
from tiercheck.protocol.signing import SignedAttempt
from tiercheck.protocol.version import Digests, History, Manifest, RankArtifact, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.pacing import TokenBucket
from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.errors import (
    Reason,
    RemoteArchived,
    RemoteClosed,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
    StreamVerifier,
    check_chunks,
    check_shape,
    digest_of,
    ignore,
)
from tiercheck_sidecar.remote.objects import Objects, Stored
from tiercheck_sidecar.remote.ownership import Claimant, Ownership
from tiercheck_sidecar.remote.preflight import StoreFinding, examine

_SEEDED = "imported"
"""The job UID in the manifest of a version that no job wrote."""
FETCH_THREADS = 4
FETCH_BYTES = 64 * 1024 * 1024
"""Bytes of the largest range; `FETCH_LEAST`: of the smallest, if there are several."""
FETCH_LEAST = 8 * 1024 * 1024
_REFUSALS = 3
"""The number of failed deletions after which the other versions are left to the next call."""
_ANNOUNCED = 8
"""The number of announced attempts that are read, the newest first: some may be forged."""
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it


class RemoteStore:
    """One job's versions in one durable store. All methods block, are thread-safe, and raise RemoteError.

    With a `claimant`, nothing is written, deleted or listed while another job owns the folder: that raises
    RemoteOwned. Tools have none.
    """

    def __init__(self, objects: Objects, job: str, claimant: Claimant | None = None) -> None:
        self.job = job
        self._objects = objects
        self._closed = threading.Event()
        self._bucket = TokenBucket(None, wait=self._pause)
        self._ownership_checked = False
        self.cleanup_error = ""
        """The store's own message on what could not be deleted at the last try: a sentence; else empty."""
        self._in_archive = ""
        self.ownership = Ownership(objects, claimant)

    @property
    def location(self) -> str:
        return self._objects.location

    def check(self) -> None:
        """Raises unless the store answers, can be read and written, and belongs to this job or to none."""
        self._objects.check()
        self.ownership.check()
        if not self._ownership_checked:
            complete = self.versions()
            if complete:
                with contextlib.suppress(RemoteArchived):
                    self.read_manifest(complete[-1])
            self._ownership_checked = True

    @property
    def shortcomings(self) -> dict[str, str]:
        """Returns a sentence on each known weakness, by the check that detects it; empty: none is known."""
        return {
            "conditional create": self._objects.weakness,
            "delete": self.cleanup_error,
            "archive": self._in_archive,
        }

    def examine(self) -> Iterator[StoreFinding]:
        """Tests all that the remote tier relies on, one guarantee after the other. Raises nothing."""
        with contextlib.suppress(RemoteError):
            self._note_archived(
                [*self._objects.list(keys.MANIFESTS), *self._objects.list(keys.ARTIFACTS)],
                self._committed().keys(),
            )
        return examine(self._objects)

    def put_artifact(
        self,
        rank: int,
        version: Version,
        path: Path,
        digests: Digests,
        bandwidth: int | None,
        *,
        mapped: memoryview | None = None,
    ) -> RankArtifact:
        """Uploads one rank's sealed artifact, then its digests, continuing an interrupted upload of it.

        `bandwidth`: bytes per second, shared by all uploads of this store; None: no limit. `mapped`: the
        file's bytes, if the caller has them in memory. Uploading again is harmless; a complete version is
        never overwritten. Raises RemoteCorrupt, and stores nothing, if the file does not match its digests.
        """
        if self._closed.is_set():
            raise RemoteClosed
        check_shape(digests, str(path))
        detailed = RankArtifact(rank, version, keys.artifact_key(version, rank, digest_of(digests)), digests)
        artifact = _brief(detailed)
        self.ownership.claim()
        complete = self._manifest(version)
        if complete is not None:
            if artifact in complete.artifacts:
                return artifact
            raise RemoteError(
                Reason.OTHER,
                f"{version} already exists in {self.location} with other content, written by job UID "
                f"{complete.job_uid}. "
                "It was left as it is; give this job another prefix, or delete the old versions.",
                retriable=False,
            )
        self._bucket.set_rate(bandwidth)

        def gate(offset: int, piece: memoryview, first: Callable[[memoryview], None] = ignore) -> None:
            check_chunks(piece, offset, digests, str(path), first)
            self._bucket.take(len(piece))

        with _mapped(path, digests.size) if mapped is None else _begun(mapped, path, digests.size) as source:
            self._objects.upload(artifact.key, source, digests.chunk, gate)
        self._objects.write(keys.digests_key(artifact.key, rank), to_json(detailed))
        return artifact

    def commit(self, manifest: Manifest) -> bool:
        """Makes a version exist; returns whether it now has this content, not that of an earlier writer.

        `created` is not part of the content: a coordinator that was restarted commits the same version again.
        Raises RemoteCorrupt if an artifact is not there in its full size.
        """
        if manifest.job != self.job or sorted(a.rank for a in manifest.artifacts) != list(
            range(manifest.world_size)
        ):
            raise ValueError(f"not a complete manifest of {self.job}: {manifest.job}, {manifest.version}")
        self.ownership.claim()
        sizes = {
            stored.key: stored.size for stored in self._objects.list(keys.artifacts_of(manifest.version))
        }
        for artifact in manifest.artifacts:
            if sizes.get(artifact.key) != artifact.bytes:
                raise RemoteCorrupt(
                    f"{manifest.version} was not completed: {self.location}/{artifact.key} has "
                    f"{sizes.get(artifact.key, 0)} of {artifact.bytes} bytes. If tiers.remote was changed "
                    "while the job runs: pods keep the one that they began with, so delete the older pods "
                    "one by one."
                )
        failpoint("before-manifest")
        try:
            if self._objects.create(
                keys.manifest_key(manifest.version), to_json(_content(manifest, manifest.created))
            ):
                failpoint("after-manifest")
                return True
        except RemoteError as error:
            # No answer does not mean that nothing happened: the request may have been carried out.
            if not error.retriable or self._manifest(manifest.version) is None:
                raise
        return _content(self.read_manifest(manifest.version)) == _content(manifest)

    def seed(self, version: Version, path: Path) -> None:
        """Uploads the sealed slot at `path` as a one-rank version for a job to start from. Raises OSError."""
        with _mapped(path, path.stat().st_size) as view:
            artifact = self.put_artifact(0, version, path, digest(view), None, mapped=view)
        if not self.commit(Manifest(self.job, _SEEDED, version, 1, (artifact,), time.time())):
            raise RemoteError(Reason.OTHER, f"{version} already exists in {self.location}.", retriable=False)

    def begin_attempt(self, job_uid: str, attempt: int, signature: str = "") -> None:
        """Announces an attempt to workers that still write here for an older one.

        Earlier announcements are deleted, where that is allowed: the highest counts. `signature`: the
        operator's, which makes the announcement valid."""
        self.ownership.claim()
        self._objects.write(keys.attempt_key(job_uid, attempt), signature.encode())
        with self._best_effort():
            known = [stored.key for stored in self._objects.list(keys.ATTEMPTS)]
            self._objects.delete([each for each in known if keys.attempt_of(each, job_uid) < attempt])

    def newest_attempts(self, job_uid: str, above: int = 0) -> list[SignedAttempt]:
        """Returns the newest few announced attempts after `above`, newest first; any writer can forge one."""
        listed = {keys.attempt_of(each.key, job_uid): each.key for each in self._objects.list(keys.ATTEMPTS)}
        found = []
        for attempt in sorted(listed, reverse=True)[:_ANNOUNCED]:
            if attempt > above:
                said = self._objects.read(listed[attempt]) or b""
                found.append(SignedAttempt(attempt, said.decode(errors="replace")))
        return found

    def versions(self) -> list[Version]:
        """Returns the complete versions, oldest (lowest step) first."""
        self.ownership.check()
        return sorted(self._committed())

    def read_manifest(self, version: Version) -> Manifest:
        """Reads a manifest. Raises RemoteMissing, RemoteCorrupt, or RemoteError if it is another job's."""
        manifest = self._manifest(version)
        if manifest is None:
            raise RemoteMissing(f"{version} is not in {self.location}.")
        return manifest

    def artifact(self, rank: int, version: Version) -> RankArtifact:
        """Returns one rank's artifact of a complete version, with its digests.

        Raises RemoteMissing, RemoteCorrupt.
        """
        named = next((each for each in self.read_manifest(version).artifacts if each.rank == rank), None)
        if named is None:
            raise RemoteMissing(f"the manifest of {version} in {self.location} does not name rank {rank}.")
        return self._detailed(named)

    def fetch(
        self,
        artifact: RankArtifact,
        into: memoryview,
        chunks: Sequence[int] | None = None,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Reads an artifact, or only its `chunks` (in order), into its place in `into`; verifies every chunk.

        The callback gets the number of new bytes; what it raises ends the reading. Raises RemoteCorrupt;
        nothing unverified is then left in `into`.
        """
        artifact = self._detailed(artifact)
        digests = artifact.digests
        assert digests is not None
        check_shape(digests, f"{self.location}/{artifact.key}")
        if len(into) < digests.size:
            raise ValueError(f"{digests.size} bytes do not fit into {len(into)}")
        wanted = range(len(digests.values)) if chunks is None else chunks
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="remote-fetch") as pool:
            ranges = [
                pool.submit(
                    self.fetch_stretch, artifact, begin, into[begin : min(end, digests.size)], on_bytes
                )
                for begin, end in _stretches(wanted, digests.chunk)
            ]
            try:
                for part in ranges:
                    part.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def fetch_stretch(
        self,
        artifact: RankArtifact,
        begin: int,
        into: memoryview,
        on_bytes: Callable[[int], None] = ignore,
    ) -> None:
        """Reads and verifies whole chunks from byte `begin` on, the start of one.

        For callers that cannot hold all of an artifact. `artifact` must have its digests. Raises
        RemoteCorrupt; nothing unverified is then left in `into`.
        """
        if self._closed.is_set():
            raise RemoteClosed
        digests, place = artifact.digests, f"{self.location}/{artifact.key}"
        assert digests is not None
        arriving = StreamVerifier(into, begin, digests, place, on_bytes)
        try:
            got = self._objects.read_into(artifact.key, begin, into, arriving)
            if got < len(into):
                raise RemoteCorrupt(f"{place} is missing or ends at byte {begin + got} of {digests.size}.")
            arriving(got)
        except BaseException:
            into[:] = bytes(len(into))  # a trainer can read this memory, and may have chosen what is in it
            raise

    def retain(
        self,
        keep: int,
        protect: AbstractSet[Version] = frozenset(),
        keep_seconds: float | None = None,
        history: History | None = None,
    ) -> tuple[Version, ...]:
        """Deletes all but the newest `keep` versions, and the remains of interrupted uploads.

        Versions that `history` accepts are kept before all others. Kept as well are those created at most
        `keep_seconds`, if given, before the last one; the newest complete version; and all of `protect`
        (complete or still being uploaded). What cannot be deleted stays, and `cleanup_error` reports it.
        Returns the versions that are left."""
        self.ownership.claim()
        committed = self._committed()
        kept, self.cleanup_error, refused = set(committed), "", 0
        # Newest first: versions refused earlier are older, and a few refusals show that the rest fail too.
        for version in reversed(keys.to_delete(committed, keep, protect, keep_seconds, history)):
            with self._best_effort():
                # Unreadable: it cannot be restored, so it may be deleted.
                with contextlib.suppress(RemoteCorrupt, RemoteArchived):
                    self._manifest(version)  # raises if the folder is another job's
                self._objects.delete([keys.manifest_key(version)])
                kept.discard(version)
                self._delete_artifacts(version)
                continue
            refused += 1
            if refused == _REFUSALS:
                break

        def abandoned(key: str) -> bool:
            version = keys.version_of(key)
            return (
                version is not None
                and version not in kept
                and keys.is_abandoned(version, kept, protect, history)
            )

        with self._best_effort():
            stored = self._objects.list(keys.ARTIFACTS)
            self._note_archived(stored, kept)
            self._objects.delete([each.key for each in stored if abandoned(each.key)])
        with self._best_effort():
            self._objects.forget_unfinished(abandoned)
        return tuple(sorted(kept))

    def close(self) -> None:
        """Interrupts paced uploads and releases connections."""
        self._closed.set()
        self._objects.close()

    def _detailed(self, artifact: RankArtifact) -> RankArtifact:
        """Returns the artifact with its digests, which it reads from the object beside it."""
        if artifact.digests is not None:
            return artifact
        key = keys.digests_key(artifact.key, artifact.rank)
        place = f"{self.location}/{key}"
        body = self._objects.read(key)
        if body is None:
            raise RemoteCorrupt(f"{place} is missing.")
        found = _decode(body, RankArtifact, place)
        if found.digests is None or _brief(found) != artifact:
            raise RemoteCorrupt(f"{place} is not what the manifest of {artifact.version} says.")
        return found

    def _committed(self) -> dict[Version, float]:
        listed = (
            (keys.version_of(stored.key), stored.modified) for stored in self._objects.list(keys.MANIFESTS)
        )
        return {version: modified for version, modified in listed if version is not None}

    def _manifest(self, version: Version) -> Manifest | None:
        key = keys.manifest_key(version)
        body = self._objects.read(key)
        if body is None:
            return None
        manifest = _decode(body, Manifest, f"{self.location}/{key}")
        if manifest.job != self.job:
            raise RemoteError(
                Reason.OTHER,
                f"{self.location} already belongs to job {manifest.job}; give {self.job} another prefix.",
                retriable=False,
            )
        if manifest.version != version:
            raise RemoteCorrupt(f"{self.location}/{key} says that it is of {manifest.version}.")
        return manifest

    def _note_archived(self, stored: Iterable[Stored], complete: AbstractSet[Version]) -> None:
        """Records which complete versions cannot be read because some of their objects are archived."""
        listed = {keys.version_of(each.key): each.key for each in stored if each.archived}
        found = []
        for version in sorted(complete & listed.keys()):
            try:
                self._objects.read_into(listed[version], 0, memoryview(bytearray(1)))
            except RemoteArchived:
                found.append(version)
        named = ", ".join(map(str, found))
        self._in_archive = str(RemoteArchived(f"{self.location} has in an archive: {named}")) if found else ""

    @contextlib.contextmanager
    def _best_effort(self) -> Iterator[None]:
        """Suppresses errors of the block, recording lasting ones: nothing needed depends on it."""
        try:
            yield
        except RemoteError as error:
            if self._closed.is_set():
                raise
            if not error.retriable:
                self.cleanup_error = (
                    f"{error} Until it can be deleted, what is not kept any more piles up there."
                )

    def _delete_artifacts(self, version: Version) -> None:
        self._objects.delete([stored.key for stored in self._objects.list(keys.artifacts_of(version))])

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise RemoteClosed


def _stretches(chunks: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    """Yields ranges to read: adjacent chunks together, but small enough to give every thread some."""
    share = -(-len(chunks) * chunk // FETCH_THREADS)
    most = max(1, min(FETCH_BYTES, max(FETCH_LEAST, share)) // chunk)
    first = place = 0
    while first < len(chunks):
        place = first + 1
        while place < len(chunks) and place - first < most and chunks[place] == chunks[place - 1] + 1:
            place += 1
        yield chunks[first] * chunk, (chunks[place - 1] + 1) * chunk
        first = place


@contextlib.contextmanager
def _mapped(path: Path, size: int) -> Iterator[memoryview]:
    with open(open_plain(path), "rb") as source:
        held = source.seek(0, 2)
        if held < size:
            raise RemoteCorrupt(f"{path} has {held} of {size} bytes; it was not uploaded.")
        if size == 0:
            yield memoryview(b"")
            return
        pages = mmap.mmap(source.fileno(), size, access=mmap.ACCESS_READ)
        with contextlib.suppress(OSError):  # an older kernel: the pages come one by one, at first touch
            pages.madvise(_MADV_POPULATE_READ)
        try:
            with memoryview(pages) as view:
                yield view
        finally:
            # The traceback of a failed upload may still hold a piece; the mapping is then freed with it.
            with contextlib.suppress(BufferError):
                pages.close()


@contextlib.contextmanager
def _begun(mapped: memoryview, path: Path, size: int) -> Iterator[memoryview]:
    if len(mapped) < size:
        raise RemoteCorrupt(f"{path} has {len(mapped)} of {size} bytes; it was not uploaded.")
    yield mapped[:size]


def _brief(artifact: RankArtifact) -> RankArtifact:
    """Returns the artifact as a manifest names it: with one digest in place of all."""
    digests = artifact.digests
    if digests is None:
        return artifact
    return dataclasses.replace(artifact, digests=None, size=digests.size, digest=digest_of(digests))


def _content(manifest: Manifest, created: float = 0.0) -> Manifest:
    return dataclasses.replace(manifest, artifacts=tuple(map(_brief, manifest.artifacts)), created=created)


_T = TypeVar("_T")


def _decode(body: bytes, cls: type[_T], place: str) -> _T:
    try:
        found = from_json(body, cls)
    except Malformed as error:
        raise RemoteCorrupt(f"{place} cannot be read: {error}.") from error
    for artifact in found.artifacts if isinstance(found, Manifest) else (found,):
        if isinstance(artifact, RankArtifact) and artifact.digests is not None:
            check_shape(artifact.digests, place)
    return found
