"""Restore: bring every own rank to the wanted version from the nearest places that prove to be good.

Own memory first, then whatever the named sources have, each missing artifact from the nearest ones. Every
byte is verified on the way in; what fails is reported by name, so that the controller can decide again
without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

from tiercheck.failpoints import failpoint
from tiercheck.protocol.directive import Directive, Phase, Restore, Tier
from tiercheck.protocol.report import RankRestore, RestoreReport, RestoreState
from tiercheck.protocol.version import Artifact
from tiercheck.supervised import describe
from tiercheck_sidecar.bounded_calls import SourceFailed
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.restore.rank_restore import RankRestorer
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.vault import MemoryTooSmall, Vault

log = logging.getLogger(__name__)

_PARALLEL_RANKS = 8
_TRIES = 3
"""Of one restore, before it is reported as failed."""
_VERIFIERS = max(2, min(8, os.cpu_count() or 2))
"""Threads that read own memory again, for all ranks together."""


class Restorer:
    """One thread, which restores each attempt once, and again with new sources if that failed."""

    def __init__(self, state: SidecarState, vault: Vault, reach: RestoreSources) -> None:
        self._state, self._vault, self._reach = state, vault, reach
        self._done: tuple[int, str] = (0, "")
        self._tried: tuple[tuple[int, str], int] = ((0, ""), 0)
        """What was begun last, and how often."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            with self._state.lock:
                directive = self._state.directive
                ready = self._state.restore.state is RestoreState.READY
            if directive is None or (ready and self._done[0] == directive.attempt):
                continue
            wanted = (directive.attempt, directive.revision)
            if self._done != wanted:
                self._tried = (wanted, self._tried[1] + 1 if self._tried[0] == wanted else 1)
                self._carry_out_or_fail(directive)
                self._done = wanted

    def _carry_out_or_fail(self, directive: Directive) -> None:
        """What nobody thought of may pass, so it is tried again. When it does not, the controller is told: it
        waits for an answer."""
        try:
            self.carry_out(directive)
        except BaseException as error:
            if self._tried[1] < _TRIES:
                raise
            log.exception("the restore of attempt %d is given up", directive.attempt)
            why = f"the restore failed {_TRIES} times in a way that nobody thought of: {describe(error)}"
            version = directive.restore.version if directive.restore else None
            ranks = tuple(RankRestore(rank, None, None, 0, 0.0, (why,)) for rank in self._vault.ranks)
            self._publish(directive, RestoreReport(RestoreState.FAILED, version, ranks))

    def carry_out(self, directive: Directive) -> None:
        """Restore as `directive` says, and report it."""
        state, restore = self._state, directive.restore
        if restore is None or directive.phase is Phase.FINISH or not state.saw_hold:
            # Not seen from its beginning: this process was restarted while the attempt ran, with trainers
            # long past this version. What it holds is what its inventory verified.
            self._publish(directive, RestoreReport(RestoreState.READY, restore.version if restore else None))
            return
        began = time.monotonic()
        self._publish(directive, RestoreReport(RestoreState.RUNNING, restore.version))
        if restore.world_size:
            self._publish(directive, self._look_at_others(directive, restore, began))
            return
        with (
            ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="verify") as verifiers,
            ThreadPoolExecutor(_PARALLEL_RANKS, thread_name_prefix="restore") as pool,
        ):
            restorers = [
                RankRestorer(
                    state,
                    self._vault,
                    self._reach,
                    verifiers,
                    directive=directive,
                    rank=rank,
                    sources=restore.table.of_rank(rank),
                )
                for rank in self._vault.ranks
            ]
            ranks = tuple(pool.map(RankRestorer.run, restorers))
        failpoint("after-restore")
        outcome = RestoreState.FAILED if any(rank.tier is None for rank in ranks) else RestoreState.READY
        seconds, stalled = time.monotonic() - began, state.meter.stalled
        self._publish(directive, RestoreReport(outcome, restore.version, ranks, seconds, stalled=stalled))

    def _look_at_others(self, directive: Directive, restore: Restore, began: float) -> RestoreReport:
        """Whether the slots of other ranks can be read: this worker's share of them, so that all are looked
        at once."""
        failures: list[str] = []
        with contextlib.closing(self._reach.lender()) as lender:
            for rank in range(directive.worker, restore.world_size, directive.workers):
                artifact = Artifact(rank, restore.version)
                try:
                    lender.lend(directive, artifact, ())
                except (SourceFailed, MemoryTooSmall, OSError) as error:
                    failures.append(f"{artifact}, of {restore.world_size} ranks: {error}")
        tier = None if failures else Tier.PEER
        ranks = tuple(RankRestore(rank, tier, None, 0, 0.0, tuple(failures)) for rank in self._vault.ranks)
        outcome = RestoreState.FAILED if failures else RestoreState.READY
        stalled = self._state.meter.stalled
        return RestoreReport(outcome, restore.version, ranks, time.monotonic() - began, stalled=stalled)

    def _publish(self, directive: Directive, report: RestoreReport) -> None:
        if self._state.report_restore(directive.attempt, report):
            log.info("restore of attempt %d: %s", directive.attempt, report)
