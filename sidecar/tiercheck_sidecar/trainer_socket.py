"""The pod's Unix socket: orders to the launcher, slots to the ranks.

The volume of the socket belongs to this pod alone, so the socket is the credential. A trainer never waits for TierCheck's
other duties: bytes are digested in threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import Hello, LauncherEvent, Order
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.rank_session import LONGEST_LINE, RankSession
from tiercheck_sidecar.restore_sources import RestoreSources
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

_SEALERS = {Kind.SNAPSHOT: 4, Kind.DELTA: 2}
"""Threads, apart, so that a delta does not wait until snapshots are digested."""


class TrainerSocket:
    """Serves one trainer container. `start` raises OSError if the socket cannot be made."""

    def __init__(self, board: Board, vault: Vault, reach: RestoreSources) -> None:
        self._board, self._vault, self._reach = board, vault, reach
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sealers = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=f"seal-{kind.value}")
            for kind, threads in _SEALERS.items()
        }
        self._open: set[socket.socket] = set()
        self._launcher: socket.socket | None = None

    def start(self) -> None:
        path = self._board.config.socket_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            path.parent.chmod(0o777)
        fresh = path.with_name(f".{path.name}")  # so that nobody meets a socket that is not listening yet
        fresh.unlink(missing_ok=True)
        self._listener.bind(str(fresh))
        os.chmod(fresh, 0o666)
        self._listener.listen(64)
        os.replace(fresh, path)
        threading.Thread(target=self._accept, name="trainer-socket", daemon=True).start()

    def stop(self) -> None:
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for sealers in self._sealers.values():
            sealers.shutdown(wait=True)

    def _submit(self, kind: Kind, work: Callable[[], None]) -> None:
        self._sealers[kind].submit(work)

    def _accept(self) -> None:
        while not self._board.stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="trainer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                hello = decode(lines.readline(LONGEST_LINE), Hello)
                if hello.role == "launcher":
                    self._serve_launcher(connection, lines)
                elif hello.role == "rank":
                    RankSession(
                        self._board, self._vault, self._submit, connection, hello, lender=self._reach.lender()
                    ).serve(lines)
                else:
                    log.warning("a connection with role %r is closed", hello.role)
            except (OSError, Malformed) as error:
                log.info("a trainer connection ended: %s", error)
            finally:
                self._open.discard(connection)

    def _serve_launcher(self, connection: socket.socket, lines: BinaryIO) -> None:
        board = self._board
        with board.lock:
            self._launcher = connection
            board.trainer.launcher_connected()
        board.bump()
        threading.Thread(target=self._send_orders, args=(connection,), name="orders", daemon=True).start()
        try:
            while line := lines.readline(LONGEST_LINE):
                event = decode(line, LauncherEvent)
                log.info("launcher: %s", event)
                with board.lock:
                    board.trainer.event(event, board.clock())
                board.bump()
        finally:
            with board.lock:
                if self._launcher is connection:
                    self._launcher = None
                    board.trainer.launcher_gone(board.clock())
            board.bump()

    def _send_orders(self, connection: socket.socket) -> None:
        seen, last = -1, None
        while not self._board.stopping and self._launcher is connection:
            with self._board.lock:
                order = self._order()
            if order is not None and order != last:
                try:
                    connection.sendall(to_json(order) + b"\n")
                except OSError:
                    return
                last = order
            seen = self._board.wait(seen, timeout=1.0)

    def _order(self) -> Order | None:
        directive = self._board.directive
        if directive is None:
            return None
        attempt, phase = directive.attempt, directive.phase
        if self._board.overtaken:  # whatever it would compute from here on belongs to no history
            attempt, phase = self._board.newest_attempt, Phase.HOLD
        if phase is Phase.RELEASE and self._board.trainer.lost_container:
            phase = Phase.HOLD  # this attempt is over here; starting it again would give its versions two histories
        return Order(
            attempt=attempt,
            phase=phase,
            worker=directive.worker,
            workers=directive.workers,
            procs_per_worker=directive.procs_per_worker,
            master_host=directive.master_host,
            master_port=directive.master_port,
            dump_stacks=self._board.trainer.report.stalled_since is not None,
            exit_code=directive.exit_code,
            health_check=directive.policy.health_check,
        )
