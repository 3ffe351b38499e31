"""Offers devices to a node's kubelet: device_plugin.py STATE RESOURCE, in the node's mount namespace.

STATE is JSON {"gpu-0": "Healthy", ...}, read three times a second. What the kubelet's API for device plugins
(v1beta1) needs of gRPC is here. What is asked is known by its order: options, then the watch, each without
content; whatever has content asks for an allocation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/var/lib/kubelet/device-plugins")
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_LAST = _ACK = 1
_WHOLE = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def main() -> None:
    state, resource = Path(sys.argv[1]), sys.argv[2]
    while True:  # a kubelet that starts anew removes all sockets here
        with contextlib.suppress(OSError):
            _offer(state, resource)
        time.sleep(0.5)


def _offer(state: Path, resource: str) -> None:
    path = FOLDER / f"tiercheck-{os.getpid()}.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(str(path))
        listener.listen()
        caller.connect(str(FOLDER / "kubelet.sock"))
        _register(caller, path.name, resource)
        listener.settimeout(10)
        kubelet, _ = listener.accept()
        with kubelet:
            _serve(kubelet, state)


def _register(kubelet: socket.socket, endpoint: str, resource: str) -> None:
    headers = b"\x83\x86" + _text(b"\x04", b"/v1beta1.Registration/Register") + _text(b"\x01", b"localhost")
    headers += _CONTENT + _text(_text(b"\x00", b"te"), b"trailers")
    body = _field(1, b"v1beta1") + _field(2, endpoint.encode()) + _field(3, resource.encode())
    kubelet.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _WHOLE, 1, headers))
    kubelet.sendall(_frame(_DATA, _LAST, 1, _message(body)))


def _serve(kubelet: socket.socket, state: Path) -> None:
    kubelet.sendall(_frame(_SETTINGS, 0, 0, b""))
    asked, watch, told = 0, 0, b""
    for kind, flags, number, body in _frames(kubelet):
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            kubelet.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        elif kind == _DATA and len(body) > len(_message(b"")):
            kubelet.sendall(_answer(number, _field(1, b"")))
        elif kind == _DATA and body:
            asked += 1
            if asked == 1:
                kubelet.sendall(_answer(number, b""))
            else:
                watch = number
                kubelet.sendall(_frame(_HEADERS, _WHOLE, number, b"\x88" + _CONTENT))
        devices = _devices(state)
        if watch and devices != told:
            kubelet.sendall(_frame(_DATA, 0, watch, _message(devices)))
            told = devices


def _frames(kubelet: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, stream and content of each that comes; where none does, one of no type now and then."""
    kept, skipped = b"", False
    kubelet.settimeout(0.3)
    while True:
        try:
            found = kubelet.recv(65536)
            if not found:
                return
            kept += found
        except TimeoutError:
            yield -1, 0, 0, b""
        if not skipped and len(kept) >= len(_PREFACE):
            kept, skipped = kept[len(_PREFACE) :], True
        while skipped and len(kept) >= 9 + int.from_bytes(kept[:3], "big") and len(kept) >= 9:
            end = 9 + int.from_bytes(kept[:3], "big")
            yield kept[3], kept[4], int.from_bytes(kept[5:9], "big"), kept[9:end]
            kept = kept[end:]


def _devices(state: Path) -> bytes:
    known = json.loads(state.read_text())
    each = (_field(1, name.encode()) + _field(2, health.encode()) for name, health in sorted(known.items()))
    return b"".join(_field(1, device) for device in each)


def _answer(number: int, body: bytes) -> bytes:
    head = _frame(_HEADERS, _WHOLE, number, b"\x88" + _CONTENT) + _frame(_DATA, 0, number, _message(body))
    return head + _frame(_HEADERS, _WHOLE | _LAST, number, _text(_text(b"\x00", b"grpc-status"), b"0"))


def _frame(kind: int, flags: int, number: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + content


def _message(body: bytes) -> bytes:
    return b"\x00" + len(body).to_bytes(4, "big") + body


def _text(before: bytes, value: bytes) -> bytes:
    """A string of a header, as it is."""
    return before + bytes([len(value)]) + value


def _field(number: int, value: bytes) -> bytes:
    """Of a protobuf message; shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


_CONTENT = _text(_text(b"\x00", b"content-type"), b"application/grpc")

if __name__ == "__main__":
    main()
