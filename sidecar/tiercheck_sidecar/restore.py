"""Restore: bring every own rank to the wanted version from the nearest source that proves to be good.

Own memory first, then each named source in order. Every byte is verified on the way in; what fails is reported by name,
so that the controller can decide again without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tiercheck.protocol.directive import Directive, Phase, Source, Tier
from tiercheck.protocol.report import Quarantined, RankRestore, RestoreReport, RestoreState
from tiercheck.protocol.slot import NotASlot
from tiercheck.protocol.version import Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.vault import NoFreeSlot, NotHeld, Seal, Vault

log = logging.getLogger(__name__)

_PARALLEL_RANKS = 4


class SourceFailed(Exception):
    """A source could not give the artifact; the message is a sentence."""


class SourceCorrupt(SourceFailed):
    """It gave bytes that do not match their digests: it must not be asked again."""


Fetch = Callable[[Source, int, Version], Seal]
"""Copy one rank's artifact from a source into a sealed own slot. Raises SourceFailed, NoFreeSlot, NotASlot, OSError."""


class Restorer:
    """One thread, which restores each attempt once, and again with new sources if that failed."""

    def __init__(self, board: Board, vault: Vault, fetch: Fetch) -> None:
        self._board, self._vault, self._fetch = board, vault, fetch
        self._done: tuple[int, str] = (0, "")

    def run(self) -> None:
        seen = -1
        while not self._board.stopping:
            seen = self._board.wait(seen, timeout=5.0)
            with self._board.lock:
                directive = self._board.directive
                ready = self._board.restore.state is RestoreState.READY
            if directive is None or (ready and self._done[0] == directive.attempt):
                continue
            if self._done != (directive.attempt, directive.revision):
                self._done = (directive.attempt, directive.revision)
                self.carry_out(directive)

    def carry_out(self, directive: Directive) -> None:
        """Restore as `directive` says, and report it."""
        board, restore = self._board, directive.restore
        if restore is None or directive.phase is Phase.FINISH or not board.saw_hold:
            # Not seen from its beginning: this process was restarted while the attempt ran, with trainers long past
            # this version. What it holds is what its inventory verified.
            self._publish(directive, RestoreReport(RestoreState.READY, restore.version if restore else None))
            return
        began = time.monotonic()
        self._publish(directive, RestoreReport(RestoreState.RUNNING, restore.version))
        sources = {entry.rank: entry.sources for entry in restore.ranks}
        with ThreadPoolExecutor(_PARALLEL_RANKS, thread_name_prefix="restore") as pool:
            jobs = [pool.submit(self._rank, directive, rank, sources.get(rank, ())) for rank in self._vault.ranks]
            ranks = tuple(job.result() for job in jobs)
        state = RestoreState.FAILED if any(rank.tier is None for rank in ranks) else RestoreState.READY
        self._publish(directive, RestoreReport(state, restore.version, ranks, time.monotonic() - began))

    def _publish(self, directive: Directive, report: RestoreReport) -> None:
        with self._board.lock:
            if self._board.attempt != directive.attempt:
                return
            self._board.restore = report
        log.info("restore of attempt %d: %s", directive.attempt, report)
        self._board.bump()

    def _rank(self, directive: Directive, rank: int, sources: tuple[Source, ...]) -> RankRestore:
        assert directive.restore is not None
        version, began = directive.restore.version, time.monotonic()
        failures: list[str] = []
        seal = self._from_own_memory(rank, version, failures)
        if seal is not None:
            return RankRestore(rank, Tier.LOCAL, None, seal.digests.size, time.monotonic() - began, tuple(failures))
        for source in sources:
            if self._board.attempt != directive.attempt or self._board.stopping:
                failures.append("a newer attempt began")
                break
            if source.tier is Tier.LOCAL:
                continue
            worker = source.peer.worker if source.peer else None
            try:
                seal = self._fetch_with_room(directive, source, rank, version)
            except SourceCorrupt as error:
                failures.append(str(error))
                if worker is not None:
                    self._board.quarantine(Quarantined(rank, version, worker, str(error)))
            except (SourceFailed, NoFreeSlot, NotASlot, OSError) as error:
                failures.append(f"{_name(source)}: {error}")
            else:
                seconds = time.monotonic() - began
                return RankRestore(rank, source.tier, worker, seal.digests.size, seconds, tuple(failures))
        if not sources:
            failures.append("no other source is known")
        return RankRestore(rank, None, None, 0, time.monotonic() - began, tuple(failures))

    def _from_own_memory(self, rank: int, version: Version, failures: list[str]) -> Seal | None:
        try:
            reason = self._vault.fault(rank, version, Tier.LOCAL)
        except NotHeld:
            return None
        except OSError as error:
            reason = str(error)
        if not reason:
            return self._vault.find(rank, version, Tier.LOCAL)
        message = f"the copy in own memory is bad: {reason}"
        failures.append(message)
        self._vault.free(lambda seal: (seal.rank, seal.version, seal.tier) == (rank, version, Tier.LOCAL))
        self._board.quarantine(Quarantined(rank, version, self._board.config.worker, message))
        return None

    def _fetch_with_room(self, directive: Directive, source: Source, rank: int, version: Version) -> Seal:
        try:
            return self._fetch(source, rank, version)
        except NoFreeSlot:
            if not self._make_room(directive, rank, version):
                raise
        return self._fetch(source, rank, version)

    def _make_room(self, directive: Directive, rank: int, version: Version) -> bool:
        """Free one own slot: what the history has cut off can never be read again, so that goes first."""
        mine = [seal for seal in self._vault.held() if seal.rank == rank and seal.tier is Tier.LOCAL]
        others = [seal.version for seal in mine if seal.version != version]
        if not others:
            return False
        victim = min(others, key=lambda each: (directive.history.accepts(each), each))
        freed = self._vault.free(lambda s: (s.rank, s.version, s.tier) == (rank, victim, Tier.LOCAL))
        return bool(freed)


def _name(source: Source) -> str:
    return f"worker {source.peer.worker}" if source.peer else source.tier.value
