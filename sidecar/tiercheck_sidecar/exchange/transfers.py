"""What is arriving: so that a broken stream costs the chunks that were on the line, and not those that had come before.

A transfer outlives the connections that fill it. Who offers the same artifact again is told which chunks are verified already.
A chunk is verified in the stream's own buffer and only then written, so a slot never holds a byte that was not checked, and two
streams that bring the same chunk do no harm.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from tiercheck.protocol.artifact import Artifact
from tiercheck_sidecar.digest import digest_chunk, length_of
from tiercheck_sidecar.exchange.frames import END, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Claim
from tiercheck_sidecar.vault import Draft, NoFreeSlot, Seal, Vault

LINGER = 30.0
"""Seconds that an unfinished transfer waits for its sender to come back. It gives way sooner to an artifact that needs its slot."""


class Transfer:
    """One artifact that is arriving, over any number of streams. Thread-safe."""

    def __init__(self, draft: Draft, claim: Claim, clock: Callable[[], float] = time.monotonic) -> None:
        self.draft, self.claim, self.name = draft, claim, uuid.uuid4().hex
        self.verified: set[int] = set()
        self._clock = clock
        self._quiet = threading.Condition()
        self._wires: set[Wire] = set()
        self._over = False
        self._touched = clock()
        self._file = os.open(draft.path, os.O_WRONLY | os.O_CLOEXEC)

    @property
    def seal(self) -> Seal:
        return self.draft.seal

    @property
    def complete(self) -> bool:
        return len(self.verified) == len(self.seal.digests.values)

    def receive(self, wire: Wire) -> tuple[int, ...]:
        """Take chunks from `wire` until END; returns those that came damaged. Raises WireBroken, OSError."""
        damaged: list[int] = []
        digests = self.seal.digests
        scratch = memoryview(bytearray(min(digests.chunk, digests.size)))
        with self._stream(wire):
            while True:
                index, length = wire.receive_chunk_header()
                if index == END:
                    return tuple(damaged)
                if index >= len(digests.values) or length != length_of(digests, index):
                    raise WireBroken("a chunk does not fit into the artifact")
                chunk = scratch[:length]
                wire.receive_into(chunk)
                if digest_chunk(chunk) != digests.values[index]:
                    damaged.append(index)
                    continue
                write_all(self._file, chunk, index * digests.chunk)
                self.verified.add(index)

    def idle(self) -> float:
        """Seconds since the last stream ended; 0 while there is one."""
        with self._quiet:
            return 0.0 if self._wires else self._clock() - self._touched

    def hush(self) -> None:
        """Cut off the streams that there are: their sender has begun again."""
        with self._quiet:
            self._cut()
            self._touched = self._clock()

    def keep(self) -> None:
        """Every chunk is verified: seal. Raises NotASlot, OSError, WireBroken if the transfer is over."""
        self._end()
        self.draft.keep()

    def discard(self) -> None:
        """Give the slot back. Harmless after `keep`, and twice."""
        with contextlib.suppress(WireBroken):
            self._end()
        self.draft.discard()

    @contextlib.contextmanager
    def _stream(self, wire: Wire) -> Iterator[None]:
        with self._quiet:
            if self._over:
                raise WireBroken("the transfer is over")
            self._wires.add(wire)
        try:
            yield
        finally:
            with self._quiet:
                self._wires.discard(wire)
                self._touched = self._clock()
                self._quiet.notify_all()

    def _end(self) -> None:
        """No stream writes into the slot after this."""
        with self._quiet:
            if self._over:
                raise WireBroken("the transfer is over")
            self._over = True
            self._cut()
            os.close(self._file)

    def _cut(self) -> None:
        for wire in self._wires:
            wire.cut()
        self._quiet.wait_for(lambda: not self._wires)


class Inbox:
    """Every transfer of this worker, by name. Thread-safe."""

    def __init__(self, vault: Vault, clock: Callable[[], float] = time.monotonic) -> None:
        self._vault, self._clock = vault, clock
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}

    def open(self, claim: Claim, seal: Seal) -> Transfer:
        """Where the artifact goes: a transfer that broke off, or a new one. Raises NoFreeSlot, OSError."""
        artifact = _artifact(seal)
        for transfer in self._of(claim.worker, lambda each: _artifact(each.seal) == artifact):
            if (transfer.seal, transfer.claim.attempt) == (seal, claim.attempt):
                transfer.hush()
                return transfer
            self.discard(transfer)
        try:
            draft = self._vault.draft(seal)
        except NoFreeSlot:
            # One that its sender has left gives way: it may never come back.
            rivals = self._of(
                claim.worker,
                lambda each: (each.seal.rank, each.seal.kind) == (seal.rank, seal.kind) and each.idle() > 0,
            )
            if not rivals:
                raise
            for transfer in rivals:
                self.discard(transfer)
            draft = self._vault.draft(seal)
        try:
            transfer = Transfer(draft, claim, self._clock)
        except OSError:
            draft.discard()
            raise
        with self._lock:
            self._transfers[transfer.name] = transfer
        return transfer

    def find(self, name: str, worker: int) -> Transfer | None:
        with self._lock:
            transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.claim.worker == worker else None

    def keep(self, transfer: Transfer) -> None:
        """Seal it. Raises as `Transfer.keep` does; then it is gone."""
        self._forget(transfer)
        try:
            transfer.keep()
        except BaseException:
            transfer.draft.discard()
            raise

    def discard(self, transfer: Transfer) -> None:
        self._forget(transfer)
        transfer.discard()

    def sweep(self) -> None:
        """Give up what nobody came back for."""
        for transfer in self._of(None, lambda each: each.idle() > LINGER):
            self.discard(transfer)

    def _of(self, worker: int | None, wanted: Callable[[Transfer], bool]) -> list[Transfer]:
        with self._lock:
            known = list(self._transfers.values())
        return [each for each in known if worker in (None, each.claim.worker) and wanted(each)]

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._transfers.pop(transfer.name, None)


def write_all(file: int, view: memoryview, offset: int) -> None:
    """Write `view` at `offset`. Raises OSError."""
    while view:
        written = os.pwrite(file, view, offset)
        offset += written
        view = view[written:]


def _artifact(seal: Seal) -> Artifact:
    return Artifact(seal.rank, seal.version, seal.kind)
