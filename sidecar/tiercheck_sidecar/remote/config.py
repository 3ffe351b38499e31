"""Turns the job's `spec.tiers.remote` into checked settings, and cleans up credentials.

Credentials are often put into Secrets with `echo key | base64`, which ends in a line break that no header may
hold.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
from collections.abc import MutableMapping
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from tiercheck.protocol.names import ENV_POD_UID
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.remote.errors import Reason, RemoteConfigError, RemoteError


class Encryption(msgspec.Struct, frozen=True, rename="camel"):
    """Server-side encryption of each object."""

    type: Literal["SSE-S3", "SSE-KMS"]
    kms_key_id: str | None = None


class S3Settings(msgspec.Struct, frozen=True, rename="camel"):
    """The settings of a bucket. They hold no credentials: boto3 finds those in the environment."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint: str | None = None
    """Base URL of an S3-compatible server; None: AWS."""
    ca_bundle: str | None = None
    """PEM text, or the path of a PEM file, of the authority that signed the endpoint's certificate."""
    addressing: Literal["Path", "Virtual"] | None = None
    """The place of the bucket's name in a URL; None: the path with an endpoint, else boto3's choice."""
    encryption: Encryption | None = None
    requester_pays: bool = False
    storage_class: str | None = None


ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes with objects that cannot be read before they are restored from the archive."""
_SPECIAL_BUCKET = re.compile(r"--(x|xa|op|ol|table)-s3$|\.mrap$")
"""Names that AWS reserves for what needs other signatures, or lacks operations of a bucket."""
S3_FIELDS = S3Settings.__struct_encode_fields__
"""The fields of `spec.tiers.remote.s3`, except those that only a pod can be given: Secret, ConfigMap."""


class DirectorySettings(msgspec.Struct, frozen=True, rename="camel"):
    """A directory that every worker mounts at the same path."""

    path: str
    """The mount point of the volume; must exist."""
    sub_path: str = ""
    """The folder in it to use; made if it is missing."""


class _Remote(msgspec.Struct, frozen=True, rename="camel"):
    s3: S3Settings | None = None
    directory: DirectorySettings | None = None
    take_over_from: str = ""


def take_over_from(remote_json: str) -> str:
    """Returns the UID of the job that this one may replace as owner; empty: none. Call `parse` first."""
    return decode(remote_json, _Remote).take_over_from


def parse(remote_json: str) -> S3Settings | DirectorySettings:
    """Decodes and checks the settings. Raises RemoteConfigError with a sentence."""
    try:
        remote = decode(remote_json, _Remote)
    except Malformed as error:
        raise RemoteConfigError(f"The remote tier's settings cannot be read: {error}.") from error
    if (remote.s3 is None) == (remote.directory is None):
        raise RemoteConfigError("The remote tier needs exactly one of s3 and directory.")
    if remote.directory is not None:
        if not PurePosixPath(remote.directory.path).is_absolute():
            raise RemoteConfigError(
                f"The path of the remote tier's directory must be absolute, not {remote.directory.path!r}."
            )
        _check_folders("tiers.remote.directory.subPath", remote.directory.sub_path)
        return remote.directory
    assert remote.s3 is not None
    _check_s3(remote.s3)
    return remote.s3


def authority_file(remote_json: str) -> Path | None:
    """Returns the file of the authorities that the endpoint's certificate is compared with; None: no file."""
    with contextlib.suppress(Malformed):
        s3 = decode(remote_json, _Remote).s3
        if s3 is not None and (s3.ca_bundle or "").startswith("/"):
            return Path(s3.ca_bundle or "")
    return None


def _check_s3(settings: S3Settings) -> None:
    if not settings.bucket or "/" in settings.bucket:
        raise RemoteConfigError(f"tiers.remote.s3.bucket is the bucket's bare name, not {settings.bucket!r}.")
    if not settings.endpoint and _SPECIAL_BUCKET.search(settings.bucket):
        raise RemoteConfigError(
            f"tiers.remote.s3.bucket is {settings.bucket!r}. By AWS's rules for names that is a directory "
            "bucket (S3 Express One Zone), a table bucket or a special access point, which is not served; "
            "give a general purpose bucket."
        )
    _check_folders("tiers.remote.s3.prefix", settings.prefix)
    if settings.storage_class in ARCHIVES:
        raise RemoteConfigError(
            f"tiers.remote.s3.storageClass is {settings.storage_class}, an archive, from which nothing can "
            "be restored; give one that can be read at once, such as STANDARD_IA."
        )
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
"""The number of parts of one object that are sent to a bucket at the same time."""
STALL_SECONDS = 10
"""Seconds without a byte read, a part accepted or an answer, after which a transfer has stalled."""
TRIES = 8
BACKOFF = (0.2, 5.0)
"""Seconds: the first pause between two tries, and the longest."""
_SIGNING = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def clean_credentials(env: MutableMapping[str, str]) -> None:
    """Strips whitespace around AWS_ variables. Raises RemoteError for invalid characters in a credential."""
    padded = [name for name, value in env.items() if name.startswith("AWS_") and value != value.strip()]
    for name in sorted(padded):
        env[name] = env[name].strip()
        log.warning(
            "%s has blanks or a line break around its value; they are left out: %s",
            name,
            wrong_credentials_advice(),
        )
    for name in _SIGNING:
        value = env.get(name, "")
        if not (value.isascii() and value.isprintable()) or " " in value:
            raise RemoteError(
                Reason.FORBIDDEN,
                f"{name} holds a blank, a line break or another character that no credential has; "
                f"{wrong_credentials_advice()}.",
                retriable=False,
            )


def normalize_proxy_settings(endpoint: str, env: MutableMapping[str, str]) -> None:
    """Translates for botocore what only curl and Go understand: networks in NO_PROXY, and ALL_PROXY."""
    bypassed = f"{env.get('no_proxy', '')},{env.get('NO_PROXY', '')}"
    url = urlsplit(endpoint)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(url.hostname or "")
        for entry in bypassed.split(","):
            with contextlib.suppress(ValueError):
                if str(address) not in bypassed and address in ipaddress.ip_network(
                    entry.strip(), strict=False
                ):
                    env["no_proxy"] = env["NO_PROXY"] = f"{bypassed},{address},[{address}]".strip(",")
    for_all = env.get("all_proxy") or env.get("ALL_PROXY")
    if for_all and not env.get(f"{url.scheme}_proxy") and not env.get(f"{url.scheme.upper()}_PROXY"):
        env[f"{url.scheme}_proxy"] = for_all


def missing_credentials_advice() -> str:
    """Returns the advice for missing credentials: the job's in a pod, the caller's at a command line."""
    if os.environ.get(ENV_POD_UID):
        return (
            "name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in credentialsSecretName, "
            "or give the pods a cloud identity"
        )
    return (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE to a profile of ~/.aws that has them"
    )


def untrusted_certificate_advice() -> str:
    """Returns the advice for an endpoint certificate that is not trusted."""
    in_spec = "give its authority in tiers.remote.s3.caBundle"
    return in_spec if os.environ.get(ENV_POD_UID) else f"{in_spec}, or here in AWS_CA_BUNDLE"


def wrong_credentials_advice() -> str:
    if os.environ.get(ENV_POD_UID):
        return "correct the Secret named in credentialsSecretName"
    return "correct the AWS_ variables of the environment, or the profile that AWS_PROFILE names"
