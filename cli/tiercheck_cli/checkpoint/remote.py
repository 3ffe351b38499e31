"""Opens a job's remote tier for the commands, with the sidecar's own store.

That keeps a single reader of its layout and digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tiercheck.protocol.version import RankArtifact
from tiercheck_cli.checkpoint.saved import Saved, SavedArtifact
from tiercheck_cli.failure import INSTALL, NOT_FOUND, USAGE, CannotDo

__all__ = [
    "RemoteStore", "check_empty", "examine_place", "open_store", "open_version", "refusals",
    "settings_of_job", "settings_of_url",
]  # fmt: skip

try:
    from tiercheck_sidecar.remote import (
        S3_FIELDS,
        RemoteConfigError,
        RemoteError,
        RemoteStore,
        examine_place,
        open_store,
    )
except ModuleNotFoundError as missing:
    raise CannotDo(
        f"{missing.name} is not installed, which remote tiers need; {INSTALL.format('sidecar')}"
    ) from missing


def settings_of_url(url: str, endpoint: str | None, region: str | None) -> str:
    """Returns `open_store` settings of s3://BUCKET/PREFIX?FIELD=VALUE or a directory. Raises CannotDo."""
    if "://" not in url:
        return json.dumps({"directory": {"path": url}})
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise CannotDo(
            f"{url} is no remote tier; give s3://BUCKET/PREFIX, or the path of a shared directory", USAGE
        )
    given: dict[str, Any] = {"prefix": parts.path.strip("/"), "endpoint": endpoint, "region": region}
    for name, value in parse_qsl(parts.query):
        field, _, part = name.partition(".")
        if field not in S3_FIELDS:
            raise CannotDo(f"tiers.remote.s3 has no {field}; there are {', '.join(S3_FIELDS)}", USAGE)
        given |= {field: {**given.get(field, {}), part: value} if part else value == "true" or value}
    return json.dumps(
        {"s3": {"bucket": parts.netloc, **{key: value for key, value in given.items() if value}}}
    )


def settings_of_job(job: Mapping[str, Any], endpoint: str | None = None, region: str | None = None) -> str:
    """Returns the settings of `spec.tiers.remote`, with `endpoint` and `region` replaced if given.

    Outside the cluster a bucket may have another address. Raises CannotDo if the tier cannot be reached from
    here.
    """
    name = job["metadata"]["name"]
    remote = ((job["spec"].get("tiers") or {}).get("remote")) or {}
    if remote.get("s3"):
        given = {"endpoint": endpoint, "region": region}
        found = {**remote["s3"], **{key: value for key, value in given.items() if value}}
        return json.dumps({"s3": {key: found[key] for key in S3_FIELDS if found.get(key)}})
    if remote.get("directory"):
        raise CannotDo(
            f"the remote tier of {name} is a volume; mount it here and give --remote PATH --job "
            f"NAMESPACE/{name}"
        )
    raise CannotDo(f"{name} has no remote tier, and what is in memory cannot be read from outside its pods")


@contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of the store or its settings into CannotDo."""
    try:
        yield
    except RemoteConfigError as error:
        raise CannotDo(str(error), USAGE) from error
    except RemoteError as error:
        raise CannotDo(str(error)) from error


@refusals()
def open_version(store: RemoteStore, step: int | None) -> Saved:
    """Opens the newest complete version, or that of `step`. Raises CannotDo."""
    versions = store.versions()
    found = [version for version in versions if step in (None, version.step)]
    if not found:
        there = f"; there are {', '.join(str(each.step) for each in versions)}" if versions else ""
        asked = "" if step is None else f" of step {step}"
        raise CannotDo(f"{store.location} has no complete version{asked}{there}", NOT_FOUND)
    artifacts = sorted(store.read_manifest(found[-1]).artifacts, key=lambda artifact: artifact.rank)
    return Saved.open(found[-1], tuple(_slot(store, artifact) for artifact in artifacts))


def _slot(store: RemoteStore, brief: RankArtifact) -> SavedArtifact:
    artifact = store.artifact(brief.rank, brief.version)
    assert artifact.digests is not None
    chunk = artifact.digests.chunk

    @refusals()
    def fetch(index: int, length: int) -> bytearray:
        into = bytearray(length)
        store.fetch_stretch(artifact, index * chunk, memoryview(into))
        return into

    return SavedArtifact(f"{store.location}/{artifact.key}", artifact.bytes, chunk, fetch)


@refusals()
def check_empty(store: RemoteStore) -> None:
    """Raises CannotDo if there are versions: a job begins from the newest, which must be the import."""
    store.check()
    if versions := store.versions():
        raise CannotDo(
            f"{store.location} holds versions already, up to {versions[-1]}; give another prefix or job",
            USAGE,
        )
