"""Opens the remote tier, which survives the loss of the whole cluster.

`open_store` is the entry point; the rest of the sidecar uses `RemoteStore` and the errors only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.config import (
    S3_FIELDS,
    DirectorySettings,
    S3Settings,
    authority_file,
    parse,
    take_over_from,
)
from tiercheck_sidecar.remote.errors import (
    Reason,
    RemoteArchived,
    RemoteClosed,
    RemoteConfigError,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
    RemoteOwned,
)
from tiercheck_sidecar.remote.objects import Objects
from tiercheck_sidecar.remote.ownership import Claimant, StoreOwner
from tiercheck_sidecar.remote.preflight import StoreFinding, examine
from tiercheck_sidecar.remote.store import RemoteStore

__all__ = [
    "S3_FIELDS",
    "Claimant",
    "Reason",
    "RemoteArchived",
    "RemoteClosed",
    "RemoteConfigError",
    "RemoteCorrupt",
    "RemoteError",
    "RemoteMissing",
    "RemoteOwned",
    "RemoteStore",
    "StoreFinding",
    "StoreOwner",
    "authority_file",
    "examine_place",
    "open_store",
]


def open_store(remote_json: str, job: str, claimant: Claimant | None = None) -> RemoteStore:
    """Returns the store that `TIERCHECK_REMOTE` describes, for `job` ("namespace/name").

    `claimant`: the job that will write there; None for a tool. Sends no request yet. Raises RemoteConfigError
    with a sentence.
    """
    settings = parse(remote_json)
    try:
        folder = keys.job_folder(_prefix(settings), job)
    except ValueError as error:
        raise RemoteConfigError(f"{error}.") from error
    if claimant is not None:
        claimant = dataclasses.replace(claimant, take_over_from=take_over_from(remote_json))
    return RemoteStore(_objects(settings, folder), job, claimant)


def examine_place(remote_json: str) -> Iterator[StoreFinding]:
    """Tests a store that no job uses yet, in a folder of its own. Raises RemoteConfigError."""
    settings = parse(remote_json)
    objects = _objects(
        settings, "/".join([*(part for part in _prefix(settings).split("/") if part), "tiercheck-check"])
    )
    try:
        yield from examine(objects)
        with contextlib.suppress(RemoteError):
            objects.delete([keys.PROBE])
    finally:
        objects.close()


def _prefix(settings: S3Settings | DirectorySettings) -> str:
    return settings.sub_path if isinstance(settings, DirectorySettings) else settings.prefix


def _objects(settings: S3Settings | DirectorySettings, folder: str) -> Objects:
    # Imported late: start-up time counts at every restart, and only one of them is needed.
    if isinstance(settings, DirectorySettings):
        from tiercheck_sidecar.remote.directory import DirectoryObjects

        return DirectoryObjects(settings.path, folder)
    from tiercheck_sidecar.remote.s3.s3 import S3Objects

    return S3Objects(settings, folder)
