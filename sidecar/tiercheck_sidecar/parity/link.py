"""Links a member to every holder of its parity: what the holder has, and what it lacks.

What the holder has is asked of it all the time, and never remembered against its word. So a holder that
restarted, or gave up a block, is sent again what it needs: only the chunks that are not in its block yet,
over several streams. Deltas have a lane of their own, so that they do not wait behind a snapshot.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from tiercheck.protocol.directive import Directive, ParityGroup, Peer
from tiercheck.protocol.version import Artifact, Kind
from tiercheck_sidecar.digest import length_of
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.exchange.streams import Deal, Line, StreamCrew, Take, TooDamaged, stream_count
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.pacing import Portion, TokenBucket
from tiercheck_sidecar.replicate.lane import (
    PORTIONS,
    Backoff,
    HolderTroubles,
    Lane,
    PushRefused,
    lacking,
    push_on,
)
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.vault.stock import MemoryStock, by_rank

_DAMAGES = 3
"""How often chunks may arrive damaged."""


def push(vault: Vault, seal: Seal, line: Line, pace: Portion | None = None) -> Say:
    """Offer an own artifact on `line` and send what is missing. Returns the
    holder's last
    word: "in", "have", "late", "busy" or "refused". Raises NotHeld, OSError, WireBroken, PeerRefused,
    TooDamaged; then `line` is hung up.
    """
    return push_on(vault, seal, line, lambda file: _push(seal, line, file, pace))


def _push(seal: Seal, line: Line, file: int, pace: Portion | None) -> Say:
    artifact, digests = seal.artifact, seal.digests

    def stream(left: list[int], bare: bool, wire: Wire, take: Take) -> None:
        wire.send(Ask.about("chunks", artifact))
        while (index := take()) is not None:
            wire.send_chunk(file, index, index * digests.chunk, length_of(digests, index), pace, bare=bare)
        wire.send_end()
        said = wire.receive(Say)
        if said.state != "ok":
            raise WireBroken("the chunks were not taken")
        left.append(len(said.missing))

    (wire,) = line.wires(1)
    for damages in range(_DAMAGES + 1):
        wire.send(Ask.about("fold", artifact, world_size=seal.world_size, digests=digests, tags=seal.tags))
        said = wire.receive(Say)
        if said.state != "send":
            return said
        chunks = len(digests.values)
        deal = Deal(chunks, set(range(chunks)) - set(said.missing))
        left: list[int] = []
        body = functools.partial(stream, left, seal.tags is not None and not damages)
        StreamCrew(line, deal, stream_count(digests, len(deal)), body).run()
        if 0 in left:  # the stream that ended last has seen all of them arrive
            return Say("in")
    raise TooDamaged(f"{min(left)} chunks arrived damaged {_DAMAGES} times")


log = logging.getLogger(__name__)


class Link:
    """Of one attempt, until `is_over`."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        holder: Peer,
        attempt: int,
        dial: Callable[[], Wire],
        *,
        bucket: TokenBucket,
        tell: Callable[[Kind, str], None],
        is_over: Callable[[], bool],
    ) -> None:
        """`tell` hears why a lane brings nothing, and with an empty reason that it does."""
        self._state, self._vault, self.holder, self._attempt = state, vault, holder, attempt
        self._dial, self._bucket, self._tell, self._is_over = dial, bucket, tell, is_over
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._complete: frozenset[Artifact] = frozenset()
        self._has: dict[int, MemoryStock] = {}
        self._folded: frozenset[Artifact] = frozenset()
        self._brought: frozenset[Artifact] = frozenset()
        self._late: frozenset[Artifact] = frozenset()

    def start(self) -> None:
        """Begin the threads that are not begun yet. Raises RuntimeError if the system gives none."""
        bodies = {
            "status": self._watch,
            "snapshots": lambda: self._lane(Kind.SNAPSHOT),
            "deltas": lambda: self._lane(Kind.DELTA),
        }
        for name, body in bodies.items():
            if name not in self._begun:
                self._state.threads.loop(f"parity-{self.holder.worker}-{name}", body)
                self._begun.add(name)

    @property
    def complete(self) -> Mapping[int, MemoryStock]:
        """Own artifacts whose blocks are complete at the holder, by its newest word and by rank."""
        return self._has

    @property
    def owes(self) -> bool:
        """Whether the holder lacks anything that it should have."""
        return any(self._due(kind) for kind in Kind)

    # Threads

    def _watch(self) -> None:
        """Keep asking what the holder has."""
        waits: Backoff[None] = Backoff()
        while not self._is_over():
            try:
                with contextlib.closing(self._dial()) as wire:
                    while not self._is_over():
                        wire.send(Ask("status"))
                        said = wire.receive(Say)
                        waits.succeeded(None)
                        self._take(frozenset(said.complete), frozenset(said.folded))
            except (WireBroken, PeerRefused) as error:
                log.debug("status of worker %d: %s", self.holder.worker, error)
                waits.failed(None, time.monotonic())
                self._state.wait_until(self._is_over, max(0.0, waits.until(None) - time.monotonic()))

    def _take(self, complete: frozenset[Artifact], folded: frozenset[Artifact]) -> None:
        with self._lock:
            if (complete, folded) == (self._complete, self._folded):
                return
            self._complete, self._folded, self._has = complete, folded, by_rank(complete)
        self._credit()
        self._state.bump()

    def _credit(self) -> None:
        """Count what was brought and is complete; the two become known in any order."""
        with self._lock:
            done = self._brought & self._complete
            self._brought -= done
        if done:
            self._state.count(replicated=len(done))

    def _lane(self, kind: Kind) -> None:
        pace = Portion(self._bucket, PORTIONS[kind])
        lane = Lane(
            self._state,
            self._vault,
            self.holder,
            due=functools.partial(self._due, kind),
            bring=lambda seal, line: self._bring(seal, line, pace),
            report=functools.partial(self._tell, kind),
        )
        with Line(self._dial) as line:
            lane.run(line, self._is_over)

    def _bring(self, seal: Seal, line: Line, pace: Portion) -> bool:
        """As `Lane` wants it."""
        said = push(self._vault, seal, line, pace)
        if said.state == "busy":
            return False
        if said.state == "refused":
            raise PushRefused(said.message)
        with self._lock:
            if said.state == "late":
                self._late |= {seal.artifact}
            else:
                self._folded |= {seal.artifact}
                self._brought |= {seal.artifact} if said.state == "in" else set()
        self._credit()
        return True

    # Inside

    def _due(self, kind: Kind) -> list[Seal]:
        here = {seal.artifact for seal in self._vault.held()}
        with self._lock:
            self._late &= here
            self._brought &= here
            has, settled = self._has, self._folded | self._late
        found = lacking(self._state, self._vault, kind, self._attempt, has)
        return [seal for seal in found if seal.artifact not in settled]


_HOPE = "Training goes on; its state is protected as soon as that worker answers or is replaced"


class ParitySender:
    """Thread-safe. `run` keeps the links of the current attempt."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, *, bucket: TokenBucket
    ) -> None:
        """`bucket`: what is sent to holders of copies takes from it too."""
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self.bucket = bucket
        self._lock = threading.Lock()
        self._key: tuple[int, ParityGroup | None] = (0, None)
        self._links: tuple[Link, ...] = ()
        self._troubles = HolderTroubles(state, "takes no parity", _HOPE)

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            directive = self._state.directive
            if directive is None:
                continue
            if (directive.attempt, directive.parity) != self._key:
                self._relink(directive)
            for link in self._links:
                link.start()

    def _relink(self, directive: Directive) -> None:
        holders = directive.parity.holders if directive.parity else ()
        key = directive.attempt, directive.parity
        links: tuple[Link, ...] = ()

        def is_over() -> bool:
            return self._state.stopping or self._links is not links

        links = tuple(self._link(holder, key, is_over) for holder in holders)
        with self._lock:
            old, self._links, self._key = self._links, links, key
        if directive.parity or old:
            self._troubles.begin(self._key)

    def acknowledged(self, directive: Directive) -> list[tuple[int, Mapping[int, MemoryStock]]]:
        """Per holder that `directive` names: which worker it is, and by own rank what has its blocks complete
        there. Nothing, as long as there are no links to these holders yet.
        """
        holders = directive.parity.holders if directive.parity else ()
        with self._lock:
            if self._key != (directive.attempt, directive.parity):
                return [(holder.worker, {}) for holder in holders]
            return [(link.holder.worker, link.complete) for link in self._links]

    def owes(self) -> bool:
        """Whether a holder lacks anything that it should have."""
        with self._lock:
            links = self._links
        return any(link.owes for link in links)

    def _link(self, holder: Peer, key: tuple[int, ParityGroup | None], is_over: Callable[[], bool]) -> Link:
        def connect() -> Wire:
            return dial(self._identity, key[0], holder, self._port)

        report = partial(self._troubles.report, key, holder)
        return Link(
            self._state,
            self._vault,
            holder,
            key[0],
            connect,
            bucket=self.bucket,
            tell=report,
            is_over=is_over,
        )
