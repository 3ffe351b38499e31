"""Makes the two S3 clients agree: one set of credentials, timeouts, trust and addressing for boto3 and obstore."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tiercheck_sidecar.remote import s3_errors
from tiercheck_sidecar.remote.config import S3Settings
from tiercheck_sidecar.remote.errors import Reason, RemoteError

CONNECT_SECONDS = 5
READ_SECONDS = 10
PART_SECONDS = 300
"""A part of a large artifact on a slow line may take long; a dead server is noticed by the small requests before."""
RETRIES = 3
CREDENTIAL_MINUTES = 5
"""boto3 renews temporary credentials 10 minutes before they expire, so what it gave is good for this long."""


@dataclass
class Clients:
    """Both clients of one bucket."""

    boto: Any
    bulk: Any
    _plain: Any
    """As `bulk`, without checksums."""
    _trust: int | None = None
    """Descriptor of the authorities' file, which boto3 reads by name at every new connection."""
    _probing: threading.Lock = field(default_factory=threading.Lock)
    _probed: bool = False

    @staticmethod
    def connect(settings: S3Settings, location: str) -> Clients:
        """Contacts no bucket, but may ask the cloud for credentials. Raises RemoteError and botocore's errors."""
        import boto3
        from botocore.config import Config

        session = boto3.Session(region_name=settings.region)
        credentials = session.get_credentials()
        if credentials is None:
            raise s3_errors.credentials_missing(location)
        authorities = _authorities(settings, location)
        trust = _as_file(authorities) if authorities else None
        boto = session.client(
            "s3",
            region_name=session.region_name or "us-east-1",
            endpoint_url=settings.endpoint or None,
            verify=f"/proc/self/fd/{trust}" if trust is not None else None,
            config=Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"mode": "standard", "total_max_attempts": RETRIES},
                max_pool_connections=16,
                s3={"addressing_style": "path" if settings.endpoint else "auto"},
                # Many S3-compatible servers refuse the checksum trailers that newer clients add on their own.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        bulk = _bulk(settings, boto, session, authorities, checksum=True)
        return Clients(boto, bulk, _bulk(settings, boto, session, authorities, checksum=False), trust)

    def probe(self, key: str, location: str) -> None:
        """Once: learn whether writing is allowed and whether the server takes CRC64NVME, with one tiny object."""
        import obstore
        from obstore.exceptions import BaseError

        with self._probing:
            if self._probed:
                return
            try:
                obstore.put(self.bulk, key, b"tiercheck\n")
            except (BaseError, FileNotFoundError) as error:
                translated = s3_errors.from_obstore(error, location)
                if translated.reason is not Reason.OTHER:
                    raise translated from error
                self.bulk = self._plain
                try:
                    obstore.put(self.bulk, key, b"tiercheck\n")
                except (BaseError, FileNotFoundError) as again:
                    raise s3_errors.from_obstore(again, location) from again
            self._probed = True

    def close(self) -> None:
        """Release connections."""
        self.boto.close()
        if self._trust is not None:
            os.close(self._trust)
            self._trust = None


def _bulk(settings: S3Settings, boto: Any, session: Any, authorities: bytes | None, *, checksum: bool) -> Any:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    options: dict[str, Any] = {
        # boto3 may have found the endpoint in the environment; it knows where it will really go.
        "allow_http": boto.meta.endpoint_url.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=PART_SECONDS),
    }
    if authorities:
        options["root_certificate"] = authorities
    config: dict[str, Any] = {"region": boto.meta.region_name, "unsigned_payload": True}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
        config["virtual_hosted_style_request"] = False
    if checksum:
        config["checksum_algorithm"] = "CRC64NVME"
    return S3Store(
        settings.bucket,
        config=config,  # type: ignore[arg-type]
        client_options=options,  # type: ignore[arg-type]
        retry_config={
            "max_retries": RETRIES,
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=3),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=60),
        },
        credential_provider=Boto3CredentialProvider(session, ttl=timedelta(minutes=CREDENTIAL_MINUTES)),
    )


def _authorities(settings: S3Settings, location: str) -> bytes | None:
    bundle = settings.ca_bundle or os.environ.get("AWS_CA_BUNDLE")  # the latter boto3 would find by itself, obstore not
    if not bundle:
        return None
    if "-----BEGIN" in bundle:
        return bundle.encode()
    try:
        return Path(bundle).read_bytes()
    except OSError as error:
        raise RemoteError(
            Reason.OTHER,
            f"The caBundle for {location} cannot be read ({error}); give PEM text or the path of a mounted file.",
            retriable=True,
        ) from error


def _as_file(content: bytes) -> int:
    """A descriptor that can be opened by name although the container's file system is read-only."""
    descriptor = os.memfd_create("tiercheck-authorities", 0)
    os.write(descriptor, content)
    return descriptor
