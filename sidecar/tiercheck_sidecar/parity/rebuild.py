"""Rebuilds a lost artifact from what its parity group holds and from blocks of parity.

Parts are the artifacts that other members still hold, and parity blocks. All workers of the group are asked
what they have, so that a restore plans with what exists and not with what was planned.

The same chunk is requested from all parts at once and folded piece by piece while it is in the cache; only
the result is digested, and only what is verified is written. If the result is wrong, the parts are read again
and digested one by one to identify the bad one, and another block replaces it if there is one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tiercheck.protocol.directive import ParityGroup, Peer, Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Digests, Share, Version
from tiercheck_sidecar import coding
from tiercheck_sidecar.artifact_source import (
    ArtifactSink,
    ArtifactSource,
    BoundedCall,
    OpenArtifact,
    SourceCorrupt,
    SourceFailed,
    SourceGone,
)
from tiercheck_sidecar.digest import CHUNK, digest_chunk, length_of
from tiercheck_sidecar.exchange.fetch import Dial, have_reread, holdings, open_copy
from tiercheck_sidecar.exchange.frames import ListedArtifact, Wire, WireBroken
from tiercheck_sidecar.exchange.streams import STREAMS, ask_ahead, receive_header
from tiercheck_sidecar.vault import Seal

log = logging.getLogger(__name__)

DialPeer = Callable[[Peer], Wire]
"""A function that connects to a worker's sidecar. Raises WireBroken, PeerRefused."""


@dataclass(frozen=True)
class RebuildPart:
    """The location of a part: a member's `artifact`, or the block `share` of its version and kind."""

    peer: Peer
    artifact: Artifact
    share: Share | None = None

    def __str__(self) -> str:
        what = str(self.artifact) if self.share is None else f"parity block {self.share.index}"
        return f"{what} at worker {self.peer.worker}"

    @property
    def _named(self) -> Artifact:
        """Returns the name of the part; a block is named by its first rank."""
        return self.artifact if self.share is None else replace(self.artifact, rank=self.share.ranks[0])

    @contextlib.contextmanager
    def open(self, connect: DialPeer, expected: Digests | None = None) -> Iterator[tuple[Wire, Seal]]:
        """Yields a connection to request its chunks by index, and its seal. Raises SourceFailed.

        That is also raised if it is not what is `expected`."""
        opening = open_copy(self._named, self._dial(connect), share=self.share)
        with contextlib.closing(opening.wire):
            if opening.seal.digests.chunk != CHUNK:
                raise SourceFailed("it has senseless digests")
            if expected is not None and opening.seal.digests != expected:
                raise SourceFailed("it changed while it was being read")
            yield opening.wire, opening.seal

    def report_corrupt(self, connect: DialPeer) -> str:
        """Reports bad chunks to its worker. Returns the fault found on rereading; empty if none."""
        try:
            said = have_reread(self._named, self._dial(connect), self.share)
        except SourceFailed as error:
            return f"its chunks do not match their digests, and then {error}"
        return "" if said.state == "ok" else said.message or "its chunks do not match their digests"

    def _dial(self, connect: DialPeer) -> Dial:
        return Dial(self.peer.worker, partial(connect, self.peer))


FRAGMENT = 512 * 1024
"""Bytes of each part that are combined at a time; for a few parts, they fit into a core's cache."""
_CHUNKS_PER_STREAM = 2

Parts = Mapping[RebuildPart, tuple[int, Seal]]


class PartFailed(Exception):
    """A part is unreadable, or does not match its digests (`corrupt`), or these are wrong (`certain`)."""

    def __init__(
        self, part: RebuildPart, reason: str, *, corrupt: bool = False, certain: bool = False
    ) -> None:
        super().__init__(reason)
        self.part, self.corrupt, self.certain = part, corrupt, certain


@dataclass(frozen=True)
class _PartStream:
    """Receives the chunks of one part. Every method raises PartFailed."""

    part: RebuildPart
    wire: Wire
    digests: Digests
    buffer: memoryview

    def length(self, index: int) -> int:
        """Returns the bytes of chunk `index`; 0 past the end."""
        return max(0, length_of(self.digests, index))

    def ask(self, index: int) -> None:
        if self.length(index):
            with _as_part_failure(self.part):
                self.wire.send_index(index)

    def begin(self, index: int) -> None:
        if self.length(index):
            with _as_part_failure(self.part):
                receive_header(self.wire, self.digests, index)

    def fill(self, index: int, begin: int) -> int:
        """Receives the fragment at `begin`; returns its size in bytes."""
        size = max(0, min(FRAGMENT, self.length(index) - begin))
        if size:
            with _as_part_failure(self.part):
                self.wire.receive_into(self.buffer[:size])
        return size


@contextlib.contextmanager
def _as_part_failure(part: RebuildPart) -> Iterator[None]:
    try:
        yield
    except (WireBroken, SourceFailed) as error:
        raise PartFailed(part, str(error)) from error


_STRIKES = 2
"""The number of failures after which a part is given up."""


class Rebuild:
    """Rebuilds one artifact, coded with those of `ranks`.

    The constructor asks all parts what they have. Raises SourceFailed if these are not enough. `bad`: the
    parts that proved to be bad, also if others replaced them. They are reported to their workers, which free
    them, unless the caller disables that.
    """

    def __init__(
        self,
        artifact: Artifact,
        ranks: Sequence[int],
        group: ParityGroup,
        dial: DialPeer,
        *,
        report_bad: bool,
    ) -> None:
        self.artifact, self._dial, self._report_bad = artifact, dial, report_bad
        self._me = ranks.index(artifact.rank)
        self._data = len(ranks)
        self._members = {
            position: RebuildPart(peer, Artifact(rank, artifact.version, artifact.kind))
            for position, (peer, rank) in enumerate(zip(group.members, ranks, strict=True))
            if position != self._me and peer.host
        }
        self._blocks = {
            index: RebuildPart(peer, artifact, Share(index, tuple(ranks)))
            for index, peer in enumerate(group.holders)
            if peer.host
        }
        self._found: dict[RebuildPart, Seal] = {}
        self._failures: list[str] = []
        self._strikes: Counter[RebuildPart] = Counter()
        self.bad: list[Quarantined] = []
        self._lock = threading.Lock()
        block = self._search()
        rank, version, digests = artifact.rank, artifact.version, block.members[self._me]
        self.seal = Seal(rank, version, block.world_size, Tier.LOCAL, digests, artifact.kind)
        self._recipe()  # fails before anything is allocated

    def unfold(self, chunks: Sequence[int], sink: ArtifactSink) -> None:
        """Writes these chunks, verified. Finished chunks stay finished whatever parts fail.

        Raises SourceGone (SourceCorrupt if bad parts are the reason), OSError."""
        self._sink, self._missing = sink, set(chunks)
        while self._missing:
            parts = self._recipe()
            self._waiting, self._stopped = deque(sorted(self._missing)), False
            count = max(1, min(STREAMS, len(self._missing) // _CHUNKS_PER_STREAM))
            try:
                with ThreadPoolExecutor(count, thread_name_prefix="stream") as pool:
                    streams = [pool.submit(self._stream, parts, extra=n > 0) for n in range(count)]
                for each in streams:
                    each.result()
            except PartFailed as failed:
                self._give_up(failed)

    def _stream(self, parts: Parts, extra: bool = False) -> None:
        """Rebuilds waiting chunks. An `extra` stream may fail to open: the rebuild is only slower then."""
        try:
            with contextlib.ExitStack() as stack:
                try:
                    inflows = [self._inflow(part, seal, stack) for part, (_, seal) in parts.items()]
                except PartFailed:
                    if extra:
                        return
                    raise
                self._chunks(parts, inflows)
        except BaseException:
            self._stopped = True
            raise

    def _inflow(self, part: RebuildPart, seal: Seal, stack: contextlib.ExitStack) -> _PartStream:
        """Returns a part that is open until `stack` is closed. Raises PartFailed."""
        with _as_part_failure(part):
            wire, _ = stack.enter_context(part.open(self._dial, seal.digests))
        return _PartStream(part, wire, seal.digests, memoryview(bytearray(FRAGMENT)))

    def _chunks(self, parts: Parts, inflows: Sequence[_PartStream]) -> None:
        digests = self.seal.digests
        chunk = memoryview(bytearray(length_of(digests, 0)))
        weights, buffers = [weight for weight, _ in parts.values()], [each.buffer for each in inflows]
        adder = coding.Adder(chunk, weights, buffers)

        def ask(index: int) -> None:
            for each in inflows:
                each.ask(index)

        for index in ask_ahead(self._take, ask, deque()):
            target = chunk[: length_of(digests, index)]
            for each in inflows:
                each.begin(index)
            for begin in range(0, max(each.length(index) for each in inflows), FRAGMENT):
                filled = [each.fill(index, begin) for each in inflows]
                if begin < len(target):  # the parts' chunks may have more
                    adder.add(begin, min(FRAGMENT, len(target) - begin), filled)
            if digest_chunk(target) != digests.values[index]:
                self._examine(index, parts, target)
            self._sink.put(digests, index, target)
            with self._lock:
                self._missing.discard(index)

    def _take(self) -> int | None:
        with self._lock:
            return None if self._stopped or not self._waiting else self._waiting.popleft()

    def _examine(self, index: int, parts: Parts, target: memoryview) -> None:
        """Rereads every part of a wrong result. Raises PartFailed, or corrects `target` if none is bad."""
        weights, pieces = [], []
        for part, (weight, seal) in parts.items():
            if index >= len(seal.digests.values):
                continue
            with contextlib.ExitStack() as stack:
                inflow = self._inflow(part, seal, stack)
                chunk = memoryview(bytearray(inflow.length(index)))
                inflow.ask(index)
                inflow.begin(index)
                with _as_part_failure(part):
                    inflow.wire.receive_into(chunk)
            if digest_chunk(chunk) != seal.digests.values[index]:
                raise PartFailed(part, f"chunk {index} does not match its digest", corrupt=True)
            weights.append(weight)
            pieces.append(chunk)
        coding.combine(target, weights, pieces)
        if digest_chunk(target) != self.seal.digests.values[index]:
            blocks = [part for part in parts if part.share is not None]
            reason = f"chunk {index} matches its digest, and does not fit to the members'"
            raise PartFailed(blocks[0], reason, certain=len(blocks) == 1)

    def _search(self) -> Seal:
        """Asks all parts in parallel what they have. Returns the seal of a block. Raises SourceFailed."""
        parts = (*self._blocks.values(), *self._members.values())
        with ThreadPoolExecutor(max(1, len(parts)), thread_name_prefix="rebuild") as pool:
            for part, found in zip(parts, pool.map(self._ask, parts), strict=True):
                if found is not None:
                    self._found[part] = found
        blocks = [self._found[part] for part in self._blocks.values() if part in self._found]
        truth = next((each for each in blocks if len(each.members) == self._data), None)
        if truth is None:
            raise SourceGone("no parity block of it is left: " + "; ".join(self._failures))
        for position, part in self._members.items():
            if part in self._found and self._found[part].digests != truth.members[position]:
                self._drop(part, "it is not what the parity was made from")
        for part in self._blocks.values():
            if part in self._found and self._found[part].members != truth.members:
                self._drop(part, "it was made from other bytes")
        return truth

    def _ask(self, part: RebuildPart) -> Seal | None:
        try:
            with part.open(self._dial) as (_, found):
                return found
        except SourceFailed as error:
            self._failures.append(f"{part}: {error}")
            return None

    def _recipe(self) -> dict[RebuildPart, tuple[int, Seal]]:
        """Returns the parts to read, with their weights and seals. Raises SourceFailed."""
        lost = set(range(self._data)) - {
            place for place, part in self._members.items() if part in self._found
        }
        left = [index for index, part in self._blocks.items() if part in self._found]
        try:
            recipe = coding.recipe(self._data, self._me, lost, left)
        except (coding.NotRecoverable, coding.LibraryMissing) as error:
            kind = SourceCorrupt if self.bad else SourceGone
            raise kind("; ".join((str(error), *self._failures)), self.bad) from error
        weights = {self._members[position]: weight for position, weight in recipe.members.items()}
        weights |= {self._blocks[index]: weight for index, weight in recipe.blocks.items()}
        return {part: (weight, self._found[part]) for part, weight in weights.items() if weight}

    def _give_up(self, failed: PartFailed) -> None:
        part = failed.part
        if failed.corrupt or failed.certain:
            reason = (
                part.report_corrupt(self._dial) if self._report_bad and not failed.certain else str(failed)
            )
            if reason:
                rank = part.share.ranks[0] if part.share else part.artifact.rank
                version, kind = part.artifact.version, part.artifact.kind
                self.bad.append(Quarantined(rank, version, part.peer.worker, reason, kind))
                self._drop(part, reason)
                return
        self._strikes[part] += 1
        if self._strikes[part] >= _STRIKES:
            self._drop(part, str(failed))

    def _drop(self, part: RebuildPart, reason: str) -> None:
        log.warning("rebuild of %s goes on without %s: %s", self.artifact, part, reason)
        self._failures.append(f"{part}: {reason}")
        self._found.pop(part, None)


_PARALLEL = 16


class ParitySource(ArtifactSource):
    """A source of artifacts that a parity group can rebuild for its members."""

    def __init__(
        self, group: ParityGroup, procs_per_worker: int, connect: DialPeer, *, report_bad: bool = True
    ) -> None:
        """Bad parts are reported to their workers, which free them, unless the caller disables that."""
        self._group, self._procs, self._connect = group, procs_per_worker, connect
        self._report_bad = report_bad
        self._last: Rebuild | None = None

    def list(self, rank: int, version: Version, call: BoundedCall) -> dict[Artifact, int]:
        """Returns the size of each artifact of which at least as many parts exist as the group has ranks.

        Raises SourceFailed if no block of the rank is found and a worker failed to answer."""
        group, ranks = self._group, self._group.coded_with(rank, self._procs)
        blocks = [(peer, -1, Share(index, ranks)) for index, peer in enumerate(group.holders)]
        members = [(peer, of, None) for peer, of in zip(group.members, ranks, strict=True) if of != rank]

        def ask(peer: Peer, of: int, share: Share | None) -> tuple[ListedArtifact, ...] | str:
            try:
                return holdings(Dial(peer.worker, lambda: call.own(self._connect(peer))), of, share)
            except SourceFailed as error:
                return f"worker {peer.worker}: {error}"

        questions = [*blocks, *members]
        with ThreadPoolExecutor(min(_PARALLEL, len(questions)), thread_name_prefix="obtainable") as pool:
            answers = [*pool.map(lambda question: ask(*question), questions)]
        failures = [answer for answer in answers if isinstance(answer, str)]
        parts: Counter[Artifact] = Counter()
        sizes: dict[Artifact, int] = {}
        for (_, _, share), listed in zip(questions, answers, strict=True):
            if isinstance(listed, str):
                continue
            if share is not None:
                found = {each.artifact: each.bytes for each in listed if each.artifact.rank == rank}
                sizes |= found
                parts.update(found.keys())
            else:  # of a member: it helps to rebuild this rank's artifact of the same version
                parts.update({replace(each.artifact, rank=rank) for each in listed})
        if not sizes and failures:
            raise SourceFailed("; ".join(failures))
        return {artifact: size for artifact, size in sizes.items() if parts[artifact] >= len(ranks)}

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        found, self._last = self._last, None
        if found is None or found.artifact != artifact:
            ranks = self._group.coded_with(artifact.rank, self._procs)
            found = Rebuild(
                artifact,
                ranks,
                self._group,
                lambda peer: call.own(self._connect(peer)),
                report_bad=self._report_bad,
            )
        yield OpenArtifact(found.seal, found.unfold, found.bad)
        self._last = found  # nothing failed: the next call need not ask all parts again
