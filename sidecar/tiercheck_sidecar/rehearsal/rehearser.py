"""Rehearses each tier when its turn has come, never beside a restore or a save.

It reads only. What it finds is told and left as it lies: a bad copy that was freed while the job trains might
have been the last one, and a restore finds it again by itself and goes round it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.report import Proof
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.rehearsal.ledger import Ledger, Look, due_in
from tiercheck_sidecar.rehearsal.routes import routes
from tiercheck_sidecar.rehearsal.walk import Disproved, RehearsalGround, Stopped, TooSlow, Wait, Walk, Walked
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

REHEARSAL_FAILED = "RehearsalFailed"
"""Reason of the problem that something would not come back."""
_LOOK_EVERY = 5.0


class Rehearser:
    """One thread. `wait` as `SidecarState.wait_until`."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        reach: RestoreSources,
        *,
        wait: Wait | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._vault, self._reach = state, vault, reach
        self._wait, self._clock = wait or state.wait_until, clock
        self._ledger = Ledger()
        self._looks: dict[Tier, Look] = {}
        self._course: tuple[int, str] = (0, "")

    def run(self) -> None:
        seen = -1
        while not self._state.stopping:
            self.look()
            seen = self._state.wait(seen, _LOOK_EVERY)

    def look(self) -> None:
        """Rehearse the tiers whose turn has come."""
        for tier in Tier:
            directive = self._state.directive
            if directive is None or directive.policy.rehearse_every is None:
                self._forget()
                return
            if (course := (directive.attempt, directive.placement)) != self._course:
                self._course = course
                self._publish(self._ledger.without_faults())
            try:
                self._look_at(tier, directive, directive.policy.rehearse_every)
            except Stopped as why:
                log.debug("rehearsal of the %s tier: %s", tier.value, why)

    def _look_at(self, tier: Tier, directive: Directive, every: float) -> None:
        ground = RehearsalGround(self._state, self._vault, directive, tier, self._wait)
        newest, began = ground.newest(), self._clock()
        if due_in(began, every, self._looks.get(tier), self._course, newest) > 0:
            return
        try:
            good, whole = self._rehearse(tier, directive, ground)
        except TooSlow:
            self._looks[tier] = Look(self._course, began, good=True)
            raise
        self._looks[tier] = Look(self._course, began, good, whole)

    def _rehearse(
        self, tier: Tier, directive: Directive, ground: RehearsalGround
    ) -> tuple[bool, Version | None]:
        """Whether all is well, and which version was read whole. Raises Stopped."""
        walked: dict[int, list[tuple[Walked, float]]] = {rank: [] for rank in self._vault.ranks}
        bad: dict[int, list[str]] = {}
        ways = routes(tier, directive, self._vault, self._reach)
        for route in ways:
            with contextlib.closing(route):
                for rank, found in walked.items():
                    began = self._clock()
                    try:
                        done = Walk(route, rank, directive.history, ground).run()
                    except Disproved as error:
                        log.error("rehearsal of the %s tier: %s", tier.value, error)
                        bad.setdefault(rank, []).append(str(error))
                        self._publish(self._ledger.disproved(rank, tier, bad[rank]))
                        continue
                    found.append((done, self._clock() - began))
                    if len(found) == len(ways):
                        self._prove(tier, rank, found)
        if ways and walked:
            self._state.count(**{"disproved" if bad else "proved": 1})
        versions = {(done.version, done.parts) for found in walked.values() for done, _ in found}
        (whole, parts) = versions.pop() if len(versions) == 1 and not bad else (None, 0)
        return not bad, whole if parts == 1 else None

    def _prove(self, tier: Tier, rank: int, found: list[tuple[Walked, float]]) -> None:
        proof = Proof(
            tier,
            min(done.version for done, _ in found),
            self._state.clock(),
            sum(seconds for _, seconds in found),
            sum(done.bytes for done, _ in found),
            max(done.parts for done, _ in found),
        )
        log.info("rehearsal, rank %d: %s", rank, proof)
        self._publish(self._ledger.proved(rank, proof))

    def _forget(self) -> None:
        if self._looks or self._ledger != Ledger():
            self._looks = {}
            self._publish(Ledger())

    def _publish(self, ledger: Ledger) -> None:
        self._ledger = ledger
        with self._state.lock:
            self._state.show(ledger.shown(self._vault.ranks))
        self._state.problem(REHEARSAL_FAILED, ledger.complaint())
        self._state.bump()
