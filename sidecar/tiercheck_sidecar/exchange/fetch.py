"""Pulls an artifact from the memory of several holders at once into a slot, verifying each chunk.

All holders of an artifact have the same digests, so any of them can bring any chunk. One that breaks off or
brings damaged chunks drops out, and the others go on; what has arrived verified is never asked for again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.exchange.collection import ChunkCollection
from tiercheck_sidecar.exchange.frames import Ask, ListedArtifact, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.sources import BadCopy, Dial, Opening, Senseless, open_copy
from tiercheck_sidecar.vault import Seal, Vault

_GRACE = 0.3
"""Seconds that the first source to answer waits for the others."""


@dataclass(frozen=True)
class Fetched:
    seal: Seal
    workers: tuple[int, ...]
    """Who brought chunks of it."""
    bad: tuple[BadCopy, ...] = ()
    """Whose copies proved bad on the way."""


class FetchFailed(Exception):
    """No source could give the whole artifact; the message is a sentence for each."""

    def __init__(self, reasons: Sequence[str], bad: Sequence[BadCopy] = ()) -> None:
        super().__init__("; ".join(reasons) or "no source is known")
        self.reasons, self.bad = tuple(reasons), tuple(bad)


def holdings(dial: Dial, rank: int) -> tuple[ListedArtifact, ...]:
    """The whole artifacts of `rank` that a peer holds. Raises WireBroken, PeerRefused."""
    with contextlib.closing(dial.connect()) as wire:
        return list_held(wire, rank)


def list_held(wire: Wire, rank: int) -> tuple[ListedArtifact, ...]:
    """As `holdings`, on a connection that is there already. Raises WireBroken."""
    wire.send(Ask("list", rank))
    return wire.receive(Say).listed


def fetch(vault: Vault, artifact: Artifact, sources: Sequence[Dial], tier: Tier = Tier.LOCAL) -> Fetched:
    """Copy and seal `artifact`. Raises FetchFailed, NoFreeSlot, NotASlot, OSError; then no slot is taken."""
    reasons: list[str] = []
    bad: list[BadCopy] = []
    with contextlib.ExitStack() as stack:
        groups: dict[Seal, list[Opening]] = {}
        for opening in _open_all(artifact, sources, tier, reasons, bad):
            stack.callback(opening.wire.close)
            groups.setdefault(opening.seal, []).append(opening)
        for seal in sorted(
            groups, key=lambda each: -len(groups[each])
        ):  # most holders first; they should all agree
            collection = ChunkCollection(vault, seal, groups[seal])
            done = collection.run()
            reasons.extend(collection.reasons)
            bad.extend(collection.bad)
            if done:
                return Fetched(seal, collection.workers, tuple(bad))
    raise FetchFailed(reasons, bad)


def _open_all(
    artifact: Artifact, sources: Sequence[Dial], tier: Tier, reasons: list[str], bad: list[BadCopy]
) -> list[Opening]:
    """Those that have it; of the others, `reasons` and `bad` copies. One that does not answer is not waited
    for once another has."""
    pool = ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="fetch")
    futures = {pool.submit(open_copy, artifact, dial, tier, bare=True): dial.worker for dial in sources}
    pool.shutdown(wait=False)
    found: list[Opening] = []
    waiting: set[Future[Opening]] = set(futures)
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = wait(waiting, left, FIRST_COMPLETED)
        if not done:
            break
        for future in done:
            try:
                found.append(future.result())
            except Senseless as error:
                bad.append(BadCopy(futures[future], str(error)))
                reasons.append(str(error))
            except (WireBroken, PeerRefused, OSError) as error:
                reasons.append(f"worker {futures[future]}: {error}")
        if found and deadline is None:
            deadline = time.monotonic() + _GRACE
    for future in waiting:
        reasons.append(f"worker {futures[future]}: it did not answer in time")
        future.add_done_callback(_hang_up)
    return found


def _hang_up(future: Future[Opening]) -> None:
    if future.exception() is None:
        future.result().wire.close()
