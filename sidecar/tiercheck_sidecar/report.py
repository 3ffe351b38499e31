"""The report: everything the controller knows about this worker, gathered from the board and the vault.

Its serial grows only with facts that the controller may act on; steps and counters alone wake nobody.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid

from tiercheck.protocol.report import Counters, Holding, MemoryReport, Report, Watermarks
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.vault import Vault


class Reporter:
    """Thread-safe."""

    def __init__(self, board: Board, vault: Vault) -> None:
        self._board, self._vault = board, vault
        self._instance = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._serial = 0
        self._known: Report | None = None

    def report(self) -> Report:
        with self._lock:
            report = self._gather()
            essence = _essence(report)
            if essence != self._known:
                self._known = essence
                self._serial += 1
            return dataclasses.replace(report, serial=self._serial)

    def _gather(self) -> Report:
        board, vault = self._board, self._vault
        with board.lock:
            directive, verdict = board.directive, board.verdict
            plan = vault.size_plan()
            return Report(
                job_uid=board.config.job_uid,
                worker=board.config.worker,
                pod_uid=board.config.pod_uid,
                instance=self._instance,
                serial=0,
                attempt=board.attempt,
                revision=directive.revision if directive else "",
                phase=directive.phase if directive else None,
                restore=board.restore,
                trainer=board.trainer.report,
                holdings=tuple(Holding(seal.rank, seal.version, seal.tier, seal.digests.size) for seal in vault.held()),
                remote=board.remote,
                watermarks=verdict.watermarks if verdict else Watermarks(),
                memory=MemoryReport(limit=vault.limit, used=vault.used(), needed=plan.needed),
                quarantined=board.quarantined,
                problems=board.problems,
                counters=board.counters,
            )


def _essence(report: Report) -> Report:
    trainer = dataclasses.replace(report.trainer, step=None, step_seconds=None)
    memory = dataclasses.replace(report.memory, used=0)
    return dataclasses.replace(report, trainer=trainer, memory=memory, counters=Counters())
