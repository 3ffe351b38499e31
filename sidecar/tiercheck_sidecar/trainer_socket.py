"""The pod's Unix socket: orders to the launcher, slots to the ranks.

The volume of the socket belongs to this pod alone, so the socket is the credential. Every request is answered without
waiting for the network or for bytes to be digested: a trainer never waits for TierCheck's other duties.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from tiercheck.protocol.directive import Directive, Phase, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import Hello, LauncherEvent, Order, Reply, Request, Welcome
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.slot import NotASlot
from tiercheck.protocol.version import Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.vault import MemoryTooSmall, NoFreeSlot, NotHeld, Vault

log = logging.getLogger(__name__)

_LONGEST_LINE = 1024 * 1024


class TrainerSocket:
    """Serves one trainer container. `start` raises OSError if the socket cannot be made."""

    def __init__(self, board: Board, vault: Vault) -> None:
        self._board, self._vault = board, vault
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sealers = ThreadPoolExecutor(4, thread_name_prefix="seal")
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
        self._sealers.shutdown(wait=True)

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
                hello = msgspec.json.decode(lines.readline(_LONGEST_LINE), type=Hello)
                if hello.role == "launcher":
                    self._serve_launcher(connection, lines)
                elif hello.role == "rank":
                    RankSession(self._board, self._vault, self._sealers, connection, hello).serve(lines)
                else:
                    log.warning("a connection with role %r is closed", hello.role)
            except (OSError, msgspec.DecodeError) as error:
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
            while line := lines.readline(_LONGEST_LINE):
                event = msgspec.json.decode(line, type=LauncherEvent)
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
        phase = directive.phase
        if phase is Phase.RELEASE and self._board.trainer.lost_container:
            phase = Phase.HOLD  # this attempt is over here; starting it again would give its versions two histories
        return Order(
            attempt=directive.attempt,
            phase=phase,
            worker=directive.worker,
            workers=directive.workers,
            procs_per_worker=directive.procs_per_worker,
            master_host=directive.master_host,
            master_port=directive.master_port,
        )


class RankSession:
    """One connection of one rank. When it breaks, the slot being written is lost: its writer may be alive."""

    def __init__(
        self, board: Board, vault: Vault, sealers: ThreadPoolExecutor, connection: socket.socket, hello: Hello
    ) -> None:
        self._board, self._vault, self._sealers = board, vault, sealers
        self._connection, self._hello = connection, hello
        self._writing: set[Path] = set()
        self._restored = contextlib.ExitStack()

    def serve(self, lines: BinaryIO) -> None:
        with self._restored:
            welcome = self._welcome()
            self._send(welcome)
            if welcome.error:
                return
            try:
                while line := lines.readline(_LONGEST_LINE):
                    reply = self._answer(msgspec.json.decode(line, type=Request))
                    if reply is not None:
                        self._send(reply)
            finally:
                for path in self._writing:
                    self._vault.lose(path)
                self._board.bump()

    def _send(self, message: Welcome | Reply) -> None:
        self._connection.sendall(to_json(message) + b"\n")

    def _welcome(self) -> Welcome:
        board, hello = self._board, self._hello
        with board.lock:
            directive, trainer, state = board.directive, board.trainer, board.restore.state
            error = self._objection(directive, trainer.lost_container, state)
            if error or directive is None:
                return Welcome(board.attempt, 0, error=error)
        every = directive.policy.snapshot_every or 0
        if directive.restore is None:
            return Welcome(directive.attempt, every)
        version = directive.restore.version
        try:
            slot = self._restored.enter_context(self._vault.pin(hello.rank, version, Tier.LOCAL))
        except NotHeld:
            # Only after a restart of this sidecar: a rank that trains already has no use for the path.
            return Welcome(directive.attempt, every, version)
        return Welcome(directive.attempt, every, version, str(slot.path))

    def _objection(self, directive: Directive | None, lost: bool, state: RestoreState) -> str:
        hello = self._hello
        if hello.rank not in self._vault.ranks:
            return f"rank {hello.rank} does not belong to worker {self._board.config.worker}"
        if directive is None:
            return "the controller has not told this sidecar yet what to do"
        if hello.attempt < directive.attempt:
            self._board.count(refused_stale=1)
            return f"attempt {hello.attempt} is over, the job is at attempt {directive.attempt}"
        if hello.attempt > directive.attempt:
            return f"attempt {hello.attempt} is not known here yet, the job is at attempt {directive.attempt}"
        world = directive.workers * directive.procs_per_worker
        if hello.world_size != world:
            return f"the job has {world} ranks, not {hello.world_size}"
        if directive.phase is Phase.HOLD or state is not RestoreState.READY:
            return "not every rank is restored yet"
        if lost:
            return f"attempt {directive.attempt} ended here when the trainer container was restarted"
        return ""

    def _answer(self, request: Request) -> Reply | None:
        if request.op == "progress":
            if self._board.attempt == self._hello.attempt:
                with self._board.lock:
                    first = self._board.trainer.report.first_step_at is None
                    self._board.trainer.progress(request.step, request.step_seconds, self._board.clock())
                if first:
                    self._board.bump()
            return None
        try:
            if self._board.attempt != self._hello.attempt and request.op != "abandon":
                self._board.count(refused_stale=1)
                return Reply(False, error=f"attempt {self._hello.attempt} is over")
            return self._act(request)
        except NoFreeSlot as reason:
            return self._skip(request, str(reason))
        except MemoryTooSmall as reason:
            self._board.problem("MemoryTooSmall", str(reason))
            return self._skip(request, str(reason)) if request.op == "begin" else Reply(False, error=str(reason))
        except (NotASlot, ValueError, OSError) as error:
            return Reply(False, error=str(error))

    def _act(self, request: Request) -> Reply:
        vault, version = self._vault, Version(request.step, self._hello.attempt)
        path = Path(request.path)
        if request.op == "reserve":
            vault.reserve(self._hello.rank, request.bytes)
            self._board.problem("MemoryTooSmall", "")
            return Reply(True)
        if request.op == "begin":
            path = vault.begin(self._hello.rank, version)
            self._writing.add(path)
            self._reach(version)
            return Reply(True, path=str(path))
        if request.op == "complete":
            self._writing.discard(path)
            vault.complete(path, self._hello.world_size)
            self._sealers.submit(self._seal, path)
            return Reply(True)
        if request.op == "abandon":
            self._writing.discard(path)
            vault.abandon(path)
            return Reply(True)
        if request.op == "restored":
            self._restored.close()
            return Reply(True)
        return Reply(False, error=f"unknown request {request.op!r}")

    def _skip(self, request: Request, reason: str) -> Reply:
        self._board.count(skipped=1)
        self._reach(Version(request.step, self._hello.attempt))
        return Reply(True, skip=reason)

    def _reach(self, version: Version) -> None:
        with self._board.lock:
            reached = self._board.reached.get(self._hello.rank)
            self._board.reached[self._hello.rank] = max(version, reached) if reached else version
        self._board.bump()

    def _seal(self, path: Path) -> None:
        if self._vault.seal(path) is not None:
            self._board.count(captured=1)
        self._board.bump()
