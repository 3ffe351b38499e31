"""Makes the two kinds of durable place and what is uploaded there, and damages what lies there."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from tiercheck.protocol.version import Digests

BUCKET = "checkpoints"
CHUNK = 1024 * 1024


def sealed(folder: Path, content: bytes = b"state", chunk: int = CHUNK) -> tuple[Path, Digests]:
    """A sealed artifact of that content on a worker's memory volume."""
    path = folder / f"slot-{xxhash.xxh3_64_hexdigest(content)}"
    path.write_bytes(content)
    pieces = (content[begin : begin + chunk] for begin in range(0, len(content), chunk))
    return path, Digests(len(content), chunk, tuple(map(xxhash.xxh3_128_hexdigest, pieces)))


class S3Place:
    def __init__(self, endpoint: str, client) -> None:
        self.endpoint, self.client = endpoint, client

    def settings(self, prefix: str = "team") -> str:
        return json.dumps({"s3": {"bucket": BUCKET, "prefix": prefix, "endpoint": self.endpoint}})

    def names(self) -> set[str]:
        return {entry["Key"] for entry in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())}

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=body)

    def leave_unfinished(self, key: str) -> None:
        """As a process leaves it that was killed while uploading `key`."""
        upload = self.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        self.client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"half")

    def unfinished(self) -> int:
        return len(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))


class DirectoryPlace:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def settings(self, prefix: str = "team") -> str:
        return json.dumps({"directory": {"path": str(self.root), "subPath": prefix}})

    def names(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self._files() if not path.name.startswith(".")}

    def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def put(self, key: str, body: bytes) -> None:
        (self.root / key).write_bytes(body)

    def leave_unfinished(self, key: str) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / f".tmp-{target.name}-0").write_bytes(b"half")

    def unfinished(self) -> int:
        return sum(path.name.startswith(".") for path in self._files())

    def _files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]


Place = S3Place | DirectoryPlace
"""Where a store keeps its objects, with the means to damage them."""
