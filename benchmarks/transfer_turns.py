"""One transfer between two threads of a process, each time that a line of standard input asks for it.

Whoever else has work in the same interpreter holds it up.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

from tiercheck_sidecar.digest import digest_chunk

_CHUNK, _TRANSFERRING = 1 << 20, 1.0
"""Bytes that are digested at once; seconds of a transfer."""


def transfer() -> float:
    """Bytes per second that one thread sends, and another one takes and digests, as sidecars do."""
    ends, chunk, total = socket.socketpair(), bytearray(_CHUNK), 0
    end = time.monotonic() + _TRANSFERRING

    def send() -> None:
        with ends[0] as out:
            while time.monotonic() < end:
                out.sendall(chunk)

    sender = threading.Thread(target=send)
    sender.start()
    with ends[1] as source:
        into, filled = memoryview(bytearray(_CHUNK)), 0
        while count := source.recv_into(into[filled:]):
            filled, total = filled + count, total + count
            if filled == _CHUNK:
                digest_chunk(into)
                filled = 0
    sender.join()
    return total / _TRANSFERRING


if __name__ == "__main__":
    while sys.stdin.readline():
        print(transfer(), flush=True)
