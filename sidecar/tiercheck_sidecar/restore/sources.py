"""Gives the places that a restore fetches from two verbs: list a rank's artifacts, and bring one.

Peers are asked for what they hold, everybody in a parity group for what could be rebuilt of it. The remote
tier has the snapshots of complete versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tiercheck.protocol.directive import RESTORE_STALL, ParityGroup, Peer, Source, Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Version
from tiercheck.supervised import describe
from tiercheck_sidecar.bounded_calls import BoundedCall, BoundedCalls, SourceFailed, Stalled
from tiercheck_sidecar.exchange.fetch import Dial, FetchFailed, fetch, holdings
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Identity, PeerRefused, dial
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.offload import RemoteSource
from tiercheck_sidecar.parity.parts import obtainable
from tiercheck_sidecar.parity.rebuild import rebuild
from tiercheck_sidecar.restore.resharded_reads import FOLDER, Lender
from tiercheck_sidecar.restore.restore_plan import SourceOffer
from tiercheck_sidecar.vault import Vault

log = logging.getLogger(__name__)

T = TypeVar("T")

SOURCE_STALLED = "SourceStalled"
"""Reason of the problem that a source of restores hangs."""


@dataclass(frozen=True)
class Brought:
    """An artifact that is here now."""

    source: Source
    """The place that gave it; of several peers, the one named first that brought a part."""
    bad: tuple[Quarantined, ...] = ()
    """Copies that proved bad on the way."""


class TriedInVain(SourceFailed):
    """With what was learned about bad copies."""

    def __init__(self, reasons: Sequence[str], bad: tuple[Quarantined, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons, self.bad = tuple(reasons), bad


class RestoreSources:
    """Thread-safe."""

    def __init__(
        self, state: SidecarState, vault: Vault, identity: Identity, port: int, remote: RemoteSource
    ) -> None:
        self._state, self._vault, self._identity, self._port = state, vault, identity, port
        self.remote = remote
        self._calls = BoundedCalls(self._patience, self._left_behind)

    def ask(
        self, rank: int, version: Version, sources: Sequence[Source]
    ) -> tuple[list[SourceOffer], list[str]]:
        """What each source has of `rank`, in their order; and a sentence for each that did not answer."""
        places, failures = [], []
        with ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="list") as pool:
            answers = [
                pool.submit(self._bounded, name_of(source), partial(self._list, rank, version, source), rank)
                for source in sources
            ]
            for source, answer in zip(sources, answers, strict=True):
                try:
                    places.append(SourceOffer(source, answer.result()))
                except SourceFailed as error:
                    failures.append(f"{name_of(source)}: {error}")
                except Exception as error:  # of this source: the others are asked all the same
                    log.exception("%s cannot be asked", name_of(source))
                    failures.append(f"{name_of(source)}: {describe(error)}")
        return places, failures

    def bring(self, artifact: Artifact, sources: Sequence[Source]) -> Brought:
        """Fetch from `sources`: either peers, all at once, or one of another kind.

        Raises SourceFailed (TriedInVain, if there may be bad copies to report), NoFreeSlot, NotASlot,
        OSError.
        """
        place = ", ".join(map(name_of, sources))
        try:
            return self._bounded(place, lambda call: self._bring(artifact, sources, call), artifact.rank)
        except Stalled:
            self._vault.discard(artifact)
            raise

    def _bring(self, artifact: Artifact, sources: Sequence[Source], call: BoundedCall) -> Brought:
        source = sources[0]
        if source.tier is Tier.REMOTE:
            self.remote.fetch(artifact.rank, artifact.version, call.arrived)
            return Brought(source)
        if source.parity is not None:
            return self._rebuilt(artifact, source, source.parity, call)
        peers = [each.peer for each in sources if each.peer is not None]
        try:
            done = fetch(self._vault, artifact, [self._dial(peer, call) for peer in peers])
        except FetchFailed as error:
            bad = tuple(_bad(artifact, each.worker, each.reason) for each in error.bad)
            raise TriedInVain(error.reasons, bad) from error
        bad = tuple(_bad(artifact, each.worker, each.reason) for each in done.bad)
        spoiled = {each.worker for each in bad}
        givers = [each for each in sources if each.peer and each.peer.worker in set(done.workers) - spoiled]
        return Brought(givers[0] if givers else source, bad)

    def lender(self) -> Lender:
        """For a rank that comes back on another mesh. To be closed."""
        return Lender(
            self._vault, self._state.config.vault_dir / FOLDER, self.connect, self.remote, self._bounded
        )

    def _rebuilt(self, artifact: Artifact, source: Source, group: ParityGroup, call: BoundedCall) -> Brought:
        bad: list[Quarantined] = []
        try:
            rebuild(self._vault, artifact, group, lambda peer: call.own(self.connect(peer)), bad.append)
        except SourceFailed as error:
            raise TriedInVain((str(error),), tuple(bad)) from error
        return Brought(source, tuple(bad))

    def _list(self, rank: int, version: Version, source: Source, call: BoundedCall) -> dict[Artifact, int]:
        if source.tier is Tier.REMOTE:
            return self.remote.listed(rank, version)
        if source.parity is not None:
            group = source.parity
            return obtainable(group, rank, len(self._vault.ranks), lambda peer: call.own(self.connect(peer)))
        if source.peer is None:
            raise SourceFailed("the source names no worker")
        try:
            return {each.artifact: each.bytes for each in holdings(self._dial(source.peer, call), rank)}
        except (WireBroken, PeerRefused, OSError) as error:
            raise SourceFailed(str(error)) from error

    def _dial(self, peer: Peer, call: BoundedCall) -> Dial:
        return Dial(peer.worker, lambda: call.own(self.connect(peer)))

    def _bounded(self, place: str, body: Callable[[BoundedCall], T], rank: int) -> T:
        """What `body` brings for `rank` from `place`, as long as something comes. Raises what it raises,
        Stalled."""
        meter = self._state.meter
        with meter.waiting(place):
            try:
                return self._calls.make(place, body, lambda count: meter.arrived(rank, count))
            except Stalled as error:
                log.warning("%s: %s", place, error)
                meter.given_up(place)
                raise

    def _patience(self) -> float:
        directive = self._state.directive
        return directive.policy.restore_stall if directive is not None else RESTORE_STALL

    def _left_behind(self, left: Mapping[str, int]) -> None:
        """It is told for as long as it hangs: a restore in need would have to do without."""
        named = ", ".join(sorted(left))
        advice = (
            "Restores go on without it. Look at the mount, the store and the network of this worker's node."
        )
        self._state.problem(
            SOURCE_STALLED, f"{named} hangs: what was asked of it has not come back. {advice}" if left else ""
        )

    def connect(self, peer: Peer) -> Wire:
        """A proven connection to a worker's sidecar. Raises WireBroken, PeerRefused."""
        return dial(self._identity, self._state.attempt, peer, self._port)


def name_of(source: Source) -> str:
    """How sentences call it."""
    if source.peer is not None:
        return f"worker {source.peer.worker}"
    return "parity" if source.parity is not None else f"the {source.tier.value} tier"


def _bad(artifact: Artifact, worker: int, reason: str) -> Quarantined:
    return Quarantined(artifact.rank, artifact.version, worker, reason, artifact.kind)
