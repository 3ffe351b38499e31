"""Turns the job's `spec.tiers.remote` into checked settings, and mends credentials.

People put credentials into Secrets by `echo key | base64`, which ends in a line break that no header may
hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import msgspec

from tiercheck.protocol.names import ENV_POD_UID
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.remote.errors import Reason, RemoteConfigError, RemoteError


class S3Settings(msgspec.Struct, frozen=True, rename="camel"):
    """A bucket. Credentials are never in here: they come from the environment, as boto3 finds them."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint: str | None = None
    """Base URL of an S3-compatible server; None: AWS."""
    ca_bundle: str | None = None
    """PEM text, or the path of a PEM file, of the authority that signed the endpoint's certificate."""


class DirectorySettings(msgspec.Struct, frozen=True, rename="camel"):
    """A directory that every worker mounts at the same path."""

    path: str
    """Must exist: it is where the volume is mounted."""
    sub_path: str = ""
    """Folder in it to use; made if it is missing."""


class _Remote(msgspec.Struct, frozen=True, rename="camel"):
    s3: S3Settings | None = None
    directory: DirectorySettings | None = None
    take_over_from: str = ""


def take_over_from(remote_json: str) -> str:
    """UID of the job whose folder this one may take over; empty: of none. Call `parse` before."""
    return decode(remote_json, _Remote).take_over_from


def parse(remote_json: str) -> S3Settings | DirectorySettings:
    """Decode and check. Raises RemoteConfigError with a sentence."""
    try:
        remote = decode(remote_json, _Remote)
    except Malformed as error:
        raise RemoteConfigError(f"The remote tier's settings cannot be read: {error}.") from error
    if (remote.s3 is None) == (remote.directory is None):
        raise RemoteConfigError("The remote tier needs exactly one of s3 and directory.")
    if remote.directory is not None:
        if not PurePosixPath(remote.directory.path).is_absolute():
            raise RemoteConfigError(
                f"tiers.remote.directory.path must be absolute, not {remote.directory.path!r}."
            )
        _check_folders("tiers.remote.directory.subPath", remote.directory.sub_path)
        return remote.directory
    assert remote.s3 is not None
    _check_s3(remote.s3)
    return remote.s3


def _check_s3(settings: S3Settings) -> None:
    if not settings.bucket or "/" in settings.bucket:
        raise RemoteConfigError(f"tiers.remote.s3.bucket is the bucket's bare name, not {settings.bucket!r}.")
    _check_folders("tiers.remote.s3.prefix", settings.prefix)
    if settings.endpoint:
        try:
            url = urlsplit(settings.endpoint)
        except ValueError as error:
            raise RemoteConfigError(f"tiers.remote.s3.endpoint is no URL: {error}.") from error
        if url.scheme not in ("http", "https") or not url.netloc:
            raise RemoteConfigError(
                f"tiers.remote.s3.endpoint must begin with http:// or https://, not {settings.endpoint!r}."
            )


def _check_folders(field: str, path: str) -> None:
    if any(part in (".", "..") for part in path.split("/")):
        raise RemoteConfigError(f'{field} must not have "." or ".." as a part: {path!r}.')
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise RemoteConfigError(f"{field} must not have control characters.")


log = logging.getLogger(__name__)

PARALLEL_PARTS = 4
"""Parts of one object that are on their way to a bucket, or from it, at the same time."""
_SIGNING = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def clean_credentials(env: MutableMapping[str, str]) -> None:
    """Strip blanks and line breaks around each AWS_ variable. Raises RemoteError if one that signs holds them
    within."""
    padded = [name for name, value in env.items() if name.startswith("AWS_") and value != value.strip()]
    for name in sorted(padded):
        env[name] = env[name].strip()
        log.warning(
            "%s has blanks or a line break around its value; they are left out: %s", name, mend_credentials()
        )
    for name in _SIGNING:
        value = env.get(name, "")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise RemoteError(
                Reason.FORBIDDEN,
                f"{name} holds a blank, a line break or another character that no credential has; "
                f"{mend_credentials()}.",
                retriable=False,
            )


def give_credentials() -> str:
    """What to do where there are none. In a pod they are the job's, at a command line the caller's own."""
    if os.environ.get(ENV_POD_UID):
        return (
            "name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in credentialsSecretName, "
            "or give the pods a cloud identity"
        )
    return (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of ~/.aws that has them"
    )


def mend_credentials() -> str:
    """What to do about wrong ones."""
    if os.environ.get(ENV_POD_UID):
        return "correct the Secret named in credentialsSecretName"
    return "correct the AWS_ variables of the environment, or the profile that AWS_PROFILE names"
