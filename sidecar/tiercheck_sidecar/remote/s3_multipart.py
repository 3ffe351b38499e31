"""One large object as a multipart upload of our own, so that it can be gone on with after a broken connection or a restart.

The state is the store's: which parts it has, it says itself. A part counts only if it is what we would send: by the CRC64NVME that
the server keeps of it, or else by its ETag where that is the MD5. A part of which neither can be told is sent again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from tiercheck_sidecar.remote import crc64nvme, s3_errors
from tiercheck_sidecar.remote.errors import Reason, RemoteCorrupt
from tiercheck_sidecar.remote.objects import Gate
from tiercheck_sidecar.remote.s3_clients import Clients

log = logging.getLogger(__name__)

PART = 16 * 1024 * 1024
PARALLEL_PARTS = 4
MAX_PARTS = 9000  # S3 allows 10,000


def part_size(size: int, chunk: int) -> int:
    """Bytes per part: a whole number of chunks. The same for every upload of an artifact of this size."""
    return -(-max(PART, -(-size // MAX_PARTS)) // chunk) * chunk


class Multipart:
    """The upload of `source` to the full `key`. Raises RemoteError and botocore's errors; then what is stored stays, to go on from,
    unless `source` itself was bad.
    """

    def __init__(self, clients: Clients, key: str, source: memoryview, part: int, location: str) -> None:
        self._clients, self._key, self._source, self._part, self._location = clients, key, source, part, location
        self._url = clients.url(key)
        self._count = -(-len(source) // part)

    def run(self, gate: Gate) -> None:
        upload, parts = self._unfinished()
        if parts:
            log.info("%s goes on: %d of %d parts are stored already", self._key, len(parts), self._count)
        upload = upload or self._begin()
        missing = [number for number in range(1, self._count + 1) if number not in parts]
        try:
            with ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="remote-part") as pool:
                sending = {number: pool.submit(self._send, upload, number, gate) for number in missing}
                try:
                    parts |= {number: sent.result() for number, sent in sending.items()}
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            self._complete(upload, parts)
        except RemoteCorrupt:
            self._abort(upload)
            raise

    def _piece(self, number: int) -> memoryview:
        begin = (number - 1) * self._part
        return self._source[begin : begin + self._part]

    def _send(self, upload: str, number: int, gate: Gate) -> str:
        with self._piece(number) as piece:
            headers = self._clients.guarding(gate, (number - 1) * self._part, piece)
            url = f"{self._url}?partNumber={number}&uploadId={quote(upload, safe='-_.~')}"
            answer = self._clients.lines.request("PUT", url, headers, piece)
        etag = answer.headers.get("etag", "")
        if answer.status != 200 or not etag:
            raise s3_errors.from_body(answer.status, answer.body, self._location)
        return etag

    def _begin(self) -> str:
        more = {"ChecksumAlgorithm": "CRC64NVME"} if self._clients.checksums else {}
        answer = self._clients.boto.create_multipart_upload(Bucket=self._clients.bucket, Key=self._key, **more)
        return str(answer["UploadId"])

    def _complete(self, upload: str, parts: dict[int, str]) -> None:
        listed = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
        self._clients.boto.complete_multipart_upload(
            Bucket=self._clients.bucket, Key=self._key, UploadId=upload, MultipartUpload={"Parts": listed}
        )

    def _abort(self, upload: str) -> None:
        self._control("abort", lambda boto: boto.abort_multipart_upload(**self._name(upload)))

    # What an earlier try left

    def _unfinished(self) -> tuple[str, dict[int, str]]:
        """An unfinished upload of this key, and the parts of it that are as they should be; ("", {}) if there is none."""
        found: list[Any] = []

        def look(boto: Any) -> None:
            pages = boto.get_paginator("list_multipart_uploads").paginate(Bucket=self._clients.bucket, Prefix=self._key)
            found.extend(entry for page in pages for entry in page.get("Uploads", ()) if entry["Key"] == self._key)

        self._control("list uploads", look)
        best: tuple[str, dict[int, str]] = ("", {})
        for entry in found:
            parts = self._parts_of(entry["UploadId"])
            if not best[0] or len(parts) > len(best[1]):
                best = entry["UploadId"], parts
        return best

    def _parts_of(self, upload: str) -> dict[int, str]:
        stored: list[Any] = []

        def look(boto: Any) -> None:
            pages = boto.get_paginator("list_parts").paginate(**self._name(upload))
            stored.extend(entry for page in pages for entry in page.get("Parts", ()))

        self._control("list parts", look)
        with ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="remote-part") as pool:
            good = pool.map(self._is_ours, stored)
            return {entry["PartNumber"]: entry["ETag"] for entry, fits in zip(stored, good, strict=True) if fits}

    def _is_ours(self, entry: Any) -> bool:
        number = int(entry["PartNumber"])
        if not 1 <= number <= self._count:
            return False
        with self._piece(number) as piece:
            if entry["Size"] != len(piece):
                return False
            checksum = entry.get("ChecksumCRC64NVME")
            if checksum and crc64nvme.available():
                return bool(checksum == crc64nvme.header_value(piece))
            etag = str(entry["ETag"]).strip('"')
            return etag == hashlib.md5(piece, usedforsecurity=False).hexdigest()

    def _control(self, what: str, call: Callable[[Any], object]) -> None:
        """A call that not every server knows, or every policy allows; the upload does not need it."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            call(self._clients.boto)
        except (BotoCoreError, ClientError) as error:
            translated = s3_errors.from_boto(error, self._location)
            if translated.reason not in (Reason.FORBIDDEN, Reason.OTHER):
                raise
            log.info("cannot %s of %s: %s", what, self._key, translated)

    def _name(self, upload: str) -> dict[str, str]:
        return {"Bucket": self._clients.bucket, "Key": self._key, "UploadId": upload}
