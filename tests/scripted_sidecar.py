"""A sidecar as its pod knows it, on the real socket: it does what a test tells it, right or wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.local import (
    BeginSlot,
    Hello,
    LauncherEvent,
    Order,
    Reply,
    ReportProgress,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.version import Kind, Version

DEADLINE = 90.0
Script = Callable[[Request], Reply | None]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition`; fail after the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.005)


class ScriptedSidecar:
    """Grants slots in `run_dir`, records every request of ranks and every event of the launcher.

    `answer` may be replaced; None means silence. `once`: only one is let in, until `restart`.
    """

    def __init__(
        self, run_dir: Path, welcome: Welcome | None = None, *, once: bool = False, listen: bool = True
    ) -> None:
        self.welcome = welcome or Welcome(attempt=1, snapshot_every=0)
        self.answer: Script = self.behave
        self.hellos: list[Hello] = []
        self.requests: list[Request] = []
        self.events: list[LauncherEvent] = []
        self._once = once
        self._folder = run_dir / "slots"
        self._path = run_dir / names.SOCKET_NAME
        self._slot_bytes = {Kind.SNAPSHOT: 0, Kind.DELTA: 0}
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._launcher: socket.socket | None = None
        self._listener: socket.socket | None = None
        if listen:
            self.start()

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen()
        self._spawn(lambda: self._accept(listener))

    def stop(self) -> None:
        """Gone, as after a crash: the socket file stays, nobody listens."""
        opened = [*self._connections, *([self._listener] if self._listener else [])]
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        for each in opened:
            each.close()
        self._connections.clear()
        self._threads.clear()
        self._launcher = self._listener = None

    def restart(self) -> None:
        """What was heard before is forgotten."""
        self.stop()
        self.events.clear()
        self.start()

    # To the launcher

    def say(self, message: Order) -> None:
        until(lambda: self._launcher is not None, "the launcher connects")
        assert self._launcher is not None
        self._launcher.sendall(to_json(message) + b"\n")

    def hears(self, event: str, attempt: int) -> LauncherEvent:
        def found() -> list[LauncherEvent]:
            return [heard for heard in list(self.events) if (heard.event, heard.attempt) == (event, attempt)]

        until(lambda: bool(found()), f"{event} of attempt {attempt}; heard {self.events}")
        return found()[-1]

    def has_heard_all(self) -> bool:
        """Whether the launcher, let in once, has hung up."""
        return not any(thread.is_alive() for thread in self._threads)

    # To ranks

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
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"{request.kind.value}-{request.step}-{len(self.hellos)}"
            with open(path, "wb") as file:
                file.truncate(self._slot_bytes[request.kind])
            return Reply(True, path=str(path))
        return Reply(True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            if self._once:
                return self._serve(connection)
            self._spawn(lambda accepted=connection: self._serve(accepted))  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                hello = from_json(lines.readline(), Hello)
                self.hellos.append(hello)
                if hello.role == "launcher":
                    self._launcher = connection
                    for line in lines:
                        self.events.append(from_json(line, LauncherEvent))
                    return
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
