"""Tells the coordinator what this worker's ranks have where, and takes its verdict home."""

from __future__ import annotations

import logging
import time

import msgspec

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.control_client import CallFailed, ControlClient
from tiercheck_sidecar.offload import Offloader
from tiercheck_sidecar.replicate import Replicator
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.watermark import Copy, RankTiers, TierReport, Verdict

log = logging.getLogger(__name__)

_EVERY = 1.0
_WORKERS_PER_SECOND = 500
"""How many the coordinator should have to answer per second when nothing happens."""


class TierClient:
    """One thread."""

    def __init__(self, board: Board, vault: Vault, replicator: Replicator, offloader: Offloader) -> None:
        self._board, self._vault, self._replicator, self._offloader = board, vault, replicator, offloader
        self._client: ControlClient | None = None
        self.synced = False
        """Whether the coordinator knows everything that was so when it last answered."""

    def run(self) -> None:
        seen, sent, sent_at = -1, None, 0.0
        while not self._board.stopping:
            directive = self._board.directive
            interval = _EVERY
            if directive is not None:
                interval = max(_EVERY, directive.workers / _WORKERS_PER_SECOND)
                report = self.gather(directive)
                due = time.monotonic() - sent_at >= interval
                if report != sent or due or self._board.verdict is None:
                    sent, sent_at = (report, time.monotonic()) if self._tell(directive, report) else (None, sent_at)
                self.synced = sent is not None and sent == self.gather(directive)
            generation = self._board.wait(seen, interval)
            # Changes come in bursts (slot, seal, acknowledgement): a moment lets one message carry them.
            self._board.wait_until(lambda: False, 0.05)
            seen = generation

    def gather(self, directive: Directive) -> TierReport:
        """The order matters: a version moves from reached to unfinished to local, and must not be missed in between."""
        with self._board.lock:
            reached, verdict = dict(self._board.reached), self._board.verdict
        unfinished = self._vault.unfinished()
        held = self._vault.held()
        local = [seal for seal in held if seal.tier is Tier.LOCAL]
        accepts = directive.history.accepts
        known = set(verdict.received) if verdict else set()
        holders = self._replicator.holders()
        return TierReport(
            job_uid=directive.job_uid,
            attempt=directive.attempt,
            worker=directive.worker,
            host=self._board.config.pod_ip,
            ranks=tuple(
                RankTiers(
                    rank=rank,
                    local=tuple(seal.version for seal in local if seal.rank == rank and accepts(seal.version)),
                    unfinished=tuple(
                        sorted(each.version for each in unfinished if each.rank == rank and each.kind is Kind.SNAPSHOT)
                    ),
                    reached=reached.get(rank),
                    copied=self._replicator.copied(rank),
                    holders=holders,
                    uploaded=() if rank in known else self._offloader.uploaded(rank, verdict),
                )
                for rank in self._vault.ranks
            ),
            copies=tuple(Copy(seal.rank, seal.version) for seal in held if seal.tier is Tier.PEER),
        )

    def _tell(self, directive: Directive, report: TierReport) -> bool:
        host = directive.coordinator.host
        if self._client is None or self._client.host != host:
            self._client = ControlClient(self._board.config, host)
        try:
            verdict = msgspec.json.decode(self._client.call("POST", "/v1/tiers", to_json(report)), type=Verdict)
        except (CallFailed, msgspec.DecodeError) as error:
            log.debug("the coordinator: %s", error)
            return False
        take(self._board, verdict)
        return True


def take(board: Board, verdict: Verdict) -> str:
    """Follow the coordinator's word. Returns a sentence if it is refused."""
    with board.lock:
        if verdict.attempt != board.attempt:
            if verdict.attempt < board.attempt:
                board.count(refused_stale=1)
            return f"the verdict is of attempt {verdict.attempt}, this sidecar is at {board.attempt}"
        if board.verdict == verdict:
            return ""
        board.verdict = verdict
    board.bump()
    return ""
