"""One set of credentials, timeouts, trust and addressing for both ways to a bucket: boto3 for control, our own connections for bytes.

boto3 decides all of it: the chain of credentials (environment, profiles, web identity, instance), the endpoint, path or virtual-host
addressing, the region and the authorities. Our own connections ask it.
"""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercheck_sidecar.remote import crc64nvme, s3_errors
from tiercheck_sidecar.remote.config import S3Settings
from tiercheck_sidecar.remote.credentials import clean_credentials, mend_credentials
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.objects import Gate, bounded
from tiercheck_sidecar.remote.s3_lines import CONNECT_SECONDS, Lines

READ_SECONDS = 10
TRIES = 3
UNSIGNED = "UNSIGNED-PAYLOAD"
CHECKSUM = "x-amz-checksum-crc64nvme"


@dataclass
class Clients:
    """Both ways to one bucket."""

    boto: Any
    lines: Lines
    bucket: str
    checksums: bool = True
    """Whether bytes travel with a CRC64NVME."""
    conditional: bool = True
    """Whether the server honours `If-None-Match: *`, as far as is known: the probe tells."""
    _trust: int | None = None
    """Descriptor of the authorities' file, which boto3 reads by name at every new connection."""
    _probing: threading.Lock = field(default_factory=threading.Lock)
    _probed: bool = False

    @staticmethod
    def connect(settings: S3Settings, location: str, closed: threading.Event) -> Clients:
        """Contacts no bucket, but may ask the cloud for credentials. Raises RemoteError and botocore's errors."""
        import boto3
        from botocore.config import Config
        from botocore.utils import get_environ_proxies

        clean_credentials(os.environ)
        session = boto3.Session(region_name=settings.region)
        credentials = session.get_credentials()
        if credentials is None:
            raise s3_errors.credentials_missing(location)
        authorities = _authorities(settings, session, location)
        trust = _as_file(authorities) if authorities else None
        config = Config(
            signature_version="s3v4",
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            max_pool_connections=16,
            s3={"addressing_style": "path" if settings.endpoint else "auto"},
            # Many S3-compatible servers refuse the checksum trailers that newer clients add on their own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            boto = session.client(
                "s3",
                region_name=session.region_name or "us-east-1",
                endpoint_url=settings.endpoint or None,
                verify=f"/proc/self/fd/{trust}" if trust is not None else None,
                config=config,
            )
        except ValueError as error:
            raise RemoteError(Reason.OTHER, _no_client(settings, location), retriable=False) from error
        boto._endpoint.http_session = _BoundedAnswers(boto._endpoint.http_session, location)
        lines = Lines(
            _signer(credentials, boto.meta.region_name, location),
            location,
            lambda: _tls(authorities),
            get_environ_proxies(boto.meta.endpoint_url),
            closed,
        )
        return Clients(boto, lines, settings.bucket, crc64nvme.available(), _trust=trust)

    def url(self, key: str) -> str:
        """Of an object, as boto3 addresses it."""
        signed: str = self.boto.generate_presigned_url("get_object", Params={"Bucket": self.bucket, "Key": key})
        return signed.partition("?")[0]

    def guarded(self, body: memoryview | bytes) -> dict[str, str]:
        """The headers that let the server check `body` on arrival."""
        return {CHECKSUM: crc64nvme.header_value(body)} if self.checksums else {}

    def guarding(self, gate: Gate, offset: int, piece: memoryview) -> dict[str, str]:
        """The same headers, made while `gate` reads the piece."""
        if not self.checksums:
            gate(offset, piece)
            return {}
        running = crc64nvme.Running()
        gate(offset, piece, running.update)
        return {CHECKSUM: running.header_value()}

    def probe(self, key: str, location: str) -> None:
        """Once: learn whether writing is allowed, whether the server takes CRC64NVME, and whether it refuses to write what is there already
        if asked to, with one tiny object."""
        with self._probing:
            if self._probed:
                return
            body, url = b"tiercheck\n", self.url(key)
            answer = self.lines.request("PUT", url, self.guarded(body), body)
            if answer.status != 200 and self.checksums:
                refusal = s3_errors.from_body(answer.status, answer.body, location)
                if refusal.reason is not Reason.OTHER:
                    raise refusal
                self.checksums = False
                answer = self.lines.request("PUT", url, {}, body)
            if answer.status != 200:
                raise s3_errors.from_body(answer.status, answer.body, location)
            again = self.lines.request("PUT", url, {**self.guarded(body), "If-None-Match": "*"}, body)
            # 409: another probe is under way. A server that has never heard of it ignores it, or says that it cannot.
            self.conditional = again.status in (409, 412)
            if not self.conditional and again.status not in (200, 400, 501):
                raise s3_errors.from_body(again.status, again.body, location)
            self._probed = True

    def close(self) -> None:
        """Release connections."""
        self.boto.close()
        self.lines.close()
        if self._trust is not None:
            os.close(self._trust)
            self._trust = None


def _signer(credentials: Any, region: str, location: str) -> Any:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.exceptions import BotoCoreError

    class Unsigned(S3SigV4Auth):  # type: ignore[misc]
        def payload(self, request: Any) -> str:
            return UNSIGNED  # SHA-256 of every byte would cost more than sending it

    def sign(method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        request = AWSRequest(method, url, headers=headers)
        try:
            Unsigned(credentials.get_frozen_credentials(), "s3", region).add_auth(request)  # renewed when they expire
        except BotoCoreError as error:
            raise s3_errors.from_boto(error, location) from error
        host = url.partition("://")[2].partition("/")[0]
        return {"Host": host, **dict(request.headers.items())}

    return sign


class _BoundedAnswers:
    """botocore's HTTP, with a limit to what it reads into memory: listings and errors, which it would read to whatever end."""

    def __init__(self, session: Any, location: str) -> None:
        self._session, self._location = session, location

    def send(self, request: Any) -> Any:
        """Raises RemoteCorrupt, and what botocore's raises."""
        streamed, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        if not streamed or response.status_code >= 300:
            try:
                response._content = bounded(response.raw.read, f"an answer of {self._location}")
            except BaseException:
                response.raw.close()
                raise
        return response

    def close(self) -> None:
        self._session.close()


def _no_client(settings: S3Settings, location: str) -> str:
    if settings.endpoint:
        return (
            f"{location} cannot be reached at {settings.endpoint}: that is no URL of a host (names have letters, digits, dots and hyphens); "
            "correct tiers.remote.s3.endpoint."
        )
    return (
        f"{location} cannot be reached: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or another AWS_ setting has no valid value; "
        f"{mend_credentials()}."
    )


def _tls(authorities: bytes | None) -> ssl.SSLContext:
    from botocore.httpsession import get_cert_path

    if authorities:
        return ssl.create_default_context(cadata=authorities.decode())
    context = ssl.create_default_context()
    context.load_verify_locations(get_cert_path(True))
    return context


def _authorities(settings: S3Settings, session: Any, location: str) -> bytes | None:
    # The second is AWS_CA_BUNDLE, or ca_bundle of the profile.
    bundle = settings.ca_bundle or session._session.get_config_variable("ca_bundle")
    if not bundle:
        return None
    if "-----BEGIN" in bundle:
        return bytes(bundle.encode())
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
