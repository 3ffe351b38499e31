"""Limits the number of unauthenticated connections, and accepts connections for a web server.

At the limit a new connection is not refused. Instead, the oldest connection of the address with the most is
closed. A peer authenticates within milliseconds, so it is unlikely to be the one.

`ConnectionAcceptor` accepts TCP connections for a web server, and continues after a temporary shortage of
descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

MOST_PER_ADDRESS = 64
"""The most that one worker needs at once, when all its ranks restore over several streams."""


@dataclass(frozen=True, eq=False)
class UnauthenticatedClient:
    address: str
    cut: Callable[[], None]
    """Shuts the connection down; may be called from any thread."""


class UnauthenticatedClients:
    """Holds the unauthenticated connections and limits their number. Thread-safe."""

    def __init__(
        self,
        most: Callable[[], int],
        named: Callable[[], Collection[str]] = frozenset,
        per_address: int = MOST_PER_ADDRESS,
    ) -> None:
        """`most`: the limit for all addresses together, except the `named` ones, which do not count."""
        self._most, self._named, self._per_address = most, named, per_address
        self._lock = threading.Lock()
        self._guests: list[UnauthenticatedClient] = []

    def enter(self, address: str, cut: Callable[[], None]) -> UnauthenticatedClient:
        """Adds a connection, and may cut another one to stay within the limits."""
        guest = UnauthenticatedClient(address, cut)
        with self._lock:
            loser = pick_victim(self._guests, address, self._named(), self._most(), self._per_address)
            if loser is not None:
                self._guests.remove(loser)
            self._guests.append(guest)
        if loser is not None:
            loser.cut()
        return guest

    def leave(self, guest: UnauthenticatedClient) -> None:
        """Removes a connection that was closed or authenticated. Does nothing if it was already removed."""
        with self._lock:
            if guest in self._guests:
                self._guests.remove(guest)


def pick_victim(
    guests: Sequence[UnauthenticatedClient],
    newcomer: str,
    named: Collection[str],
    most: int,
    per_address: int,
) -> UnauthenticatedClient | None:
    """Returns the connection, of some oldest first, to close for one from `newcomer`; None: there is room."""
    same = [guest for guest in guests if guest.address == newcomer]
    if len(same) >= per_address:
        return same[0]
    crowd = [guest for guest in guests if guest.address not in named]
    if newcomer in named or len(crowd) < most:
        return None
    counts = Counter(guest.address for guest in crowd)
    return max(crowd, key=lambda guest: counts[guest.address])  # the first of those with most


def hang_up(connection: socket.socket) -> None:
    """Shuts a connection down, from any thread; the thread that serves it closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


log = logging.getLogger(__name__)

_AGAIN = 0.2
"""Seconds until a failed accept is retried: descriptors may be short for a while."""

Serve = Callable[[socket.socket, str], Coroutine[Any, Any, None]]
"""Serves and closes a connection. Arguments: the connection, and the IP address that it comes from."""


class WebRunner(Protocol):
    """The interface of aiohttp's runners, declared here because the training library has no aiohttp."""

    async def setup(self) -> None: ...

    async def cleanup(self) -> None: ...


Runner = TypeVar("Runner", bound=WebRunner)


class ConnectionAcceptor(Generic[Runner]):
    """Serves each connection in its own task. Call `start`, then `stop`, in one event loop."""

    def __init__(self, runner: Runner, serve: Serve) -> None:
        """`runner` must not listen by itself."""
        self._runner, self._serve_one = runner, serve
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Starts to accept connections. Raises OSError if the address is in use."""
        await self._runner.setup()
        self._listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        self._listener.setblocking(False)
        self._run(self._accept(self._listener))

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, (address, *_) = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_AGAIN)
                continue
            self._run(self._serve_one(connection, address))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
