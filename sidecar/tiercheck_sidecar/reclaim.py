"""Gives slots back as the watermark allows, so that the next capture finds one free. Frees nothing on its own judgement."""

from __future__ import annotations

from tiercheck.protocol.directive import Directive, Peer, Phase, Tier
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Version
from tiercheck_sidecar.board import Board
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.sizing import OWN_SLOTS
from tiercheck_sidecar.watermark import Verdict, may_free


class Reclaimer:
    """One thread."""

    def __init__(self, board: Board, vault: Vault) -> None:
        self._board, self._vault = board, vault
        self._hosted: tuple[Peer, ...] = ()

    def run(self) -> None:
        seen = -1
        while not self._board.stopping:
            seen = self._board.wait(seen, timeout=1.0)
            with self._board.lock:
                directive = self._board.directive
                # At the end of a job the launcher is meant to go, and says nothing about it.
                if directive is not None and directive.phase is Phase.RELEASE:
                    lost = self._board.trainer.tick(self._board.clock())
                else:
                    lost = False
            if lost:
                self._board.bump()
            self._host()
            self.step()

    def _host(self) -> None:
        """Whose copies are kept here is part of the wanted state."""
        directive = self._board.directive
        if directive is None or directive.hosted == self._hosted:
            return
        procs = directive.procs_per_worker
        self._hosted = directive.hosted
        self._vault.host(
            rank for peer in directive.hosted for rank in range(peer.worker * procs, (peer.worker + 1) * procs)
        )

    def step(self) -> None:
        """Free what may be freed now."""
        board = self._board
        with board.lock:
            directive, verdict, ready = board.directive, board.verdict, board.restore.state is RestoreState.READY
        if directive is None or not ready or directive.phase is Phase.HOLD:
            return  # while others may still be restoring, even what the new history does not accept harms nobody
        owed = verdict.upload if verdict and self._vault.size_plan().own_slots == OWN_SLOTS else None
        self._vault.free(lambda seal: _unwanted(seal, directive, verdict, owed))
        self._vault.tidy()


def _unwanted(seal: Seal, directive: Directive, verdict: Verdict | None, owed: Version | None) -> bool:
    if seal.tier is Tier.LOCAL:
        mine = verdict is None or seal.rank not in verdict.received
        return may_free(seal.version, directive.history, verdict, owed=owed if mine else None)
    owner = seal.rank // directive.procs_per_worker
    stranded = owner not in {peer.worker for peer in directive.hosted}
    return may_free(seal.version, directive.history, verdict, stranded=stranded)
