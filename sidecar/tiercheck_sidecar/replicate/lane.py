"""Sends each holder what it lacks, kind by kind and artifact by artifact: as copies, or for parity.

What it lacks depends on what is sealed here, what the holder has acknowledged, and which snapshot is named.
Snapshots are sent one named version at a time; deltas as they are made, in the order of steps, each one after
the oldest snapshot that the holder keeps or is being sent. The two kinds have separate lanes, so that a delta
never waits behind a snapshot.

Only the holder's acknowledgement counts. An interrupted push continues where it stopped, as long as each new
connection sends something. What fails is tried again: for one rank, or for the whole lane if the holder
cannot be reached. Each wait is longer, so that a holder without room is not asked in a tight loop.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.plain_files import open_plain
from tiercheck.protocol.directive import Directive, ParityGroup, Peer, Tier
from tiercheck.protocol.version import Artifact, History, Kind, Version
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.streams import (
    ChunkQueue,
    ConnectionPool,
    StreamPool,
    Take,
    TooDamaged,
    stream_count,
)
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import Portion, TokenBucket
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, StockPlace


def due(
    kind: Kind,
    stocks: Mapping[StockPlace, MemoryStock],
    acknowledged: Mapping[int, MemoryStock],
    copy: Version | None,
    history: History,
) -> list[Artifact]:
    """Returns own artifacts that a holder should get, in the order of sending.

    `acknowledged`: what it has, by rank; `copy`: the snapshot that is named."""
    found: list[Artifact] = []
    for place, own in stocks.items():
        if place.tier is not Tier.LOCAL or place.share is not None:
            continue
        has = acknowledged.get(place.rank, NOTHING)
        sent = {copy} & own.snapshots if copy is not None and history.accepts(copy) else set()
        if kind is Kind.SNAPSHOT:
            wanted = sent - has.snapshots
        else:
            base = min(has.snapshots | sent, default=None)
            lacking = own.deltas - has.deltas if base is not None else ()
            wanted = {each for each in lacking if base is not None and each > base and history.accepts(each)}
        found += (Artifact(place.rank, version, kind) for version in wanted)
    return sorted(found, key=lambda each: (each.version, each.rank))


def first_of_each_rank(due: Iterable[Seal]) -> list[Seal]:
    """Returns what may be sent next: only the first of each rank, as a rank's deltas go in order."""
    firsts: dict[int, Seal] = {}
    for seal in due:
        firsts.setdefault(seal.rank, seal)
    return list(firsts.values())


class PushRefused(Exception):
    """The holder refuses the artifact; the message is its sentence."""


def push(
    vault: Vault, seal: Seal, line: ConnectionPool, pace: Portion | None = None, op: str = "offer"
) -> PeerResponse | None:
    """Offers an own artifact by `op` ("offer", or "fold" into parity), and sends what is missing there.

    Returns the last answer, after which the holder has it; None: it has no free slot, or not this attempt
    yet. A broken stream continues where it stopped. Every exception of the connection closes `line`.
    Raises PushRefused, NotHeld, OSError, WireBroken, PeerRefused, TooDamaged.
    """
    try:
        with vault.pin(seal.artifact, Tier.LOCAL) as slot, open(open_plain(slot.path), "rb") as file:
            for _ in range(_MOST_BREAKS):
                hopeful, before = line.is_open, line.sent
                try:
                    said = _send(seal, line, file.fileno(), pace, op)
                    break
                except WireBroken:
                    # The other end may have closed an idle connection long ago: that is no failure.
                    if not hopeful and line.sent == before:
                        raise
                    line.drop()
            else:
                raise WireBroken(f"the connection broke {_MOST_BREAKS} times")
    except BaseException:
        line.drop()
        raise
    if said.state not in ("ok", "have", "in", "late", "busy"):
        raise PushRefused(said.message)
    return None if said.state == "busy" else said


def _send(seal: Seal, line: ConnectionPool, file: int, pace: Portion | None, op: str) -> PeerResponse:
    (wire,) = line.wires(1)
    failpoint("before-push")
    artifact, digests = seal.artifact, seal.digests
    offer = PeerRequest.about(op, artifact, world_size=seal.world_size, digests=digests, tags=seal.tags)
    wire.send(offer)
    said = wire.receive(PeerResponse)
    if said.state != "send":
        return said
    stream, end = PeerRequest.about("chunks", artifact), offer  # folding again returns what is still missing
    if said.transfer:
        stream, end = (
            PeerRequest("join", transfer=said.transfer),
            PeerRequest("commit", transfer=said.transfer),
        )
    chunks = len(digests.values)
    deal = ChunkQueue(chunks, set(range(chunks)) - set(said.missing))

    def send_chunks(wire: Wire, take: Take) -> None:
        """Sends the chunks that `take` assigns to `wire`. Raises WireBroken, TooDamaged."""
        index = take()
        while index is not None:
            wire.send(stream)
            while index is not None:
                begin, length = index * digests.chunk, length_of(digests, index)
                bare = seal.tags is not None and not deal.is_again(index)
                wire.send_chunk(file, index, begin, length, pace, bare=bare)
                index = take()
            wire.send_end()
            said = wire.receive(PeerResponse)
            if said.state != "ok":
                raise WireBroken("the chunks were not taken")
            for damaged in said.damaged:
                deal.ask_again(damaged)
            index = take()

    StreamPool(line, deal, stream_count(digests, len(deal)), send_chunks).run()
    while True:  # chunks that were reported as damaged after their stream had ended
        wire.send(end)
        last = wire.receive(PeerResponse)
        if last.state not in ("again", "send"):
            return last
        if not deal:  # it lost chunks that it took: offering again shows what it has
            raise WireBroken(last.message or "the holder lacks chunks that it took")
        send_chunks(wire, deal.take)


_MOST_BREAKS = 20

log = logging.getLogger(__name__)

PORTIONS: Mapping[Kind, float] = {Kind.SNAPSHOT: 0.1, Kind.DELTA: 2.0}
"""Seconds of bandwidth that a lane takes at once: if it is scarce, deltas get the larger part."""
_PATIENCE = 3
"""The number of failed tries before a problem is reported."""

Key = TypeVar("Key", bound=Hashable)

FIRST, LONGEST = 0.1, 5.0
"""Seconds until the next try: after the first failure, and at most."""


class Backoff(Generic[Key]):
    """Delays retries, by key. Times are seconds of any monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[Key, int] = {}
        self._after: dict[Key, float] = {}

    def ready(self, key: Key, now: float) -> bool:
        return self._after.get(key, now) <= now

    def until(self, key: Key) -> float:
        """Returns the time from which on `key` is ready."""
        return self._after.get(key, 0.0)

    def failed(self, key: Key, now: float) -> int:
        """Records a failure. Returns how many there were in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._after[key] = now + min(LONGEST, FIRST * 2 ** min(failures - 1, 10))
        return failures

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._after.pop(key, None)


class Lane:
    """Sends a holder what it lacks of one kind. Used by one thread."""

    def __init__(self, lanes: HolderLanes, holder: Peer, kind: Kind, era: Era) -> None:
        self._lanes, self._state, self._vault = lanes, lanes.state, lanes.vault
        self.holder, self.kind, self.era = holder, kind, era
        self.pace = Portion(lanes.bucket, PORTIONS[kind])
        self.reviewed_at = time.monotonic()
        """The time at which the holder was last asked what it has."""
        self._waits: Backoff[int | None] = Backoff()

    def turn(self, line: ConnectionPool) -> float | None:
        """Sends the first due artifact. Returns the seconds until the next may be; None: none is due."""
        now, waits = time.monotonic(), self._waits
        candidates = first_of_each_rank(self._lanes.lacking(self))
        for seal in candidates:
            if waits.ready(seal.rank, now) and waits.ready(None, now):
                self._send(seal, line)
                return 0.0
        if not candidates:
            return None
        soonest = max(waits.until(None), min(waits.until(each.rank) for each in candidates))
        return max(0.0, soonest - now)

    def _send(self, seal: Seal, line: ConnectionPool) -> None:
        """Sends one artifact; the outcome decides whether its rank, or the whole lane, has to wait."""
        now, waits, report = time.monotonic, self._waits, partial(self._lanes.report, self)
        try:
            has_it = self._lanes.bring(seal, line, self)
        except NotHeld:
            return  # freed meanwhile: no longer due
        except TooDamaged as error:
            self._vault.evict_if_bad(self._state, seal.artifact, Tier.LOCAL)
            waits.failed(seal.rank, now())
            report(str(error))
        except PushRefused as error:
            log.info("%s to worker %d: %s", seal, self.holder.worker, error)
            waits.succeeded(None)
            if waits.failed(seal.rank, now()) >= _PATIENCE:
                report(str(error))
        except (WireBroken, PeerRefused, OSError) as error:
            log.info("%s to worker %d: %s", seal, self.holder.worker, error)
            self._state.peers.suspect(self.holder)
            if waits.failed(None, now()) >= _PATIENCE:
                report(str(error))
        else:
            waits.succeeded(None)
            report("")
            if has_it:
                waits.succeeded(seal.rank)
            else:
                waits.failed(seal.rank, now())


@dataclass(frozen=True)
class Era:
    """An attempt and its holders. Acknowledgements count only within the era in which they arrive."""

    attempt: int
    holders: tuple[Peer, ...]
    group: ParityGroup | None = None


class HolderLanes(ABC):
    """Runs a lane for each kind to each holder that the directive names. Thread-safe."""

    failure_clause, conclusion = "takes nothing", "Training goes on"
    """Parts of the reported problem: a clause about each failing holder, and the last sentence."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, bucket: TokenBucket
    ) -> None:
        """`bucket` limits all that this worker sends to its holders (`Policy.peer_bandwidth`)."""
        self.state, self.vault, self._identity, self._port = state, vault, identity, port
        self.bucket = bucket
        self._lock = threading.Lock()
        self._era: Era | None = None
        self._has: dict[Peer, Mapping[int, MemoryStock]] = {}
        """Acknowledged artifacts by holder and own rank. Inner mappings are replaced, never changed."""
        self._publish_lock = threading.Lock()
        """Held until a reason is published, so that two updates cannot be published out of order."""
        self._reasons: dict[tuple[int, Kind], str] = {}
        """The reasons why lanes of the era send nothing, by holder and kind."""
        self._begun: set[str] = set()
        """Names of the era's threads."""

    @abstractmethod
    def _era_of(self, directive: Directive) -> Era: ...

    @abstractmethod
    def bring(self, seal: Seal, line: ConnectionPool, lane: Lane) -> bool:
        """Sends one artifact, and returns whether the holder has it; False: it is to be offered again.

        Raises NotHeld, OSError, WireBroken, PeerRefused, PushRefused, TooDamaged."""

    def run(self) -> None:
        for _ in self.state.looks(timeout=5.0):
            era = self.follow()
            for name, body in self._threads(era).items() if era is not None else ():
                if name not in self._begun:
                    self.state.threads.loop(name, body)
                    self._begun.add(name)

    def follow(self) -> Era | None:
        """Switches to the holders that the directive names. Returns their era, if there is one."""
        directive = self.state.directive
        if directive is None:
            return None
        self.bucket.set_rate(directive.policy.peer_bandwidth)
        era, old = self._era_of(directive), self._era
        if era != old:
            with self._publish_lock:
                with self._lock:
                    self._era, self._begun = era, set()
                    self._begin(era, old)
                self._reasons = {}
                if era.holders or (old is not None and old.holders):
                    self.state.problem("PeerUnreachable", "")
        return self._era

    def acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        """Returns each holder in `directive`: its worker, and what it has verified and kept, by own rank.

        What was acknowledged in another attempt, or before the lanes to these holders began, does not count.
        """
        wanted = self._era_of(directive)
        with self._lock:
            era = self._era
            same = era is not None and (era.attempt, era.group) == (wanted.attempt, wanted.group)
            return [(holder.worker, self._has.get(holder, {}) if same else {}) for holder in wanted.holders]

    def holders_lack(self) -> bool:
        """Returns whether a holder lacks anything that it should have."""
        era = self._era
        return era is not None and any(
            self.lacking(Lane(self, holder, kind, era)) for holder in era.holders for kind in Kind
        )

    def lacking(self, lane: Lane) -> list[Seal]:
        """Returns what the lane's holder should get, in the order of sending."""
        directive, verdict = self.state.released()
        if verdict is None or directive is None or directive.attempt != lane.era.attempt:
            return []
        with self._lock:
            has = self._has.get(lane.holder, {})
        owed = due(lane.kind, self.vault.stocks(), has, verdict.copy, directive.history)
        found = (self.vault.find(each, Tier.LOCAL) for each in owed)
        return [seal for seal in found if seal is not None]

    def report(self, lane: Lane, reason: str) -> None:
        """Publishes why lanes of the era send nothing, as one problem; an empty reason: this one sends."""
        with self._publish_lock:
            if lane.era != self._era:
                return
            self._reasons[lane.holder.worker, lane.kind] = reason
            worst = {worker: why for (worker, _), why in self._reasons.items() if why}
            parts = [f"Worker {worker} {self.failure_clause}: {why}" for worker, why in sorted(worst.items())]
            self.state.problem("PeerUnreachable", ". ".join([*parts, self.conclusion]) if parts else "")

    def _begin(self, era: Era, old: Era | None) -> None:
        """Resets what is known of the holders. Called under the lock."""
        self._has = {}

    def _threads(self, era: Era) -> dict[str, Callable[[], None]]:
        return {
            f"{kind.value}s-to-worker-{holder.worker}": partial(self._serve, holder, kind, era)
            for holder in era.holders
            for kind in Kind
        }

    def _serve(self, holder: Peer, kind: Kind, era: Era) -> None:
        lane, seen = Lane(self, holder, kind, era), -1
        with ConnectionPool(partial(self._dial, holder, era)) as line:
            while not self._is_over(era):
                self._before_turn(lane, line)
                pause = lane.turn(line)
                if pause is None:
                    seen = self.state.wait(seen, timeout=1.0)
                elif pause:
                    # Unrelated changes must not wake this lane again and again meanwhile.
                    self.state.wait_until(partial(self._is_over, era), pause)

    def _before_turn(self, lane: Lane, line: ConnectionPool) -> None:  # noqa: B027  (most know already)
        """Updates what is known of the lane's holder."""

    def _dial(self, holder: Peer, era: Era) -> Wire:
        return dial(self._identity, era.attempt, holder, self._port)

    def _is_over(self, era: Era) -> bool:
        return self.state.stopping or self._era is not era
