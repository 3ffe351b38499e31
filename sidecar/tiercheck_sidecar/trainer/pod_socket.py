"""Serves the pod's Unix socket: orders for the launcher, slots for the ranks.

The volume of the socket belongs to this pod alone, so the socket is the credential. A trainer never waits for
TierCheck's other duties: bytes are digested in threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import Hello, LauncherEvent, Order, StepLeft
from tiercheck.protocol.version import Kind
from tiercheck.supervised import begin
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.supervision import incoming
from tiercheck_sidecar.trainer.session import LONGEST_LINE, RankSession
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_FAULT = 200
"""Characters of an error that a launcher or a rank reports of itself."""


class TrainerSocket:
    """Serves one trainer container. `start` raises OSError if the socket cannot be made.

    `hands`: the number of threads for heavy work; as many digest snapshots at a time."""

    def __init__(self, state: SidecarState, vault: Vault, reach: RestoreSources, hands: int = 1) -> None:
        self._state, self._vault, self._reach = state, vault, reach
        # Apart, so that a delta does not wait until snapshots are digested. One thread digests slower than a
        # node's memory delivers, so a few run even where there is no core to spare.
        self._sealing = {Kind.SNAPSHOT: max(4, hands), Kind.DELTA: 2}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stopped = False
        self._written: dict[Kind, queue.SimpleQueue[Callable[[], None] | None]] = {
            kind: queue.SimpleQueue() for kind in self._sealing
        }
        self._sealers: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._launcher: socket.socket | None = None

    def start(self) -> None:
        path = self._state.config.socket_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            path.parent.chmod(0o777)
        fresh = path.with_name(f".{path.name}")  # so that no client finds a socket that does not listen yet
        fresh.unlink(missing_ok=True)
        self._listener.bind(str(fresh))
        os.chmod(fresh, 0o666)
        self._listener.listen(64)
        os.replace(fresh, path)
        threads = self._state.threads
        for kind, count in self._sealing.items():
            for number in range(count):
                name = f"seal-{kind.value}-{number}"
                self._sealers.append(threads.loop(name, partial(self._seal, kind), vital=True))
        threads.loop("trainer-socket", self._accept, vital=True)

    def stop(self) -> None:
        """Stops serving, after sealing what was written."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for kind, count in self._sealing.items():
            for _ in range(count):
                self._written[kind].put(None)
        for sealer in self._sealers:
            sealer.join()

    def _seal(self, kind: Kind) -> None:
        while (work := self._written[kind].get()) is not None:
            work()

    def _accept(self) -> None:
        threads = self._state.threads
        stopped = lambda: self._stopped or self._state.stopping  # noqa: E731
        for connection in incoming("trainer-socket", self._listener, threads, stopped):
            self._open.add(connection)
            threads.serve(
                "trainer",
                connection,
                partial(self._serve, connection),
                partial(self._open.discard, connection),
            )

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                hello = decode(lines.readline(LONGEST_LINE), Hello)
                if hello.role == "launcher":
                    self._serve_launcher(connection, lines)
                elif hello.role == "listener":
                    self._serve_listener(connection, lines, hello)
                elif hello.role == "rank":
                    RankSession(
                        self._state,
                        self._vault,
                        lambda kind, work: self._written[kind].put(work),
                        connection,
                        hello,
                        lender=self._reach.lender(),
                    ).serve(lines)
                else:
                    log.warning("a connection with role %r is closed", hello.role)
        except (OSError, Malformed) as error:
            log.info("a trainer connection ended: %s", error)
        finally:
            self._open.discard(connection)

    def _serve_launcher(self, connection: socket.socket, lines: BinaryIO) -> None:
        state = self._state
        with state.lock:
            if self._launcher is not None:
                self._open.discard(self._launcher)  # one launcher at a time gets orders
            self._launcher = connection
            state.trainer.launcher_connected()
        try:
            for event in self._converse(connection, lines, LauncherEvent):
                log.info("launcher: %s", event)
                if event.fault:
                    told = (
                        f"its launcher failed and goes on ({event.fault[:_LONGEST_FAULT]}): see the "
                        "log of the container trainer"
                    )
                    state.threads.trouble("launcher", told)
                with state.lock:
                    state.trainer.event(event, state.clock())
        finally:
            with state.lock:
                if self._launcher is connection:
                    self._launcher = None
                    state.trainer.launcher_gone(state.clock())
            state.bump()

    def _serve_listener(self, connection: socket.socket, lines: BinaryIO, hello: Hello) -> None:
        state = self._state
        with state.lock:
            state.trainer.listener_connected(hello.rank, connection, hello.refusal[:_LONGEST_FAULT])
        try:
            for left in self._converse(connection, lines, StepLeft):
                log.info("rank %d: %s", hello.rank, left)
                with state.lock:
                    state.trainer.step_left(hello.rank, connection, left.attempt, left.failed)
        finally:
            with state.lock:
                state.trainer.listener_gone(hello.rank, connection)
            state.bump()

    def _converse(self, connection: socket.socket, lines: BinaryIO, kind: type[T]) -> Iterator[T]:
        """Sends orders, and yields the received messages until the other side closes the connection."""
        self._state.bump()
        begin("orders", partial(self._send_orders, connection))
        while line := lines.readline(LONGEST_LINE):
            yield decode(line, kind)
            self._state.bump()

    def _send_orders(self, connection: socket.socket) -> None:
        """Sends each new order.
        Any end closes the connection: a client without orders reconnects, and is sent the newest."""
        seen, last = -1, None
        try:
            while not self._state.stopping and connection in self._open:
                with self._state.lock:
                    order = self._order()
                if order is not None and order != last:
                    if order.phase is Phase.RELEASE:
                        failpoint("before-release")
                    connection.sendall(to_json(order) + b"\n")
                    last = order
                seen = self._state.wait(seen, timeout=1.0)
        except OSError as error:
            log.info("the trainer container takes no orders: %s", error)
        except BaseException:
            log.exception("no orders are sent on this connection any more")
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _order(self) -> Order | None:
        directive, trainer = self._state.directive, self._state.trainer
        if directive is None:
            return None
        attempt, phase = directive.attempt, directive.phase
        if self._state.fenced:  # whatever it would compute from here on belongs to no history
            attempt, phase = self._state.newest_attempt.attempt, Phase.HOLD
        if phase is Phase.RELEASE and trainer.lost_container:
            # This attempt is over here; starting it again would give its versions two histories.
            phase = Phase.HOLD
        ranks = self._vault.ranks if directive.policy.interrupt_seconds else ()
        return Order(
            attempt=attempt,
            phase=phase,
            worker=directive.worker,
            workers=directive.workers,
            procs_per_worker=directive.procs_per_worker,
            master_host=directive.master_host,
            master_port=directive.master_port,
            dump_stacks=trainer.report.stalled_since is not None,
            exit_code=directive.exit_code,
            health_check=directive.policy.health_check,
            interrupt_seconds=directive.policy.interrupt_seconds,
            listens=trainer.listeners(ranks),
            stays=trainer.left(ranks, attempt),
            joins=directive.joins and not trainer.lost_container and attempt == directive.attempt,
        )
