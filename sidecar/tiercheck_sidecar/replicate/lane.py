"""Brings each holder what it lacks, kind by kind and artifact by artifact: copies, or parts of parity.

What it lacks goes by what is sealed here, what the holder has acknowledged, and which snapshot is named.
Snapshots of one named version at a time; deltas as they come, every one after the oldest snapshot that the
holder keeps or is being sent, in the order of steps. The two go on lanes of their own, so that a delta never
waits behind a snapshot.

Only the holder's acknowledgement is believed. A push that is broken off goes on where it stopped, as long as
each connection brought something. What fails is tried again: a rank by itself, or the whole lane where the
holder cannot be reached. Waits grow longer each time, so that a holder without room is not asked in a circle.
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
from tiercheck.protocol.report import RestoreState
from tiercheck.protocol.version import Artifact, History, Kind, Version
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.streams import Deal, Line, StreamCrew, Take, TooDamaged, stream_count
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import Portion, TokenBucket
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.stock import NOTHING, MemoryStock, Where


def due(
    kind: Kind,
    stocks: Mapping[Where, MemoryStock],
    acknowledged: Mapping[int, MemoryStock],
    copy: Version | None,
    history: History,
) -> list[Artifact]:
    """Own artifacts that a holder should get now, first things first. `acknowledged`: what it has, by rank;
    `copy`: the snapshot that is named.
    """
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
    """What may be sent next: a rank's deltas are sent in order, so only its first."""
    firsts: dict[int, Seal] = {}
    for seal in due:
        firsts.setdefault(seal.rank, seal)
    return list(firsts.values())


def lacking(
    state: SidecarState, vault: Vault, kind: Kind, attempt: int, has: Mapping[int, MemoryStock]
) -> list[Seal]:
    """What a holder of that attempt, which `has` so much of each own rank, should get now."""
    with state.lock:
        verdict, directive = state.verdict, state.directive
        ready = state.restore.state is RestoreState.READY
    if verdict is None or not ready or directive is None or directive.attempt != attempt:
        return []
    owed = due(kind, vault.stocks(), has, verdict.copy, directive.history)
    found = (vault.find(each, Tier.LOCAL) for each in owed)
    return [seal for seal in found if seal is not None]


class PushRefused(Exception):
    """The holder will not take it; the message is its sentence."""


def push(vault: Vault, seal: Seal, line: Line, pace: Portion | None = None) -> bool:
    """Send `seal`'s artifact as a copy. Returns whether the holder has verified every chunk and holds it;
    False: it has no free slot now, or has not heard of this attempt yet. Raises PushRefused, and what `send`
    raises.
    """
    said = send(vault, seal, line, pace, "offer")
    if said.state not in ("ok", "have", "busy"):
        raise PushRefused(said.message)
    return said.state != "busy"


def send(vault: Vault, seal: Seal, line: Line, pace: Portion | None, op: str) -> Say:
    """Offer an own artifact by `op` ("offer", or "fold" into parity), and send what is missing there. Returns
    the holder's last word. A stream that breaks is taken up again where it stopped. Whatever is raised,
    `line` is hung up.

    Raises NotHeld, OSError, WireBroken, PeerRefused, TooDamaged.
    """
    try:
        with vault.pin(seal.artifact, Tier.LOCAL) as slot, open(open_plain(slot.path), "rb") as file:
            for _ in range(_MOST_BREAKS):
                hopeful, before = line.is_open, line.sent
                try:
                    return _send(seal, line, file.fileno(), pace, op)
                except WireBroken:
                    # A connection that lay idle may have been closed by the other end long ago: that proves
                    # nothing.
                    if not hopeful and line.sent == before:
                        raise
                    line.drop()
            raise WireBroken(f"the connection broke {_MOST_BREAKS} times")
    except BaseException:
        line.drop()
        raise


def _send(seal: Seal, line: Line, file: int, pace: Portion | None, op: str) -> Say:
    (wire,) = line.wires(1)
    failpoint("before-push")
    artifact, digests = seal.artifact, seal.digests
    offer = Ask.about(op, artifact, world_size=seal.world_size, digests=digests, tags=seal.tags)
    wire.send(offer)
    said = wire.receive(Say)
    if said.state != "send":
        return said
    stream, end = Ask.about("chunks", artifact), offer  # to fold again tells what is still missing
    if said.transfer:
        stream, end = Ask("join", transfer=said.transfer), Ask("commit", transfer=said.transfer)
    chunks = len(digests.values)
    deal = Deal(chunks, set(range(chunks)) - set(said.missing))

    def send_chunks(wire: Wire, take: Take) -> None:
        """As many as `wire` gets to carry. Raises WireBroken, TooDamaged."""
        index = take()
        while index is not None:
            wire.send(stream)
            while index is not None:
                begin, length = index * digests.chunk, length_of(digests, index)
                bare = seal.tags is not None and not deal.is_again(index)
                wire.send_chunk(file, index, begin, length, pace, bare=bare)
                index = take()
            wire.send_end()
            said = wire.receive(Say)
            if said.state != "ok":
                raise WireBroken("the chunks were not taken")
            for damaged in said.damaged:
                deal.ask_again(damaged)
            index = take()

    StreamCrew(line, deal, stream_count(digests, len(deal)), send_chunks).run()
    while True:  # chunks that came back damaged after their stream had ended
        wire.send(end)
        last = wire.receive(Say)
        if last.state not in ("again", "send"):
            return last
        if not deal:  # it lost what it had acknowledged: offering again tells what it has
            raise WireBroken(last.message or "the holder lacks chunks that it took")
        send_chunks(wire, deal.take)


_MOST_BREAKS = 20

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
            self._vault.evict_if_bad(self._state, seal.artifact, Tier.LOCAL)
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


@dataclass(frozen=True)
class Era:
    """While it lasts, what its holders say counts."""

    attempt: int
    holders: tuple[Peer, ...]
    group: ParityGroup | None = None


class HolderLanes(ABC):
    """Thread-safe. `run` keeps a lane for each kind to each holder that the directive names."""

    says, hope = "takes nothing", "Training goes on"
    """What a holder does that takes nothing, as a clause; and the sentence after all of these."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, bucket: TokenBucket
    ) -> None:
        """`bucket`: all that this worker sends to its holders takes from it (`Policy.peer_bandwidth`)."""
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self.bucket = bucket
        self._lock = threading.Lock()
        self._era: Era | None = None
        self._has: dict[Peer, Mapping[int, MemoryStock]] = {}
        """By holder of the era and own rank. None of these mappings is ever changed."""
        self._telling = threading.Lock()
        """Held until a reason is stated: else the older of two could be stated last, and stay."""
        self._reasons: dict[tuple[int, Kind], str] = {}
        """Why a lane of the era brings nothing, by holder and kind."""
        self._begun: set[str] = set()
        """Names of the era's threads."""

    @abstractmethod
    def _era_of(self, directive: Directive) -> Era: ...

    @abstractmethod
    def _bring(self, seal: Seal, line: Line, pace: Portion, holder: Peer, era: Era) -> bool:
        """As `bring` of Lane."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            era = self.follow()
            for name, body in self._threads(era).items() if era is not None else ():
                if name not in self._begun:
                    self._state.threads.loop(name, body)
                    self._begun.add(name)

    def follow(self) -> Era | None:
        """Take over whom the directive names as holders."""
        directive = self._state.directive
        if directive is None:
            return None
        self.bucket.set_rate(directive.policy.peer_bandwidth)
        era, old = self._era_of(directive), self._era
        if era != old:
            with self._telling:
                with self._lock:
                    self._era, self._begun = era, set()
                    self._begin(era, old)
                self._reasons = {}
                if era.holders or (old is not None and old.holders):
                    self._state.problem("PeerUnreachable", "")
        return self._era

    def acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        """Each holder that `directive` names: its worker, and by own rank what it has verified in that
        attempt and has had no reason to free. What was said before the lanes to these holders began counts
        for nothing.
        """
        wanted = self._era_of(directive)
        with self._lock:
            era = self._era
            same = era is not None and (era.attempt, era.group) == (wanted.attempt, wanted.group)
            return [(holder.worker, self._has.get(holder, {}) if same else {}) for holder in wanted.holders]

    def owes(self) -> bool:
        """Whether a holder lacks anything that it should have."""
        with self._lock:
            era = self._era
        return era is not None and any(
            self._due(holder, kind, era) for holder in era.holders for kind in Kind
        )

    def lane(self, holder: Peer, kind: Kind, era: Era) -> Lane:
        """One lane, to be run by one thread."""
        pace = Portion(self.bucket, PORTIONS[kind])
        return Lane(
            self._state,
            self._vault,
            holder,
            due=partial(self._due, holder, kind, era),
            bring=lambda seal, line: self._bring(seal, line, pace, holder, era),
            report=partial(self.report, era, holder, kind),
        )

    def report(self, era: Era, holder: Peer, kind: Kind, reason: str) -> None:
        """States why a lane of the era brings nothing, as one problem; an empty reason: it does."""
        with self._telling:
            if era != self._era:
                return
            self._reasons[holder.worker, kind] = reason
            worst = {worker: why for (worker, _), why in self._reasons.items() if why}
            told = [f"Worker {worker} {self.says}: {why}" for worker, why in sorted(worst.items())]
            self._state.problem("PeerUnreachable", ". ".join([*told, self.hope]) if told else "")

    def _begin(self, era: Era, old: Era | None) -> None:
        """Under the lock: nothing is known of these holders."""
        self._has = {}

    def _threads(self, era: Era) -> dict[str, Callable[[], None]]:
        return {
            f"{kind.value}s-to-worker-{holder.worker}": partial(self._serve, holder, kind, era)
            for holder in era.holders
            for kind in Kind
        }

    def _serve(self, holder: Peer, kind: Kind, era: Era) -> None:
        with Line(partial(self._dial, holder, era)) as line:
            self.lane(holder, kind, era).run(line, partial(self._is_over, era))

    def _dial(self, holder: Peer, era: Era) -> Wire:
        return dial(self._identity, era.attempt, holder, self._port)

    def _is_over(self, era: Era) -> bool:
        return self._state.stopping or self._era is not era

    def _due(self, holder: Peer, kind: Kind, era: Era) -> list[Seal]:
        with self._lock:
            has = self._has.get(holder, {})
        return lacking(self._state, self._vault, kind, era.attempt, has)
