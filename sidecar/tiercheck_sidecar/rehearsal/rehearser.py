"""Rehearses each tier when it is due, slowly, never beside a restore, and yielding to saves.

It reads only. What it finds is reported and left in place: a bad copy that was freed while the job trains
might have been the last one, and a restore detects it again by itself and avoids it.

A version that training leaves behind is freed while it is read. Then the reading continues in its successor,
from the chunk where it stopped: so a state that is too large to be read within the life of one version is
read whole all the same, in parts of several.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Directive, Phase, Source, Tier
from tiercheck.protocol.report import Proof, RestoreState
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.artifact_source import (
    ArtifactSource,
    BoundedCall,
    ChunkBuffer,
    SourceCorrupt,
    SourceFailed,
    SourceGone,
)
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.rehearsal.ledger import Look, ScrubLog, due_in, seconds_to_rest
from tiercheck_sidecar.restore.restore_plan import OutOfReach, SourceOffer, bytes_moved, name_of, plan
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.seal import header_fault

PAUSES = (2.0, 5.0, 15.0, 30.0)
"""Seconds before a failed read is tried again: a sidecar may be restarting."""
_FRUITLESS = 8
"""The limit of versions in a row that are freed before one chunk of them was read."""


class Stopped(Exception):
    """A rehearsal without a verdict: something more important has begun, or nothing can be read."""


class TooSlow(Stopped):
    """Versions that are freed before they can be read, as they would be at an immediate retry."""


class Disproved(Exception):
    """An artifact that could not be restored; the message is a sentence."""


_OUTLIVED = 5.0
"""Seconds after the end of a version within which the verdict names a newer one."""
_GIVES_WAY = 10.0
"""Seconds that it waits for a save at most before it reads one more chunk.
It must progress even where deltas are written all the time."""

Wait = Callable[[Callable[[], bool], float], bool]
"""Waits until a condition holds, at most so many seconds; returns whether it does."""


class ScrubHost:
    """The state of the job around a rehearsal. All methods raise Stopped."""

    def __init__(
        self, state: SidecarState, vault: Vault, directive: Directive, tier: Tier, wait: Wait
    ) -> None:
        """`wait` as `SidecarState.wait_until`."""
        self._state, self._vault, self._wait = state, vault, wait
        self._directive, self._tier, self.history = directive, tier, directive.history

    def newest(self) -> Version:
        """Returns the newest version that is complete in the tier."""
        with self._state.lock:
            verdict = self._state.verdict
            self._go_on()
        if verdict is None:
            raise Stopped("nothing is known to be complete")
        marks = verdict.watermarks
        version = {Tier.LOCAL: marks.local, Tier.PEER: marks.peer, Tier.REMOTE: marks.remote}[self._tier]
        if version is None or not self.history.continues(version):
            raise Stopped("nothing is complete yet")
        return version

    def outlived(self, version: Version) -> bool:
        """Returns whether there is a newer version, after a short wait if necessary."""
        self._wait(lambda: self._is_over() or self._marks_another(version), _OUTLIVED)
        return self.newest() != version

    def rest(self, core: float, moved: int) -> None:
        """Pauses after a piece of work as its cost demands, and while something is being saved."""
        policy = self._directive.policy
        bandwidth = {Tier.PEER: policy.peer_bandwidth, Tier.REMOTE: policy.remote_bandwidth}.get(self._tier)
        self.pause(seconds_to_rest(core, moved, bandwidth))
        self._wait(lambda: self._is_over() or not self._vault.unfinished(), _GIVES_WAY)
        self._go_on()

    def pause(self, seconds: float) -> None:
        self._wait(self._is_over, seconds)
        self._go_on()

    def _marks_another(self, version: Version) -> bool:
        try:
            return self.newest() != version
        except Stopped:
            return True

    def _go_on(self) -> None:
        if self._is_over():
            raise Stopped("something else has begun")

    def _is_over(self) -> bool:
        """Returns whether the job's state has changed so that this rehearsal has to end."""
        state, mine = self._state, self._directive
        now = state.directive
        return (
            now is None
            or (now.attempt, now.placement) != (mine.attempt, mine.placement)
            or now.phase is not Phase.RELEASE
            or now.policy.rehearse_every is None
            or state.restore.state is not RestoreState.READY
            or state.fenced
            or state.ending
            or state.stopping
        )


@dataclass(frozen=True)
class ScrubResult:
    """The result of reading to the end without faults."""

    version: Version
    """The newest version of which something was read."""
    bytes: int
    parts: int
    """The number of versions of which something was read."""


class ScrubPass:
    """Reads what a restore of `rank` from `source` would read, chunk by chunk. Used once."""

    def __init__(
        self, reach: RestoreSources, source: Source, place: ArtifactSource, rank: int, ground: ScrubHost
    ) -> None:
        self._reach, self._source, self._place, self._rank, self._ground = reach, source, place, rank, ground
        self._done = self._bytes = self._parts = 0
        self._at: Artifact | None = None
        self._fresh = True
        """True while nothing of the current version was read."""
        self._buffer = ChunkBuffer()

    def run(self) -> ScrubResult:
        """Reads everything once. Raises Disproved, Stopped."""
        troubles = fruitless = 0
        while True:
            version, before, self._fresh = self._ground.newest(), self._done, True
            try:
                self._read_on(version)
                return ScrubResult(version, self._bytes, max(1, self._parts))
            except (SourceFailed, NotASlot, OSError) as error:
                if self._done > before:
                    troubles = fruitless = 0
                gone = self._is_gone(error, version)
                if gone and self._ground.outlived(version):
                    fruitless += 1
                    if fruitless > _FRUITLESS:
                        raise TooSlow("versions are freed before they can be read") from error
                    continue
                if troubles == len(PAUSES) or (isinstance(error, SourceCorrupt) and not gone):
                    raise Disproved(self._sentence(version, error)) from error
                self._ground.pause(PAUSES[troubles])
                troubles += 1

    def _read_on(self, version: Version) -> None:
        began = time.thread_time()
        for artifact, index in self._chunks(version):
            length = self._read(artifact, index)
            self._done, self._bytes = self._done + 1, self._bytes + length
            if self._fresh:
                self._parts, self._fresh = self._parts + 1, False
            self._ground.rest(time.thread_time() - began, bytes_moved(self._source, length))
            began = time.thread_time()

    def _chunks(self, version: Version) -> Iterator[tuple[Artifact, int]]:
        self._at, left = None, self._done
        found = plan(self._rank, version, self._ground.history, {}, self._offers(version))
        if isinstance(found, OutOfReach):
            raise SourceGone(str(found))
        for artifact in found.artifacts(self._rank):
            self._at = artifact
            with self._place.open(artifact, BoundedCall()) as opened:
                count = len(opened.seal.digests.values)
            for index in range(min(left, count), count):
                yield artifact, index
            left = max(0, left - count)

    def _read(self, artifact: Artifact, index: int) -> int:
        """Reads and verifies a chunk, which the place holds only meanwhile; returns its length in bytes.
        A mismatch is read once more, because it may have arisen on the way."""
        try:
            return self._read_once(artifact, index)
        except SourceCorrupt:
            return self._read_once(artifact, index)

    def _read_once(self, artifact: Artifact, index: int) -> int:
        with self._place.open(artifact, BoundedCall()) as opened:
            seal, digests = opened.seal, opened.seal.digests
            if index >= len(digests.values):
                raise SourceGone("it was made anew meanwhile, and is shorter now")
            opened.read([index], self._buffer)
            if opened.bad:
                raise SourceCorrupt("others took the places of bad parts", opened.bad)
            chunk = self._buffer.room(digests, index)
            # The same check as when a restored slot is sealed. Digests alone verify a header that reaches
            # beyond the first chunk.
            is_whole = 8 + int.from_bytes(chunk[:8], "little") <= len(chunk) or digests.size == len(chunk)
            reason = header_fault(chunk, seal, digests.size) if index == 0 and is_whole else ""
            if reason:
                raise SourceCorrupt(reason)
            return len(chunk)

    def _offers(self, version: Version) -> list[SourceOffer]:
        places, failures = self._reach.ask(self._rank, version, [self._source])
        if failures:
            raise SourceFailed(failures[0].removeprefix(f"{name_of(self._source)}: "))
        return places

    def _is_gone(self, error: Exception, version: Version) -> bool:
        """Returns whether the artifact was freed or deleted while it was read, and so is not bad."""
        if isinstance(error, SourceGone) or self._at is None or not isinstance(error, SourceFailed):
            return isinstance(error, SourceGone)
        try:
            return all(self._at not in place.offers for place in self._offers(version))
        except SourceFailed:
            return False

    def _sentence(self, version: Version, error: Exception) -> str:
        what = f"the {self._at}" if self._at is not None else f"{version} of rank {self._rank}"
        why = str(error)
        if isinstance(error, SourceFailed) and error.bad:
            bad = error.bad[0]
            why = f"what worker {bad.worker} gives for it is bad: {bad.reason}"
        return f"{what}, would not come back from {name_of(self._source)}: {why}"


log = logging.getLogger(__name__)

REHEARSAL_FAILED = "RehearsalFailed"
"""Reason of the problem that something could not be restored."""
_LOOK_EVERY = 5.0


class Rehearser:
    """Rehearses the tiers, in one thread. `wait` as `SidecarState.wait_until`."""

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
        self._ledger = ScrubLog()
        self._looks: dict[Tier, Look] = {}
        self._course: tuple[int, str] = (0, "")

    def run(self) -> None:
        for _ in self._state.looks(_LOOK_EVERY):
            self.look()

    def look(self) -> None:
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
        ground = ScrubHost(self._state, self._vault, directive, tier, self._wait)
        newest, began = ground.newest(), self._clock()
        if due_in(began, every, self._looks.get(tier), self._course, newest) > 0:
            return
        try:
            good, whole = self._rehearse(tier, directive, ground)
        except TooSlow:
            self._looks[tier] = Look(self._course, began, good=True)
            raise
        self._looks[tier] = Look(self._course, began, good, whole)

    def _rehearse(self, tier: Tier, directive: Directive, ground: ScrubHost) -> tuple[bool, Version | None]:
        """Returns whether all is well, and which version was read whole. Raises Stopped."""
        walked: dict[int, list[tuple[ScrubResult, float]]] = {rank: [] for rank in self._vault.ranks}
        bad: dict[int, list[str]] = {}
        ways = _sources(tier, directive)
        for source in ways:
            with contextlib.closing(self._reach.open(source, report_bad=False)) as place:
                for rank, found in walked.items():
                    began = self._clock()
                    try:
                        done = ScrubPass(self._reach, source, place, rank, ground).run()
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

    def _prove(self, tier: Tier, rank: int, found: list[tuple[ScrubResult, float]]) -> None:
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
        if self._looks or self._ledger != ScrubLog():
            self._looks = {}
            self._publish(ScrubLog())

    def _publish(self, ledger: ScrubLog) -> None:
        self._ledger = ledger
        with self._state.lock:
            self._state.show(ledger.shown(self._vault.ranks))
        self._state.problem(REHEARSAL_FAILED, ledger.complaint())
        self._state.bump()


def _sources(tier: Tier, directive: Directive) -> list[Source]:
    """Returns every place of `tier` that a recovery of this worker's ranks might read from."""
    if tier is not Tier.PEER:
        return [Source(tier)]
    found = [Source(tier, peer) for peer in directive.holders]
    return [*found, Source(tier, parity=directive.parity)] if directive.parity is not None else found
