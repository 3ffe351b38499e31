"""Serves S3 at no cost to the client: drops what is put, and sends one file for what is read.

    python -m benchmarks.s3_sink FILE [CERTIFICATE KEY]

Prints its port and ends with its standard input. moto and radosgw are slower than the clients that are to be
compared.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import ssl
import sys
import threading
from typing import Any

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
    """Serve until standard input ends."""
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
