"""Plays a sidecar on a real socket that does what a test tells it, and misbehaves on order."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.local import Hello, Reply, Welcome
from tiercheck.protocol.requests import BeginSlot, ReportProgress, Request, ReserveSlots
from tiercheck.protocol.version import Kind, Version

DEADLINE = 30.0
Script = Callable[[Request], Reply | None]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`; fail after the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.005)


class ScriptedSidecar:
    """Grants slots in `folder`, records every request. `answer` may be replaced; None means silence."""

    def __init__(self, run_dir: Path, welcome: Welcome) -> None:
        self.welcome = welcome
        self.answer: Script = self.behave
        self.hellos: list[Hello] = []
        self.requests: list[Request] = []
        self._folder = run_dir / "slots"
        self._folder.mkdir(exist_ok=True)
        self._path = run_dir / "sidecar.sock"
        self._slot_bytes = {Kind.SNAPSHOT: 0, Kind.DELTA: 0}
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.start()

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._spawn(self._accept)

    def stop(self) -> None:
        """Gone, as after a crash: the socket file stays, nobody listens."""
        for opened in (self._listener, *self._connections):
            try:
                opened.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(DEADLINE)
        for opened in (self._listener, *self._connections):
            opened.close()
        self._connections.clear()
        self._threads.clear()

    def asked(self, op: str, kind: Kind = Kind.SNAPSHOT) -> list[Any]:
        """Requests of one operation; of those about an artifact, the ones of this kind."""
        found = [request for request in list(self.requests) if request.op == op]
        return [request for request in found if getattr(request, "kind", kind) is kind]

    def completed(self, kind: Kind) -> dict[int, str]:
        """Paths of what was handed over, by step."""
        return {request.step: request.path for request in self.asked("complete", kind)}

    def offer(self, base: int, step: int) -> None:
        """From now on a rank is welcomed with this chain. What it is made of is frozen here."""
        snapshots, deltas = self.completed(Kind.SNAPSHOT), self.completed(Kind.DELTA)
        self.welcome = dataclasses.replace(
            self.welcome,
            restore_version=Version(step, self.welcome.attempt),
            restore_path=snapshots[base],
            restore_deltas=tuple(deltas[link] for link in range(base + 1, step + 1)),
        )

    def grants_no_slot_before(self, event: threading.Event) -> None:
        """From now on whoever begins an artifact waits for it."""

        def late(request: Request) -> Reply | None:
            if isinstance(request, BeginSlot):
                assert event.wait(DEADLINE)
            return self.behave(request)

        self.answer = late

    def behave(self, request: Request) -> Reply | None:
        """A healthy sidecar."""
        if isinstance(request, ReportProgress):
            return None
        if isinstance(request, ReserveSlots):
            self._slot_bytes = {Kind.SNAPSHOT: request.bytes, Kind.DELTA: request.delta_bytes or 0}
        if isinstance(request, BeginSlot):
            path = self._folder / f"{request.kind.value}-{request.step}-{len(self.hellos)}"
            with open(path, "wb") as file:
                file.truncate(self._slot_bytes[request.kind])
            return Reply(True, path=str(path))
        return Reply(True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(lambda accepted=connection: self._serve(accepted))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                self.hellos.append(from_json(lines.readline(), Hello))
                connection.sendall(to_json(self.welcome) + b"\n")
                for line in lines:
                    request: Request = from_json(line, Request)  # type: ignore[arg-type]
                    self.requests.append(request)
                    reply = self.answer(request)
                    if reply is not None:
                        connection.sendall(to_json(reply) + b"\n")
        except (OSError, ValueError):
            return

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()
