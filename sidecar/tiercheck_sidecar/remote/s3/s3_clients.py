"""Builds both clients of a bucket, boto3's and obstore's, with the same credentials and addressing.

boto3 decides all of it: the chain of credentials (environment, profiles, web identity, instance), endpoint,
path or virtual-host addressing, region, authorities and proxies. obstore gets the result.
"""

from __future__ import annotations

import functools
import hashlib
import html
import os
import random
import threading
from base64 import b64encode
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercheck_sidecar.remote.config import (
    S3Settings,
    clean_credentials,
    normalize_proxy_settings,
    wrong_credentials_advice,
)
from tiercheck_sidecar.remote.errors import Reason, RemoteError
from tiercheck_sidecar.remote.objects import read_all
from tiercheck_sidecar.remote.s3 import s3_errors
from tiercheck_sidecar.remote.s3.s3_ranges import REQUEST_PAYER, RangeReader
from tiercheck_sidecar.remote.s3.s3_transfers import Transfers

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

_PLAIN = ("", "identity", "aws-chunked")
"""The encodings of an answer that is as it was written."""
CONNECT_SECONDS = 5
READ_SECONDS = 10
TRIES = 3
BUSY_TRIES, BUSY_PAUSE = 6, 0.1


@dataclass
class Clients:
    """The boto3 and obstore clients of one bucket."""

    boto: Any
    transfers: Transfers
    ranges: RangeReader
    bucket: str
    location: str
    conditional: bool = True
    """True while the server is assumed to honour `If-None-Match: *`; `probe` tests it."""
    _trust: int | None = None
    """Descriptor of the authorities' file, which boto3 opens by name for every new connection."""
    _probing: threading.Lock = field(default_factory=threading.Lock)
    _probed: bool = False

    @staticmethod
    def connect(settings: S3Settings, location: str, closed: threading.Event) -> Clients:
        """Creates the clients. Contacts no bucket, but may ask the cloud for credentials.

        Raises RemoteError and botocore's errors."""
        import boto3
        from botocore.config import Config

        clean_credentials(os.environ)
        endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or "https://s3.amazonaws.com"
        normalize_proxy_settings(endpoint, os.environ)
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
            max_pool_connections=32,
            s3={
                "addressing_style": (settings.addressing or ("Path" if settings.endpoint else "auto")).lower()
            },
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
        boto.meta.events.register("needs-retry.s3", _wait_while_busy)
        boto.meta.events.register("before-call.s3", functools.partial(_add_headers, settings))
        boto._endpoint.http_session = _BoundedAnswers(boto._endpoint.http_session, location)
        where: S3Config = {**_address(boto, settings.bucket), **_demanded(settings)}
        client, more = _connections(boto, authorities), settings.storage_class
        transfers = Transfers(where, client, credentials, location, closed, storage_class=more)
        ranges = RangeReader(boto._endpoint.http_session, where, credentials, location, closed)
        return Clients(boto, transfers, ranges, settings.bucket, location, _trust=trust)

    def probe(self, key: str) -> None:
        """Tests once, with one tiny object, whether writing, CRC64NVME and `If-None-Match` work.

        Raises RemoteError and botocore's errors."""
        from botocore.exceptions import ClientError

        with self._probing:
            if self._probed:
                return
            body = b"tiercheck\n"
            self._choose_checksum(key, body)
            try:
                self.boto.put_object(Bucket=self.bucket, Key=key, Body=body, IfNoneMatch="*")
                self.conditional = False
            except ClientError as error:
                answer = s3_errors.answer_of(error.response)
                # 409: another probe is under way. Old servers ignore or refuse the condition.
                self.conditional = not answer.refuses("if-none-match")
                if self.conditional and answer.status not in (409, 412):
                    raise
            self._probed = True

    def _choose_checksum(self, key: str, body: bytes) -> None:
        """Selects the cheapest one that works: none before SHA-256 and MD5, which locked buckets demand."""
        refusals = []
        for algorithm in ("CRC64NVME", "", "SHA256", "MD5"):
            self.transfers.use_checksum(algorithm)
            try:
                self.send(key, body)
                return
            except RemoteError as refusal:
                if refusal.reason is not Reason.OTHER:
                    raise
                refusals.append(refusal)
        raise refusals[1]  # without a checksum: the others may have been refused for theirs

    def send(self, key: str, body: memoryview | bytes) -> None:
        """Stores an object by one request. Raises RemoteError."""
        from botocore.exceptions import BotoCoreError, ClientError

        if self.transfers.checksum != "MD5":
            self.transfers.send(key, body)
            return
        try:
            self.boto.put_object(Bucket=self.bucket, Key=key, Body=bytes(body))
        except (BotoCoreError, ClientError) as error:
            raise s3_errors.from_boto(error, self.location) from error

    def close(self) -> None:
        self.transfers.close()
        self.ranges.close()
        self.boto.close()
        if self._trust is not None:
            os.close(self._trust)
            self._trust = None


def _wait_while_busy(response: Any, attempts: int, **_: Any) -> float | None:
    """Returns the pause before a retry if a busy server's answer is unknown to botocore, else None."""
    if response is None or attempts >= BUSY_TRIES or response[0].status_code >= 500:
        return None
    answer = s3_errors.answer_of(response[1])
    return random.uniform(0, BUSY_PAUSE * 2**attempts) if answer.is_busy and answer.status >= 400 else None


_SSE, _SSE_KEY = "x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id"


def _made_with(settings: S3Settings) -> dict[str, str]:
    """Returns the headers that the bucket's owner demands for new objects."""
    found = {"x-amz-storage-class": settings.storage_class}
    if settings.encryption is not None:
        found[_SSE] = "AES256" if settings.encryption.type == "SSE-S3" else "aws:kms"
        found[_SSE_KEY] = settings.encryption.kms_key_id
    return {name: value for name, value in found.items() if value}


def _demanded(settings: S3Settings) -> S3Config:
    """Returns the same demands in obstore's form."""
    config: S3Config = {"request_payer": True} if settings.requester_pays else {}
    headers = _made_with(settings)
    if _SSE in headers:
        config["server_side_encryption"] = headers[_SSE]
    if _SSE_KEY in headers:
        config["sse_kms_key_id"] = headers[_SSE_KEY]
    return config


def _add_headers(settings: S3Settings, model: Any, params: dict[str, Any], **_: Any) -> None:
    """Adds the same headers before boto3 signs, and a checksum, which locked buckets demand."""
    headers, body = params["headers"], params["body"]
    if settings.requester_pays:
        headers[REQUEST_PAYER] = "requester"
    if model.name in ("PutObject", "CreateMultipartUpload"):
        headers.update(_made_with(settings))
    if model.name in ("PutObject", "UploadPart") and "x-amz-checksum-crc64nvme" not in headers:
        content = body if isinstance(body, bytes) else body.getbuffer()
        headers["Content-MD5"] = b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def _address(boto: Any, bucket: str) -> S3Config:
    """Returns in obstore's form where and how boto3 finds the bucket."""
    url: str = boto.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    return {
        "bucket": bucket,
        "region": boto.meta.region_name,
        # obstore uses it as it is: boto3 has decided whether the bucket is in the host or in the path.
        "aws_endpoint_url_s3": url.partition("?")[0].removesuffix("/k"),
        "virtual_hosted_style_request": True,
        "skip_signature": False,
        "unsigned_payload": True,  # SHA-256 of every byte would cost more than sending it
    }


def _connections(boto: Any, authorities: bytes | None) -> ClientConfig:
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies

    url: str = boto.meta.endpoint_url
    options: ClientConfig = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "root_certificate": authorities or Path(get_cert_path(True)).read_bytes(),
    }
    proxy = get_environ_proxies(url).get(url.partition("://")[0])
    if proxy:
        options["proxy_url"] = proxy if "://" in proxy else f"http://{proxy}"
    return options


class _BoundedAnswers:
    """An HTTP session of botocore with a limit to what it reads into memory: listings and errors."""

    def __init__(self, session: Any, location: str) -> None:
        self._session, self._location = session, location

    def send(self, request: Any) -> Any:
        """Sends a request. Raises RemoteCorrupt, and what botocore's session raises."""
        from botocore.exceptions import ConnectionClosedError

        streamed, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        encoding = response.headers.get("Content-Encoding", "")
        if encoding.lower() not in _PLAIN:
            response.raw.close()
            response.status_code = 400
            response._content = _as_error(
                f"it came with Content-Encoding: {encoding}, which TierCheck never writes"
            )
        elif not streamed or response.status_code >= 300:
            try:
                response._content = read_all(response.raw.read, f"an answer of {self._location}")
            except BaseException:
                response.raw.close()
                raise
            length = response.headers.get("Content-Length", "")
            if request.method != "HEAD" and length.isdigit() and len(response._content) < int(length):
                raise ConnectionClosedError(endpoint_url=self._location)  # botocore repeats the request
            redirects = request.method == "HEAD" and 300 <= response.status_code < 400
            if redirects or (response.status_code < 300 and b"<html" in response._content[:1024].lower()):
                # botocore sends HEAD after a redirect, to find a region, and would repeat that for ever. It
                # would take a page for success.
                response.status_code = 400
            if response.status_code >= 400 and b"<Error" not in response._content:
                # Without this, botocore would keep only the status of a page that is not S3's.
                said = s3_errors.read_page(response._content.decode(errors="replace"))[1]
                response._content = _as_error(said)
        return response

    def close(self) -> None:
        self._session.close()


def _as_error(sentence: str) -> bytes:
    return f"<Error><Message>{html.escape(sentence)}</Message></Error>".encode()


def _no_client(settings: S3Settings, location: str) -> str:
    if settings.endpoint:
        return (
            f"{location} cannot be reached at {settings.endpoint}: that is no URL of a host (names have "
            "letters, digits, dots and hyphens); correct tiers.remote.s3.endpoint."
        )
    return (
        f"{location} cannot be reached: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or another AWS_ setting has no "
        f"valid value; {wrong_credentials_advice()}."
    )


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
            f"The caBundle for {location} cannot be read ({error}); give PEM text in "
            "tiers.remote.s3.caBundle, or the name of a ConfigMap and its key in caBundleConfigMap.",
            retriable=True,
        ) from error


def _as_file(content: bytes) -> int:
    """Returns a descriptor that can be opened by name although the container's file system is read-only."""
    descriptor = os.memfd_create("tiercheck-authorities", 0)
    os.write(descriptor, content)
    return descriptor
