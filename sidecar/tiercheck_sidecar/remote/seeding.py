"""A version of one rank, put into the remote tier from outside a job, for a job to begin from."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from tiercheck.protocol.manifest import Manifest
from tiercheck.protocol.version import Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.store import RemoteStore

SEEDED = "imported"
"""In place of the job's UID: no job wrote it."""


def put_alone(store: RemoteStore, version: Version, path: Path) -> None:
    """Upload the sealed slot at `path`, then make the version exist. Raises RemoteError."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as view,
    ):
        digests = digest(view)
    artifact = store.put_artifact(0, version, path, digests, None)
    manifest = Manifest(store.job, SEEDED, version, 1, (artifact,), time.time())
    if not store.commit(manifest):
        raise RemoteError(Reason.OTHER, f"{version} already exists in {store.location}.", retriable=False)
