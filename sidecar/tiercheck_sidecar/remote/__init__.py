"""The remote tier: survives the loss of everything. `open_store` is the way in; the rest of the sidecar knows
`RemoteStore` and the errors only.
"""

from __future__ import annotations

from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote.config import DirectorySettings, parse
from tiercheck_sidecar.remote.errors import (
    Reason,
    RemoteClosed,
    RemoteConfigError,
    RemoteCorrupt,
    RemoteError,
    RemoteMissing,
)
from tiercheck_sidecar.remote.seeding import put_alone
from tiercheck_sidecar.remote.store import RemoteStore

__all__ = [
    "Reason",
    "RemoteClosed",
    "RemoteConfigError",
    "RemoteCorrupt",
    "RemoteError",
    "RemoteMissing",
    "RemoteStore",
    "open_store",
    "put_alone",
]


def open_store(remote_json: str, job: str) -> RemoteStore:
    """The store that `TIERCHECK_REMOTE` describes, for `job` ("namespace/name").

    Contacts nothing yet. Raises RemoteConfigError with a sentence.
    """
    settings = parse(remote_json)
    try:
        prefix = settings.sub_path if isinstance(settings, DirectorySettings) else settings.prefix
        folder = keys.job_folder(prefix, job)
    except ValueError as error:
        raise RemoteConfigError(f"{error}.") from error
    # Imported late: start-up time counts at every restart, and only one of them is needed.
    if isinstance(settings, DirectorySettings):
        from tiercheck_sidecar.remote.directory import DirectoryObjects

        return RemoteStore(DirectoryObjects(settings.path, folder), job)
    from tiercheck_sidecar.remote.s3 import S3Objects

    return RemoteStore(S3Objects(settings, folder), job)
