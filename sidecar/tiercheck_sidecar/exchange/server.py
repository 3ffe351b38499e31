"""The receiving end of pushes and pulls. One thread per connection; nothing is acknowledged before it is verified."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Iterator

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.slot import NotASlot
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.digest import digest_chunk, is_well_formed, piece
from tiercheck_sidecar.exchange.frames import END, Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Claim, Identity, PeerRefused, admit
from tiercheck_sidecar.vault import Draft, NoFreeSlot, NotHeld, Seal, Vault

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 512


class Transfer:
    """One artifact that is arriving, over any number of streams."""

    def __init__(self, draft: Draft, claim: Claim) -> None:
        self.draft, self.claim = draft, claim
        self.missing = set(range(len(draft.seal.digests.values)))
        self._idle = threading.Condition()
        self._wires: set[Wire] = set()
        self._over = False

    @contextlib.contextmanager
    def stream(self, wire: Wire) -> Iterator[None]:
        """While chunks arrive on `wire`. Raises WireBroken once the transfer is over."""
        with self._idle:
            if self._over:
                raise WireBroken("the transfer is over")
            self._wires.add(wire)
        try:
            yield
        finally:
            with self._idle:
                self._wires.discard(wire)
                self._idle.notify_all()

    def end(self) -> None:
        """No stream writes into the slot after this."""
        with self._idle:
            self._over = True
            for wire in self._wires:
                wire.close()
            self._idle.wait_for(lambda: not self._wires)


class ExchangeServer:
    """`start` raises OSError if the address cannot be used."""

    def __init__(self, board: Board, vault: Vault, identity: Identity, port: int) -> None:
        self._board, self._vault, self._identity = board, vault, identity
        self._listener = socket.socket(socket.AF_INET6 if ":" in identity.host else socket.AF_INET, socket.SOCK_STREAM)
        self._port = port
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._transfers: dict[str, Transfer] = {}

    def start(self) -> None:
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((self._identity.host, self._port))
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="exchange", daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._board.stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="exchange", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(Wire(connection)) as wire:
            try:
                claim = admit(wire, self._identity, self._objection)
                Session(self._board, self._vault, self._transfers, wire, claim).serve()
            except PeerRefused as error:
                log.warning("a connection is refused: %s", error)
            except (WireBroken, OSError, ValueError) as error:
                log.debug("a connection ended: %s", error)
            finally:
                self._room.release()

    def _objection(self, claim: Claim) -> str:
        if claim.job_uid != self._identity.job_uid:
            return f"this sidecar belongs to job {self._identity.job_uid}"
        if claim.attempt < self._board.attempt:
            self._board.count(refused_stale=1)
            return f"attempt {claim.attempt} is over, the job is at attempt {self._board.attempt}"
        return ""


class Session:
    """One proven connection."""

    def __init__(self, board: Board, vault: Vault, transfers: dict[str, Transfer], wire: Wire, claim: Claim) -> None:
        self._board, self._vault, self._transfers = board, vault, transfers
        self._wire, self._claim = wire, claim
        self._mine: str | None = None

    def serve(self) -> None:
        """Until the caller hangs up."""
        try:
            while True:
                ask = self._wire.receive(Ask)
                if ask.op == "read":
                    self._read(ask)
                elif ask.op == "join":
                    self._join(ask)
                elif ask.op == "offer":
                    self._wire.send(self._offer(ask))
                elif ask.op == "commit":
                    self._wire.send(self._commit())
                elif ask.op == "corrupt":
                    self._wire.send(self._corrupt(ask))
                else:
                    raise WireBroken(f"unknown message {ask.op!r}")
        finally:
            self._forget()

    def _offer(self, ask: Ask) -> Say:
        reason = self._unwanted(ask)
        if reason:
            return reason
        assert ask.version is not None
        assert ask.digests is not None
        seal = Seal(ask.rank, ask.version, ask.world_size, Tier.PEER, ask.digests)
        if self._vault.find(ask.rank, ask.version, Tier.PEER) == seal:
            return Say("have")
        self._forget()
        try:
            draft = self._vault.draft(seal)
        except (NoFreeSlot, OSError) as error:
            return Say("busy", str(error))
        self._mine = uuid.uuid4().hex
        self._transfers[self._mine] = Transfer(draft, self._claim)
        return Say("send", transfer=self._mine)

    def _unwanted(self, ask: Ask) -> Say | None:
        directive = self._board.directive
        if directive is None or directive.attempt < self._claim.attempt:
            return Say("busy", f"attempt {self._claim.attempt} is not known here yet")
        if directive.attempt > self._claim.attempt:
            self._board.count(refused_stale=1)
            return Say("refused", f"attempt {self._claim.attempt} is over")
        if ask.version is None or ask.digests is None or not is_well_formed(ask.digests):
            return Say("refused", "the offer is malformed")
        if self._claim.worker not in {peer.worker for peer in directive.hosted}:
            return Say("refused", f"this worker does not keep copies for worker {self._claim.worker}")
        if ask.rank // directive.procs_per_worker != self._claim.worker:
            return Say("refused", f"rank {ask.rank} is not of worker {self._claim.worker}")
        if not directive.history.accepts(ask.version):
            return Say("refused", f"{ask.version} is not of the accepted history")
        return None

    def _join(self, ask: Ask) -> None:
        transfer = self._transfers.get(ask.transfer)
        if transfer is None or transfer.claim.worker != self._claim.worker:
            raise WireBroken("no such transfer")
        draft, digests, damaged = transfer.draft, transfer.draft.seal.digests, []
        with transfer.stream(self._wire):
            while True:
                index, length = self._wire.receive_chunk_header()
                if index == END:
                    break
                target = piece(draft.view, digests, index)
                if index >= len(digests.values) or length != len(target):
                    raise WireBroken("a chunk does not fit into the artifact")
                self._wire.receive_into(target)
                if digest_chunk(target) == digests.values[index]:
                    transfer.missing.discard(index)
                else:
                    damaged.append(index)
        self._wire.send(Say("ok", damaged=tuple(damaged)))

    def _commit(self) -> Say:
        transfer = self._transfers.get(self._mine or "")
        if transfer is None:
            return Say("refused", "nothing was offered on this connection")
        if transfer.missing:
            return Say("again", f"{len(transfer.missing)} chunks are missing")
        if self._board.attempt != self._claim.attempt:
            self._board.count(refused_stale=1)
            return Say("refused", f"attempt {self._claim.attempt} is over")
        transfer.end()
        try:
            transfer.draft.keep()
        except (NotASlot, OSError) as error:
            return Say("refused", str(error))
        return Say("ok")

    def _read(self, ask: Ask) -> None:
        if ask.version is None:
            raise WireBroken("which version?")
        try:
            with self._vault.pin(ask.rank, ask.version) as slot:
                seal = slot.seal
                assert seal is not None
                self._wire.send(Say("found", world_size=seal.world_size, digests=seal.digests))
                with open(slot.path, "rb") as file:
                    self._send_chunks(file.fileno(), seal)
        except NotHeld as error:
            self._wire.send(Say("missing", str(error)))

    def _send_chunks(self, file: int, seal: Seal) -> None:
        size, chunk = seal.digests.size, seal.digests.chunk
        while (index := self._wire.receive_index()) != END:
            if index >= len(seal.digests.values):
                raise WireBroken("no such chunk")
            self._wire.send_chunk(file, index, index * chunk, min(chunk, size - index * chunk))

    def _corrupt(self, ask: Ask) -> Say:
        """Someone says that a copy here is bad: believe our own eyes."""
        assert ask.version is not None
        rank, version = ask.rank, ask.version
        try:
            reason = self._vault.fault(rank, version)
        except (NotHeld, OSError) as error:
            reason = str(error)
        if not reason:
            return Say("ok", "the copy here is good")
        self._vault.free(lambda seal: (seal.rank, seal.version) == (rank, version))
        self._board.quarantine(Quarantined(rank, version, self._board.config.worker, reason))
        return Say("bad", reason)

    def _forget(self) -> None:
        transfer = self._transfers.pop(self._mine or "", None)
        self._mine = None
        if transfer is not None:
            transfer.end()
            transfer.draft.discard()
