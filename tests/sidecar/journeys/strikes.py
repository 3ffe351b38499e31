"""Lets every wait of every loop of the sidecars fail once, by an error nobody thought of."""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercheck import supervised
from tiercheck_sidecar import supervision
from tiercheck_sidecar.exchange.frames import Wire
from tiercheck_sidecar.supervision import Threads
from tiercheck_sidecar.trainer import pod_socket
from tiercheck_sidecar.vault import vault


class Injected(Exception):
    """Nobody thought of it."""


class Strikes:
    """Makes every wait of every loop fail once, and each first sealing of every sealer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[threading.Thread, str] = {}
        """The loops."""
        self.struck: set[tuple[threading.Thread, str]] = set()
        real_loop, real_wait = Threads.loop, threading.Condition.wait_for
        real_accept, real_receive, real_digest = socket.socket.accept, Wire.receive, vault.digest_and_tag

        def loop(
            threads: Threads, name: str, body: Callable[[], None], *, vital: bool = False
        ) -> threading.Thread:
            def noted() -> None:
                self.begun[threading.current_thread()] = name
                body()

            return real_loop(threads, name, noted, vital=vital)

        def wait_for(
            condition: threading.Condition, predicate: Callable[[], Any], timeout: float | None = None
        ) -> Any:
            self.strike()
            return real_wait(condition, predicate, timeout)

        def accept(listener: socket.socket) -> Any:
            self.strike()
            return real_accept(listener)

        def receive(wire: Wire, *given: Any) -> Any:
            self.strike()
            return real_receive(wire, *given)

        def digest_and_tag(*what: Any) -> Any:
            self.strike()
            return real_digest(*what)

        class Queue:
            def __init__(self) -> None:
                self._inner: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self.put = self._inner.put

            def get(queue: Queue) -> Any:  # noqa: N805
                self.strike()
                return queue._inner.get()

        monkeypatch.setattr(Threads, "loop", loop)
        monkeypatch.setattr(threading.Condition, "wait_for", wait_for)
        monkeypatch.setattr(socket.socket, "accept", accept)
        monkeypatch.setattr(Wire, "receive", receive)
        monkeypatch.setattr(vault, "digest_and_tag", digest_and_tag)
        monkeypatch.setattr(pod_socket, "queue", SimpleNamespace(SimpleQueue=Queue))
        monkeypatch.setattr(supervised, "FIRST", 0.01)
        monkeypatch.setattr(supervised, "LONGEST", 0.1)
        monkeypatch.setattr(supervision, "MOST_DEATHS", 1000)

    def strike(self) -> None:
        thread = threading.current_thread()
        if thread not in self.begun:
            return
        frame = sys._getframe(2)
        while Path(frame.f_code.co_filename).name in ("threading.py", "state.py"):
            assert frame.f_back is not None
            frame = frame.f_back
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if (thread, place) not in self.struck:
            self.struck.add((thread, place))
            raise Injected(place)

    def spared(self) -> set[str]:
        """The loops that have not failed yet."""
        failed = {thread for thread, _ in list(self.struck)}
        return {name for thread, name in list(self.begun.items()) if thread not in failed}
