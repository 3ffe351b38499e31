"""Records the results of rehearsals, and computes how slowly they read and when each is due.

Results are proofs, and what could not be restored. Rules only: no I/O, no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Proof
from tiercheck.protocol.version import Version

ADVICE = {
    Tier.LOCAL: (
        "A restore goes round it to the copies elsewhere, and the next snapshot takes its place; "
        "if it happens again, have the memory of this worker's node looked at"
    ),
    Tier.PEER: (
        "A restore goes round it as long as there is another copy, and the next snapshot takes its place; if "
        "it happens again, have the memory of the other worker's node and the network between them looked at"
    ),
    Tier.REMOTE: (
        "If all memory is lost, the job goes back to an older version there; "
        "check the store, its rules for deletion, and spec.tiers.remote"
    ),
}


@dataclass(frozen=True)
class ScrubLog:
    """The results of this worker's rehearsals, as long as its sidecar lives."""

    proofs: tuple[tuple[int, Proof], ...] = ()
    """One proof for each own rank and tier."""
    faults: tuple[tuple[int, Tier, str], ...] = ()
    """Own rank, tier, and what could not be restored, as a sentence without its full stop."""

    def proved(self, rank: int, proof: Proof) -> ScrubLog:
        """Returns the results after all sources of that rank's tier were read to their ends."""
        others = [(of, each) for of, each in self.proofs if (of, each.tier) != (rank, proof.tier)]
        faults = tuple(each for each in self.faults if each[:2] != (rank, proof.tier))
        return ScrubLog((*others, (rank, proof)), faults)

    def disproved(self, rank: int, tier: Tier, sentences: Sequence[str]) -> ScrubLog:
        """Returns the results after some of them could not be. Earlier proofs stay, and grow old."""
        faults = [each for each in self.faults if each[:2] != (rank, tier)]
        return ScrubLog(self.proofs, (*faults, *((rank, tier, sentence) for sentence in sentences)))

    def without_faults(self) -> ScrubLog:
        """Returns the results without faults, for a new attempt or placement."""
        return ScrubLog(self.proofs)

    def shown(self, ranks: Collection[int]) -> tuple[Proof, ...]:
        """Returns for the report, of each tier that is proved for all of `ranks`, the oldest proof."""
        found = []
        for tier in Tier:
            here = [proof for rank, proof in self.proofs if rank in ranks and proof.tier is tier]
            if here and len(here) == len(ranks):
                found.append(
                    Proof(
                        tier,
                        min(each.version for each in here),
                        min(each.at for each in here),
                        round(sum(each.seconds for each in here), 3),
                        sum(each.bytes for each in here),
                        max(each.parts for each in here),
                    )
                )
        return tuple(found)

    def complaint(self) -> str:
        """Returns what a user should know and do; empty if nothing is wrong."""
        sentences = [f"{sentence}. {ADVICE[tier]}" for _, tier, sentence in self.faults[:2]]
        more = len(self.faults) - len(sentences)
        return ". ".join(sentences) + (f"; and {more} more" if more else "") + "." if sentences else ""


SHARE = 0.01
"""The share that reading may take of one core, and of the bandwidth for copies or uploads."""
WIRE_SECONDS = 1e-9
"""Core-seconds per received byte at least, for kernel and other threads (0.7 per GB were measured)."""
AGAIN = 300.0
"""Seconds after which a failure is checked again, if its turn does not come sooner."""
FRESH = 12 * 3600.0
"""Seconds for which the proof of a version is good: it is not read again sooner.
Reading from a remote store costs money."""


def seconds_to_rest(core: float, moved: int, bandwidth: int | None) -> float:
    """Returns the seconds to pause after a piece took `core` seconds of this thread's processor time.

    `moved`: its bytes from elsewhere. `bandwidth`: bytes per second that the job allows; None: not limited.
    """
    worked = max(core, moved * WIRE_SECONDS)
    return max(worked / SHARE, 0.0 if bandwidth is None else moved / (bandwidth * SHARE))


@dataclass(frozen=True)
class Look:
    """The last rehearsal of one tier that came to an end."""

    course: tuple[int, str]
    """The attempt and placement in which it ran."""
    began: float
    """Seconds of the clock that `due_in` is called with."""
    good: bool
    whole: Version | None = None
    """The version, if it was a single one that was proved whole."""


def due_in(now: float, every: float, last: Look | None, course: tuple[int, str], newest: Version) -> float:
    """Returns the seconds until a tier shall be rehearsed (again); 0: now.
    `newest`: its newest complete version."""
    if last is None or last.course != course:
        return 0.0
    wait = every if last.good else min(every, AGAIN)
    if last.whole == newest:
        wait = max(wait, FRESH)
    return max(0.0, last.began + wait - now)
