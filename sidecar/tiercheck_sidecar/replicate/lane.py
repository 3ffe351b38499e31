"""Brings one holder what it lacks of one kind, artifact by artifact: copies, or parts of parity.

What fails is tried again: a rank by itself, or the whole lane where the holder cannot be reached. Waits grow
longer each time, so that a holder without room is not asked in a circle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.version import Kind
from tiercheck_sidecar.exchange.frames import WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.streams import Line, TooDamaged
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.replicate.agenda import first_of_each_rank
from tiercheck_sidecar.replicate.sender import PushRefused
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.verification import evict_if_bad

log = logging.getLogger(__name__)

PORTIONS: Mapping[Kind, float] = {Kind.SNAPSHOT: 0.1, Kind.DELTA: 2.0}
"""Seconds' worth of bandwidth that a lane asks for at once: where it is short, deltas get the larger part."""
_PATIENCE = 3
"""Tries in vain before a person is told."""

Key = TypeVar("Key", bound=Hashable)

FIRST, LONGEST = 0.1, 5.0
"""Seconds until the next try."""


class Backoff(Generic[Key]):
    """Times are seconds of any monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[Key, int] = {}
        self._after: dict[Key, float] = {}

    def ready(self, key: Key, now: float) -> bool:
        return self._after.get(key, now) <= now

    def until(self, key: Key) -> float:
        """When it is ready."""
        return self._after.get(key, 0.0)

    def failed(self, key: Key, now: float) -> int:
        """How often in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._after[key] = now + min(LONGEST, FIRST * 2 ** min(failures - 1, 10))
        return failures

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._after.pop(key, None)


class Lane:
    """Used by one thread."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        holder: Peer,
        *,
        due: Callable[[], list[Seal]],
        bring: Callable[[Seal, Line], bool],
        report: Callable[[str], None],
    ) -> None:
        """`due` returns what the holder should get now, first things first. `bring` sends one of these and
        returns whether the holder has it; False: it is to be offered again. It raises NotHeld, OSError,
        WireBroken, PeerRefused, PushRefused, TooDamaged. `report` takes why nothing is brought, and an empty
        reason when something is.
        """
        self._state, self._vault, self._holder = state, vault, holder
        self._due, self._bring, self._report = due, bring, report
        self._waits: Backoff[int | None] = Backoff()

    def run(self, line: Line, is_over: Callable[[], bool], before: Callable[[], None] = lambda: None) -> None:
        """Brings what is due until `is_over`, and calls `before` before each look at what that is."""
        seen = -1
        while not is_over():
            before()
            pause = self.turn(line)
            if pause is None:
                seen = self._state.wait(seen, timeout=1.0)
            elif pause:
                # What happens elsewhere must not wake this lane again and again meanwhile.
                self._state.wait_until(is_over, pause)

    def turn(self, line: Line) -> float | None:
        """Sends the first artifact that is due. Returns the seconds until another may be sent; None if none
        is due.
        """
        now, waits = time.monotonic(), self._waits
        candidates = first_of_each_rank(self._due())
        for seal in candidates:
            if waits.ready(seal.rank, now) and waits.ready(None, now):
                self._send(seal, line)
                return 0.0
        if not candidates:
            return None
        soonest = max(waits.until(None), min(waits.until(each.rank) for each in candidates))
        return max(0.0, soonest - now)

    def _send(self, seal: Seal, line: Line) -> None:
        """One artifact; what becomes of it decides whether the rank, or the whole lane, has to wait."""
        now, waits = time.monotonic, self._waits
        try:
            has_it = self._bring(seal, line)
        except NotHeld:
            return  # freed meanwhile: no longer due
        except TooDamaged as error:
            evict_if_bad(self._state, self._vault, seal.artifact, Tier.LOCAL)
            waits.failed(seal.rank, now())
            self._report(str(error))
        except PushRefused as error:
            log.info("%s to worker %d: %s", seal, self._holder.worker, error)
            waits.succeeded(None)
            if waits.failed(seal.rank, now()) >= _PATIENCE:
                self._report(str(error))
        except (WireBroken, PeerRefused, OSError) as error:
            log.info("%s to worker %d: %s", seal, self._holder.worker, error)
            self._state.peers.doubt(self._holder)
            if waits.failed(None, now()) >= _PATIENCE:
                self._report(str(error))
        else:
            waits.succeeded(None)
            self._report("")
            if has_it:
                waits.succeeded(seal.rank)
            else:
                waits.failed(seal.rank, now())


class HolderTroubles:
    """States which holders take nothing, and why, as one problem of the sidecar. Thread-safe."""

    def __init__(self, state: SidecarState, says: str, hope: str) -> None:
        """`says`: what a holder does that takes nothing, as a clause; `hope`: the sentence after all."""
        self._state, self._says, self._hope = state, says, hope
        self._lock = threading.Lock()
        """Held until a reason is stated: else the older of two could be stated last, and stay."""
        self._era: object = None
        self._reasons: dict[tuple[int, Kind], str] = {}

    def begin(self, era: object) -> None:
        """Forgets all reasons, and takes only those of this era from now on."""
        with self._lock:
            self._era, self._reasons = era, {}
            self._state.problem("PeerUnreachable", "")

    def report(self, era: object, holder: Peer, kind: Kind, reason: str) -> None:
        """States why a lane to the holder brings nothing; an empty reason: it does."""
        with self._lock:
            if era != self._era:
                return
            self._reasons[holder.worker, kind] = reason
            worst = {worker: why for (worker, _), why in self._reasons.items() if why}
            told = [f"Worker {worker} {self._says}: {why}" for worker, why in sorted(worst.items())]
            self._state.problem("PeerUnreachable", ". ".join([*told, self._hope]) if told else "")
