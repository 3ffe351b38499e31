"""Goes on with a multipart upload that a killed sidecar left, so that its parts are not sent again.

The state is the store's: which parts it has, it says itself. A part counts only if it is what we would send:
by the CRC64NVME that the server keeps of it, else by its ETag where that is the MD5. obstore cannot go on
with an upload, so boto3 sends the parts that are missing, at several times the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

from tiercheck_sidecar import isal
from tiercheck_sidecar.remote.config import PARALLEL_PARTS
from tiercheck_sidecar.remote.errors import Reason, RemoteClosed, RemoteCorrupt
from tiercheck_sidecar.remote.objects import Gate
from tiercheck_sidecar.remote.s3 import s3_errors

if TYPE_CHECKING:
    from tiercheck_sidecar.remote.s3.s3_clients import Clients

log = logging.getLogger(__name__)

PART = 16 * 1024 * 1024
MAX_PARTS = 9000  # S3 allows 10,000


def part_size(size: int, chunk: int) -> int:
    """Bytes per part: a whole number of chunks. The same for every upload of an artifact of this size."""
    return -(-max(PART, -(-size // MAX_PARTS)) // chunk) * chunk


class Leftover:
    """What an earlier upload of `source` to the full `key`, in parts of `part` bytes, left in the store."""

    def __init__(self, clients: Clients, key: str, source: memoryview, part: int, closed: Event) -> None:
        self._boto, self._place = clients.boto, {"Bucket": clients.bucket, "Key": key}
        self._location = clients.location
        self._checksum = clients.transfers.checksum
        self._source, self._part, self._closed = source, part, closed
        self._count = -(-len(source) // part)

    def complete(self, gate: Gate) -> bool:
        """Send what is missing; False if nothing was left. Raises RemoteError and botocore's errors."""
        from botocore.exceptions import BotoCoreError, ClientError

        name, parts = self._find()
        if not parts or self._checksum == "SHA256":
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

    def _send(self, name: dict[str, str], number: int, gate: Gate) -> str:
        if self._closed.is_set():
            raise RemoteClosed
        piece = self._piece(number)
        gate((number - 1) * self._part, piece)
        crc = _crc64nvme(piece) if self._checksum else ""
        more = {"ChecksumCRC64NVME": crc} if crc else {}
        answer = self._boto.upload_part(**name, PartNumber=number, Body=io.BytesIO(piece), **more)
        return str(answer["ETag"])

    def _find(self) -> tuple[dict[str, str], dict[int, str]]:
        """The unfinished upload with the most good parts, and their ETags by number."""
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
            # Not every server or policy lets us; then all of it is sent.
            told = s3_errors.from_boto(error, self._location)
            if told.reason not in (Reason.FORBIDDEN, Reason.OTHER):
                raise
            log.info("cannot list what is left of %s: %s", self._place["Key"], told)
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
    """Empty: it cannot be computed here."""
    return isal.library().crc64nvme(piece) if isal.is_here() else ""
