"""Measures what uploads and restores cost in CPU and time, beside obstore alone and boto3.

All move the same bytes of shared memory, ours and obstore by the mapping that a slot has for as long as it
lasts, four at a time: up in parts of 16 MiB, down as is cheapest for each. Ours verifies every chunk against
the digests of sealing, both ways; obstore does not. On the way up ours and obstore send a CRC64NVME with each
part. Rounds take turns, every other one backwards, and the median of the rounds' ratios counts. boto3, which
takes longest, has a third of the rounds.

The server is a process of its own, so that only the client's CPU is counted. It costs the client nothing: it
drops what is put, and sends one file for what is read. moto and radosgw are slower than the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import mmap
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, Outcome, Scale, Sense, scratch
from tiercheck.protocol.version import Digests, RankArtifact, Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.remote import open_store
from tiercheck_sidecar.remote.store import FETCH_THREADS

PART = 16 * 2**20
RANGE = 8 * 2**20
PARALLEL = 4
BUCKET = "benchmark"
CLIENTS = ("ours", "obstore", "boto3")
DIRECTIONS = ("upload", "restore")
CPU, THROUGHPUT = {"upload": 0.75, "restore": 1.2}, {"upload": 0.75, "restore": 0.95}
"""Promised parts of obstore alone, which verifies nothing: on the way up that is one pass more over each
byte; on the way down ours makes no memory of its own for them."""


def run(scale: Scale) -> Outcome:
    """CPU seconds and wall beside obstore alone and boto3, over http and https."""
    mebibytes, rounds = (64, 2) if scale.quick else (512, 9)
    found: dict[str, Any] = {"mebibytes": mebibytes, "rounds": rounds, "part": PART, "parallel": PARALLEL}
    assert FETCH_THREADS == PARALLEL
    rows: list[Figure] = []
    for scheme in ("http", "https"):
        found[scheme] = _compare(scheme, mebibytes * 2**20, rounds)
        for direction, figures in found[scheme].items():
            cpu: dict[str, float] = figures["cpu s/GB"]
            wall: dict[str, float] = figures["wall s/GB"]
            name = f"S3 {direction} over {scheme}"
            rows += [
                Figure(
                    f"{name}, bytes per CPU second, against boto3",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['boto3']:.2f} s/GB",
                    figures["per CPU second, ours / boto3"],
                ),
                Figure(
                    f"{name}, bytes per CPU second, against obstore alone",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['obstore']:.2f} s/GB",
                    figures["per CPU second, ours / obstore"],
                    CPU[direction],
                    Sense.AT_LEAST,
                    unit="%",
                    note="median of paired ratios; obstore verifies no digests",
                ),
                Figure(
                    f"{name}, throughput, against obstore alone",
                    f"{1 / wall['ours']:.2f} GB/s",
                    f"{1 / wall['obstore']:.2f} GB/s",
                    figures["throughput, ours / obstore"],
                    THROUGHPUT[direction],
                    Sense.AT_LEAST,
                    unit="%",
                ),
            ]
    return Outcome(rows, found)


def _compare(scheme: str, size: int, rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        _fill(folder / "slot", size)
        ca = _authority(folder) if scheme == "https" else None
        endpoint = stack.enter_context(_sink(folder, scheme))
        works = stack.enter_context(_clients(folder, size, endpoint, ca))
        found: dict[tuple[str, str], list[list[float]]] = {name: [] for name in works}
        for number in range(rounds):
            for name in list(works)[:: -1 if number % 2 else 1]:
                if name[1] != "boto3" or number % 3 == 0:
                    found[name].append(_measured(works[name]))
    return {direction: _figures(found, direction, size) for direction in DIRECTIONS}


def _figures(found: dict[tuple[str, str], list[list[float]]], direction: str, size: int) -> dict[str, Any]:
    """Medians of seconds per GB, and of what obstore and boto3 took of what ours did in each round."""
    result: dict[str, Any] = {}
    for place, what in enumerate(("cpu s/GB", "wall s/GB")):
        result[what] = {
            client: statistics.median(one[place] for one in found[direction, client]) / size * 1e9
            for client in CLIENTS
        }
    for place, what in enumerate(("per CPU second", "throughput")):
        ours = [one[place] for one in found[direction, "ours"]]
        for client, every in (("obstore", 1), ("boto3", 3)):
            theirs = [one[place] for one in found[direction, client]]
            pairs = zip(theirs, ours[::every], strict=True)
            result[f"{what}, ours / {client}"] = statistics.median(one / mine for one, mine in pairs)
    return result


def _measured(work: Callable[[], object]) -> list[float]:
    """CPU seconds of this process, wall seconds."""
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return [time.process_time() - cpu, time.monotonic() - wall]


@contextmanager
def _clients(
    folder: Path, size: int, endpoint: str, ca: Path | None
) -> Iterator[dict[tuple[str, str], Callable[[], object]]]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from obstore.store import S3Store

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    slot, back = folder / "slot", folder / "back"
    with open(slot, "rb") as read, open(back, "w+b") as write:
        write.truncate(size)
        source, target = _mapped(read.fileno(), size, False), _mapped(write.fileno(), size, True)
        target[:] = source  # first touch is not what is measured
        digests = digest(source)
        settings: dict[str, str] = {"bucket": BUCKET, "endpoint": endpoint}
        options: dict[str, Any] = {"allow_http": True}
        if ca is not None:
            settings["caBundle"] = str(ca)
            options["root_certificate"] = ca.read_bytes()
        store = open_store(json.dumps({"s3": settings}), "default/benchmark")
        config = {
            "region": "us-east-1",
            "endpoint": endpoint,
            "unsigned_payload": True,
            "checksum_algorithm": "CRC64NVME",
        }
        alone: Any = S3Store(BUCKET, config=config, client_options=options)  # type: ignore[arg-type]
        boto = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", verify=str(ca) if ca else None
        )
        transfer = TransferConfig(
            multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=PARALLEL
        )
        yield {
            ("upload", "ours"): lambda: store.put_artifact(
                0, Version(1, 1), slot, digests, None, mapped=source
            ),
            ("upload", "obstore"): lambda: _put(alone, source),
            ("upload", "boto3"): lambda: boto.upload_file(str(slot), BUCKET, "slot", Config=transfer),
            ("restore", "ours"): lambda: store.fetch(_artifact(digests), target),
            ("restore", "obstore"): lambda: (_stream if ca is None else _ranges)(alone, target),
            ("restore", "boto3"): lambda: boto.download_file(
                BUCKET, "slot", str(folder / "boto3"), Config=transfer
            ),
        }
        store.close()


def _artifact(digests: Digests) -> RankArtifact:
    return RankArtifact(0, Version(1, 1), "slot", digests)


def _put(alone: Any, source: memoryview) -> None:
    """From the mapped slot, as ours: without a copy."""
    import obstore

    parts = (source[begin : begin + PART] for begin in range(0, len(source), PART))
    obstore.put(alone, "slot", parts, use_multipart=True, chunk_size=PART, max_concurrency=PARALLEL)


def _stream(alone: Any, target: memoryview) -> None:
    """The cheapest way that obstore offers over http into memory that is there: pieces as they come, not
    collected first."""
    import obstore

    def one(begin: int) -> None:
        for piece in obstore.get(
            alone, "slot", options={"range": (begin, min(begin + PART, len(target)))}
        ).stream(2**20):
            target[begin : begin + len(piece)] = memoryview(piece)
            begin += len(piece)

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, range(0, len(target), PART)))


def _ranges(alone: Any, target: memoryview) -> None:
    """The cheapest one over https, where each TLS record would wake who reads a stream."""
    import obstore

    def one(begin: int) -> None:
        async def read() -> Any:
            end = min(begin + RANGE, len(target))
            return await obstore.get_range_async(alone, "slot", start=begin, end=end)

        with memoryview(asyncio.run(read())) as found:
            target[begin : begin + len(found)] = found

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, range(0, len(target), RANGE)))


def _mapped(file: int, size: int, write: bool) -> memoryview:
    return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ))


def _fill(path: Path, size: int) -> None:
    block = os.urandom(2**20)
    with open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)


@contextmanager
def _sink(folder: Path, scheme: str) -> Iterator[str]:
    """The base URL of a server in another process; it ends with its standard input."""
    words = [str(folder / "server.pem"), str(folder / "server.key")] if scheme == "https" else []
    command = [sys.executable, "-m", "benchmarks.remote", str(folder / "slot"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield f"{scheme}://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.communicate()


def _authority(folder: Path) -> Path:
    """A certificate for 127.0.0.1 as server.pem and server.key; returns the authority that signed it."""
    pair = issue_pair("benchmark", ["127.0.0.1"], datetime.timedelta(days=1))
    (folder / "ca.pem").write_bytes(pair.ca)
    (folder / "server.pem").write_bytes(pair.certificate)
    (folder / "server.key").write_bytes(pair.key)
    return folder / "ca.pem"


_ANSWERS = {
    "uploads": b"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>"
    b"</InitiateMultipartUploadResult>",
    "complete": b'<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><ETag>"0"</ETag>'
    b"</CompleteMultipartUploadResult>",
    "list": b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>",
    "missing": b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>",
}


class Session:
    """One connection."""

    def __init__(self, connection: Any, file: int, size: int, content: memoryview) -> None:
        self._connection, self._file, self._size, self._content = connection, file, size, content
        self._is_plain = not isinstance(connection, ssl.SSLSocket)
        self._buffer = b""

    def serve(self) -> None:
        with contextlib.closing(self._connection), contextlib.suppress(ConnectionError, ssl.SSLError):
            while self._one():
                pass

    def _one(self) -> bool:
        while b"\r\n\r\n" not in self._buffer:
            got = self._connection.recv(65536)
            if not got:
                return False
            self._buffer += got
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "100-continue" in headers.get("expect", ""):
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._drop(headers)
        self._answer(method, target, headers)
        return True

    def _drop(self, headers: dict[str, str]) -> None:
        if "chunked" in headers.get("transfer-encoding", ""):
            self._drop_chunks()
            return
        left = int(headers.get("content-length", 0)) - len(self._buffer)
        self._buffer = self._buffer[len(self._buffer) + left :] if left < 0 else b""
        junk = bytearray(1 << 20)
        while left > 0:
            # MSG_TRUNC: the kernel throws the bytes away instead of copying them.
            flags = (socket.MSG_TRUNC,) if self._is_plain else ()
            got = self._connection.recv_into(junk, min(left, len(junk)), *flags)
            if got == 0:
                raise ConnectionError
            left -= got

    def _drop_chunks(self) -> None:
        while True:
            while b"\r\n" not in self._buffer:
                self._buffer += self._connection.recv(65536)
            word, _, self._buffer = self._buffer.partition(b"\r\n")
            length = int(word.split(b";")[0], 16)
            if length == 0:
                while b"\r\n\r\n" not in b"\r\n" + self._buffer:
                    self._buffer += self._connection.recv(65536)
                self._buffer = (b"\r\n" + self._buffer).partition(b"\r\n\r\n")[2]
                return
            while len(self._buffer) < length + 2:
                self._buffer += self._connection.recv(1 << 20)
            self._buffer = self._buffer[length + 2 :]

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        _, _, query = target.partition("?")
        if method == "POST":
            self._say(200, _ANSWERS["uploads" if query.startswith("uploads") else "complete"])
        elif method == "GET" and "uploads" in query:
            self._say(200, _ANSWERS["list"])
        elif method in ("GET", "HEAD") and ".json" in target:
            self._say(404, _ANSWERS["missing"])
        elif method in ("GET", "HEAD"):
            self._send(method, headers.get("range", ""))
        else:
            self._say(200, b"")

    def _say(self, status: int, body: bytes) -> None:
        head = (
            f'HTTP/1.1 {status} X\r\nETag: "0"\r\nContent-Type: application/xml\r\nContent-Length: '
            f"{len(body)}\r\n\r\n"
        )
        self._connection.sendall(head.encode() + body)

    def _send(self, method: str, wanted: str) -> None:
        begin, end = 0, self._size - 1
        if wanted:
            first, _, last = wanted.partition("=")[2].partition("-")
            begin, end = int(first), min(int(last or end), end)
        head = (
            f'HTTP/1.1 {206 if wanted else 200} X\r\nETag: "0"\r\nLast-Modified: Sat, 21 Nov 2026 '
            "10:00:00 GMT\r\n"
        )
        if wanted:
            head += f"Content-Range: bytes {begin}-{end}/{self._size}\r\n"
        self._connection.sendall(f"{head}Content-Length: {end + 1 - begin}\r\n\r\n".encode())
        if method == "HEAD":
            return
        if not self._is_plain:
            self._connection.sendall(self._content[begin : end + 1])
            return
        while begin <= end:
            begin += os.sendfile(self._connection.fileno(), self._file, begin, end + 1 - begin)


def main(path: str, *certificate: str) -> None:
    """Serve the file until standard input ends; by TLS, with a certificate and its key. Prints the port."""
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    content = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ))
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=session, args=(connection,), daemon=True).start()

    def session(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            wrapped = context.wrap_socket(connection, server_side=True) if context else connection
            Session(wrapped, file, size, content).serve()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
