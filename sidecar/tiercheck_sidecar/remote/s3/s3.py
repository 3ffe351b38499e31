"""Keeps the remote tier in a bucket: obstore uploads artifacts, boto3's connections do the rest.

boto3 finds credentials, lists, deletes, and creates the manifest with `If-None-Match: *`. Payloads are not
signed (SHA-256 of every byte would cost more than sending it); where the server supports it, CRC64NVME
protects them on the way, and TierCheck's own digests protect them for good.

A multipart upload that a killed sidecar left is continued, so that its parts are not sent again. Its state is
in the store, which lists the parts it has. A part counts only if it is what would be sent: by the CRC64NVME
that the server keeps of it, else by its ETag where that is the MD5. obstore cannot continue an upload, nor
send the MD5 that some locked buckets demand, so boto3 sends these parts, at several times the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

from tiercheck_sidecar import coding
from tiercheck_sidecar.remote import keys as layout
from tiercheck_sidecar.remote.config import ARCHIVES, PARALLEL_PARTS, S3Settings
from tiercheck_sidecar.remote.errors import Reason, RemoteClosed, RemoteCorrupt, RemoteError, ignore
from tiercheck_sidecar.remote.objects import Arrived, Gate, Objects, Stored, read_all
from tiercheck_sidecar.remote.s3 import s3_errors

if TYPE_CHECKING:
    from tiercheck_sidecar.remote.s3.s3_clients import Clients

log = logging.getLogger(__name__)

PART = 16 * 1024 * 1024
MAX_PARTS = 9000  # S3 allows 10,000


def part_size(size: int, chunk: int) -> int:
    """Returns the bytes per part, a multiple of `chunk`; equal for all artifacts of this size."""
    return -(-max(PART, -(-size // MAX_PARTS)) // chunk) * chunk


class UnfinishedUpload:
    """The parts of `part` bytes that an earlier upload of `source` to the full `key` left in the store."""

    def __init__(self, clients: Clients, key: str, source: memoryview, part: int, closed: Event) -> None:
        self._boto, self._place = clients.boto, {"Bucket": clients.bucket, "Key": key}
        self._location = clients.location
        self._checksum = clients.transfers.checksum
        self._source, self._part, self._closed = source, part, closed
        self._count = -(-len(source) // part)

    def complete(self, gate: Gate) -> bool:
        """Sends what is missing; returns False if no usable part was left, unless boto3 has to upload all.

        Raises RemoteError and botocore's errors."""
        from botocore.exceptions import BotoCoreError, ClientError

        name, parts = self._find()
        if self._checksum == "MD5":
            name = name or {**self._place, "UploadId": self._create()}
        elif not parts or self._checksum == "SHA256":
            return False
        log.info("%s goes on: %d of %d parts are stored already", self._place["Key"], len(parts), self._count)
        missing = [number for number in range(1, self._count + 1) if number not in parts]
        try:
            with ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="remote-part") as pool:
                sending = {number: pool.submit(self._send, name, number, gate) for number in missing}
                try:
                    parts |= {number: sent.result() for number, sent in sending.items()}
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
        except RemoteCorrupt:
            with contextlib.suppress(BotoCoreError, ClientError):  # `forget_unfinished` tries again
                self._boto.abort_multipart_upload(**name)
            raise
        listed = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
        self._boto.complete_multipart_upload(**name, MultipartUpload={"Parts": listed})
        return True

    def _create(self) -> str:
        return str(self._boto.create_multipart_upload(**self._place)["UploadId"])

    def _send(self, name: dict[str, str], number: int, gate: Gate) -> str:
        if self._closed.is_set():
            raise RemoteClosed
        piece = self._piece(number)
        gate((number - 1) * self._part, piece)
        crc = _crc64nvme(piece) if self._checksum == "CRC64NVME" else ""
        more = {"ChecksumCRC64NVME": crc} if crc else {}
        answer = self._boto.upload_part(**name, PartNumber=number, Body=io.BytesIO(piece), **more)
        if "ETag" not in answer:
            odd = s3_errors.Answer(200, sentence="a part was taken without an ETag")
            raise s3_errors.of_answer(odd, self._location)
        return str(answer["ETag"])

    def _find(self) -> tuple[dict[str, str], dict[int, str]]:
        """Returns the unfinished upload with the most good parts, and their ETags by number."""
        from botocore.exceptions import ClientError

        found: list[tuple[dict[str, str], dict[int, str]]] = [({}, {})]
        try:
            uploads = self._boto.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._place["Bucket"], Prefix=self._place["Key"]
            )
            for entry in [entry for page in uploads for entry in page.get("Uploads", ())]:
                if entry["Key"] == self._place["Key"]:
                    name = {**self._place, "UploadId": entry["UploadId"]}
                    pages = self._boto.get_paginator("list_parts").paginate(**name)
                    stored = [part for page in pages for part in page.get("Parts", ())]
                    good = {one["PartNumber"]: one["ETag"] for one in stored if self._is_ours(one)}
                    found.append((name, good))
        except ClientError as error:
            # Not every server or policy allows it; then all of it is sent.
            failure = s3_errors.from_boto(error, self._location)
            if failure.reason not in (Reason.FORBIDDEN, Reason.OTHER):
                raise
            log.info("cannot list what is left of %s: %s", self._place["Key"], failure)
        return max(found, key=lambda each: len(each[1]))

    def _is_ours(self, stored: Any) -> bool:
        number = int(stored["PartNumber"])
        piece = self._piece(number)
        if not 1 <= number <= self._count or stored["Size"] != len(piece):
            return False
        checksum = stored.get("ChecksumCRC64NVME")
        ours = _crc64nvme(piece) if checksum else ""
        if ours:
            return bool(checksum == ours)
        return str(stored["ETag"]).strip('"') == hashlib.md5(piece, usedforsecurity=False).hexdigest()

    def _piece(self, number: int) -> memoryview:
        begin = (number - 1) * self._part
        return self._source[begin : begin + self._part]


def _crc64nvme(piece: memoryview) -> str:
    """Returns the checksum; empty: it cannot be computed here."""
    return coding.library().crc64nvme(piece) if coding.is_here() else ""


CONFLICT_TRIES = 6
BODY_TRIES = 3
SETTLE_SECONDS = 1.0
PARALLEL_DELETES = 8


class S3Objects(Objects):
    """The job's folder in a bucket. Connects at the first call, to find credentials that appear later."""

    def __init__(self, settings: S3Settings, folder: str) -> None:
        self._bucket = settings.bucket
        self._folder = folder
        self._settings = settings
        self.location = f"s3://{settings.bucket}/{folder}"
        self._connecting = threading.Lock()
        self._connected: Clients | None = None
        self._closed = threading.Event()
        self._keeps_versions = False

    def check(self) -> None:
        clients = self._clients()
        with self._boto():
            # Not HeadBucket: its errors have no body, and a policy may allow listing under the prefix only.
            clients.boto.list_objects_v2(
                Bucket=self._bucket, Prefix=f"{self._folder}/{layout.MANIFESTS}", MaxKeys=1
            )
        self._probe(clients)

    def upload(self, key: str, source: memoryview, chunk: int, gate: Gate) -> None:
        clients = self._clients()
        self._probe(clients)
        part = part_size(len(source), chunk)
        name = self._key(key)
        if len(source) <= part:
            gate(0, source)
            clients.send(name, source[:])  # obstore may hold the view for a moment after a close
            return
        with self._boto():
            if not UnfinishedUpload(clients, name, source, part, self._closed).complete(gate):
                clients.transfers.send_parts(name, source, part, gate)

    def write(self, key: str, body: bytes) -> None:
        clients = self._clients()
        with self._boto():
            clients.boto.put_object(Bucket=self._bucket, Key=self._key(key), Body=body)

    def create(self, key: str, body: bytes) -> bool:
        from botocore.exceptions import ClientError

        clients = self._clients()
        self._probe(clients)
        if not clients.conditional:
            return self._create_and_verify(key, body)
        with self._boto():
            for attempt in range(1, CONFLICT_TRIES + 1):
                try:
                    clients.boto.put_object(
                        Bucket=self._bucket, Key=self._key(key), Body=body, IfNoneMatch="*"
                    )
                    return True
                except ClientError as error:
                    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                    if status == 412:
                        return False
                    # 409: another conditional request on this key was under way; none has succeeded yet.
                    if status != 409 or attempt == CONFLICT_TRIES:
                        raise
                if self._closed.wait(random.uniform(0, 0.05 * 2**attempt)):
                    raise RemoteClosed
        raise AssertionError("unreachable")

    def _create_and_verify(self, key: str, body: bytes) -> bool:
        """Creates an object where the server ignores the condition: the write that is read afterwards wins.

        A writer that checked before this write has written by then too, unless it was delayed for longer.
        """
        if self.read(key) is not None:
            return False
        self.write(key, body)
        if self._closed.wait(SETTLE_SECONDS):
            raise RemoteClosed
        return self.read(key) == body

    def _probe(self, clients: Clients) -> None:
        with self._boto():
            clients.probe(self._key(layout.PROBE))
        if not clients.conditional:
            self.weakness = (
                f"{self.location} takes If-None-Match and does not mind it, so two writers may both believe "
                "that theirs is the manifest; each is read back instead. Use a server that honours "
                "conditional writes, and see that no other job writes there."
            )

    def read(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError

        clients = self._clients()
        with self._boto():
            for left in reversed(range(BODY_TRIES)):
                try:
                    answer = clients.boto.get_object(Bucket=self._bucket, Key=self._key(key))
                    with contextlib.closing(answer["Body"]) as body:
                        return read_all(body.read, f"{self.location}/{key}", answer.get("ContentLength", 0))
                except ClientError as error:
                    if s3_errors.is_absent(s3_errors.answer_of(error.response)):
                        return None
                    refused = s3_errors.from_boto(error, self.location).reason is Reason.FORBIDDEN
                    if refused and not self._is_listed(key):
                        return None
                    raise
                except (HTTPClientError, IncompleteReadError):  # botocore repeats requests, but no body
                    if not left or self._closed.is_set():
                        raise
        raise AssertionError("unreachable")

    def read_into(self, key: str, offset: int, into: memoryview, arrived: Arrived = ignore) -> int:
        if not into:
            return 0
        clients = self._clients()
        with self._boto():
            try:
                return clients.ranges.read_into(self._key(key), offset, into, arrived)
            except RemoteError as error:
                if error.reason is Reason.FORBIDDEN and not self._is_listed(key):
                    return 0
                raise

    def _is_listed(self, key: str) -> bool:
        """Returns whether an object exists that may not be read.

        Where a policy allows to list one prefix only, many servers refuse to read what does not exist (403),
        because the read names no prefix. Raises RemoteError, and botocore's errors."""
        return any(each.key == key for each in self.list(key))

    def list(self, prefix: str) -> list[Stored]:
        clients = self._clients()
        root = f"{self._folder}/"
        with self._boto():
            pages = clients.boto.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(prefix)
            )
            return [
                Stored(
                    entry["Key"].removeprefix(root),
                    entry["Size"],
                    entry["LastModified"].timestamp(),
                    entry.get("StorageClass") in ARCHIVES,
                )
                for page in pages
                for entry in page.get("Contents", ())
            ]

    def delete(self, keys: Iterable[str]) -> None:
        clients = self._clients()

        def delete_one(key: str) -> None:
            answer = clients.boto.delete_object(Bucket=self._bucket, Key=self._key(key))
            self._keeps_versions |= bool(answer.get("DeleteMarker") or answer.get("VersionId"))

        # Not in bulk: that needs an MD5 or CRC header which S3-compatible servers disagree about.
        with self._boto(), ThreadPoolExecutor(PARALLEL_DELETES, thread_name_prefix="remote-delete") as pool:
            for done in [pool.submit(delete_one, key) for key in keys]:
                done.result()

    def forget_unfinished(self, dead: Callable[[str], bool]) -> None:
        clients = self._clients()
        try:
            with self._boto():
                pages = clients.boto.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._bucket, Prefix=self._key(layout.ARTIFACTS)
                )
                for entry in [entry for page in pages for entry in page.get("Uploads", ())]:
                    if dead(entry["Key"].removeprefix(f"{self._folder}/")):
                        clients.boto.abort_multipart_upload(
                            Bucket=self._bucket, Key=entry["Key"], UploadId=entry["UploadId"]
                        )
        except RemoteError as error:
            # Not every server or policy allows it; a lifecycle rule of the bucket does the same work.
            if error.reason not in (Reason.FORBIDDEN, Reason.OTHER):
                raise

    def remains_of_deleted(self) -> str:
        from botocore.exceptions import ClientError

        if not self._keeps_versions:
            return ""
        rules: list[Any] = []
        with self._boto():
            try:
                rules = self._clients().boto.get_bucket_lifecycle_configuration(Bucket=self._bucket)["Rules"]
            except ClientError as error:
                if s3_errors.answer_of(error.response).code != "NoSuchLifecycleConfiguration":
                    raise
        if any(self._expires_versions(rule) for rule in rules):
            return ""
        return (
            f"the bucket of {self.location} keeps the old versions of what is deleted, and no lifecycle rule "
            "ends them, so it grows for ever. Add one with NoncurrentVersionExpiration (NoncurrentDays: 1) "
            "and Expiration (ExpiredObjectDeleteMarker: true) for this prefix."
        )

    def _expires_versions(self, rule: Any) -> bool:
        only = rule.get("Filter", rule)
        prefix = only.get("Prefix") or only.get("And", {}).get("Prefix") or ""
        enabled = rule.get("Status") == "Enabled" and "NoncurrentVersionExpiration" in rule
        return enabled and self._folder.startswith(prefix.rstrip("/"))

    def close(self) -> None:
        self._closed.set()
        with self._connecting:
            if self._connected is not None:
                self._connected.close()
                self._connected = None

    def _key(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _clients(self) -> Clients:
        from tiercheck_sidecar.remote.s3.s3_clients import Clients  # late: it loads obstore

        with self._connecting:
            if self._closed.is_set():
                raise RemoteClosed
            if self._connected is None:
                with self._boto():
                    self._connected = Clients.connect(self._settings, self.location, self._closed)
            return self._connected

    @contextlib.contextmanager
    def _boto(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise s3_errors.from_boto(error, self.location) from error
