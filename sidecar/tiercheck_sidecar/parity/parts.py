"""Finds the parts that a lost artifact is put together from, and adds them up, chunk by chunk.

Parts are what other members still hold, and parity blocks. Everybody in the group is asked what there is, so
that a restore plans with that and not with what was meant to be.

Chunks of every part are added up, verified, then written: a write costs less than touching a fresh mapping
page by page, and the slot never holds a byte that was not checked. Arriving chunks wait in few buffers, and
the last one used comes first, because it is in the cache.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tiercheck.protocol.directive import ParityGroup, Peer
from tiercheck.protocol.version import Artifact, Digests, Share
from tiercheck_sidecar import coding
from tiercheck_sidecar.bounded_calls import SourceFailed
from tiercheck_sidecar.digest import CHUNK, digest_chunk, is_well_formed, length_of
from tiercheck_sidecar.exchange.frames import Ask, ListedArtifact, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import PeerRefused
from tiercheck_sidecar.exchange.streams import run_all

DialPeer = Callable[[Peer], Wire]
"""A proven connection to a worker's sidecar. Raises WireBroken, PeerRefused."""


class PartMissing(Exception):
    """The worker has no such part, or one of other bytes; the message is a sentence."""


@dataclass(frozen=True)
class RebuildPart:
    """Where one part lies. `artifact` is a member's, or names the version and kind of the block `share`."""

    peer: Peer
    artifact: Artifact
    share: Share | None = None

    def __str__(self) -> str:
        what = str(self.artifact) if self.share is None else f"parity block {self.share.index}"
        return f"{what} at worker {self.peer.worker}"

    @property
    def _named(self) -> Artifact:
        """A block is named by its first rank."""
        return self.artifact if self.share is None else replace(self.artifact, rank=self.share.ranks[0])

    def ask(self, wire: Wire) -> DescribedPart:
        """Begin to read it on `wire`; then chunks can be asked for by index. Raises PartMissing,
        WireBroken.
        """
        wire.send(Ask.about("read", self._named, share=self.share))
        said = wire.receive(Say)
        digests = said.digests
        if said.state != "found" or digests is None:
            raise PartMissing(f"{self}: {said.message or 'it is not there'}")
        if not is_well_formed(digests) or digests.chunk != CHUNK:
            raise PartMissing(f"{self}: it has senseless digests")
        return DescribedPart(digests, said.world_size, said.members)

    def find(self, dial: DialPeer) -> DescribedPart:
        """Raises PartMissing, also if its worker cannot be reached."""
        try:
            with contextlib.closing(dial(self.peer)) as wire:
                return self.ask(wire)
        except (WireBroken, PeerRefused) as error:
            raise PartMissing(f"{self}: {error}") from error

    def accuse(self, dial: DialPeer) -> str:
        """Tell its worker that its chunks do not match their digests. What it finds when it reads again;
        empty if all is well."""
        try:
            with contextlib.closing(dial(self.peer)) as wire:
                wire.send(Ask.about("corrupt", self._named, share=self.share))
                said = wire.receive(Say)
        except (WireBroken, PeerRefused) as error:
            return f"its chunks do not match their digests, and then {error}"
        return "" if said.state == "ok" else said.message or "its chunks do not match their digests"


@dataclass(frozen=True)
class DescribedPart:
    """What a worker says about its part. `members`: of a block, the digests of each member's artifact."""

    digests: Digests
    world_size: int
    members: tuple[Digests, ...] = ()

    def length(self, index: int) -> int:
        """Bytes of chunk `index`; 0 past the end."""
        return max(0, min(CHUNK, self.digests.size - index * CHUNK))


@contextlib.contextmanager
def open_part(part: RebuildPart, dial: DialPeer, expected: Digests) -> Iterator[Wire]:
    """A connection on which chunks can be asked for. Raises PartMissing, WireBroken, PeerRefused."""
    with contextlib.closing(dial(part.peer)) as wire:
        if part.ask(wire).digests != expected:
            raise PartMissing(f"{part}: it changed while it was being read")
        yield wire


_PARALLEL = 16


def obtainable(
    group: ParityGroup, rank: int, procs_per_worker: int, connect: Callable[[Peer], Wire]
) -> dict[Artifact, int]:
    """Artifacts of `rank`, with bytes, of which there are as many blocks as the group lacks artifacts of its
    members.

    Raises SourceFailed if nobody who could know answers.
    """
    ranks = group.coded_with(rank, procs_per_worker)
    questions = [(peer, Ask("list", share=Share(index, ranks))) for index, peer in enumerate(group.holders)]
    questions += [
        (peer, Ask("list", other)) for peer, other in zip(group.members, ranks, strict=True) if other != rank
    ]
    failures: list[str] = []
    parts: Counter[Artifact] = Counter()
    sizes: dict[Artifact, int] = {}
    with ThreadPoolExecutor(min(_PARALLEL, len(questions)), thread_name_prefix="obtainable") as pool:
        answers = [pool.submit(_listed, connect, peer, ask) for peer, ask in questions]
        for number, answer in enumerate(answers):
            try:
                listed = answer.result()
            except SourceFailed as error:
                failures.append(str(error))
                continue
            if number < len(group.holders):
                found = {each.artifact: each.bytes for each in listed if each.artifact.rank == rank}
                sizes |= found
                parts.update(found.keys())
            else:  # of a member: it helps to rebuild this rank's artifact of the same version
                parts.update({replace(each.artifact, rank=rank) for each in listed})
    if not sizes and failures:
        raise SourceFailed("; ".join(failures))
    return {artifact: size for artifact, size in sizes.items() if parts[artifact] >= len(ranks)}


def _listed(connect: Callable[[Peer], Wire], peer: Peer, ask: Ask) -> tuple[ListedArtifact, ...]:
    try:
        with contextlib.closing(connect(peer)) as wire:
            wire.send(ask)
            return wire.receive(Say).listed
    except (WireBroken, PeerRefused) as error:
        raise SourceFailed(f"worker {peer.worker}: {error}") from error


class Scratch:
    """At most `count` buffers of one chunk, made when first needed. Who finds none waits, and TCP holds back
    the sender."""

    def __init__(self, count: int = 8) -> None:
        self._room = threading.BoundedSemaphore(count)
        self._free: list[memoryview] = []

    @contextlib.contextmanager
    def buffer(self) -> Iterator[memoryview]:
        with self._room:
            try:
                view = self._free.pop()
            except IndexError:
                view = memoryview(bytearray(CHUNK))
            try:
                yield view
            finally:
                self._free.append(view)


FRAGMENT = 512 * 1024
"""Bytes of each part that are added up at a time: of a few parts, they fit into a core's cache."""
_AHEAD = 2
"""Chunks asked for before the previous one has arrived, so that no line is ever idle."""
_CHUNKS_PER_STREAM = 2

Parts = Mapping[RebuildPart, tuple[int, DescribedPart]]
"""What is read, with its weight."""


class PartFailed(Exception):
    """A part could not be read, or gave bytes that do not match its digests (`corrupt`), or has digests of
    wrong bytes (`certain`)."""

    def __init__(
        self, part: RebuildPart, reason: str, *, corrupt: bool = False, certain: bool = False
    ) -> None:
        super().__init__(reason)
        self.part, self.corrupt, self.certain = part, corrupt, certain


class Unfolding:
    """These chunks of one artifact, written to their places in an open file. What is finished stays finished
    whatever parts fail."""

    def __init__(self, file: int, digests: Digests, chunks: Iterable[int], dial: DialPeer) -> None:
        self._file, self._digests, self._dial = file, digests, dial
        self._lock = threading.Lock()
        self._missing = set(chunks)
        self._waiting: deque[int] = deque()
        self._stopped = False

    @property
    def done(self) -> bool:
        return not self._missing

    def go_on(self, parts: Parts, streams: int) -> None:
        """Do what is missing. Raises PartFailed, the first one; the rest can be tried again without that
        part."""
        self._waiting, self._stopped = deque(sorted(self._missing)), False
        count = max(1, min(streams, len(self._missing) // _CHUNKS_PER_STREAM))
        run_all([*[lambda: self._stream(parts, extra=True)] * (count - 1), lambda: self._stream(parts)])

    def _stream(self, parts: Parts, extra: bool = False) -> None:
        """`extra`: without it, the rebuild is only slower."""
        try:
            with contextlib.ExitStack() as stack:
                wires: dict[RebuildPart, Wire] = {}
                try:
                    for part, (_, found) in parts.items():
                        with _blaming(part):
                            wires[part] = stack.enter_context(open_part(part, self._dial, found.digests))
                except PartFailed:
                    if extra:
                        return
                    raise
                self._chunks(parts, wires)
        except BaseException:
            self._stopped = True
            raise

    def _chunks(self, parts: Parts, wires: Mapping[RebuildPart, Wire]) -> None:
        buffers = [memoryview(bytearray(FRAGMENT)) for _ in parts]
        chunk = memoryview(bytearray(length_of(self._digests, 0)))
        adder = coding.Adder(chunk, [weight for weight, _ in parts.values()], buffers)
        asked: deque[int] = deque()
        while True:
            while len(asked) < _AHEAD and (index := self._take()) is not None:
                self._ask(index, parts, wires)
                asked.append(index)
            if not asked:
                return
            index = asked.popleft()
            inflows = [
                _Inflow(part, wires[part], found.length(index), buffer)
                for (part, (_, found)), buffer in zip(parts.items(), buffers, strict=True)
            ]
            target = chunk[: length_of(self._digests, index)]
            _receive(index, inflows, adder, len(target))
            if digest_chunk(target) != self._digests.values[index]:
                self._examine(index, parts, target)
            _write_all(self._file, target, index * self._digests.chunk)
            with self._lock:
                self._missing.discard(index)

    def _take(self) -> int | None:
        with self._lock:
            return None if self._stopped or not self._waiting else self._waiting.popleft()

    def _ask(self, index: int, parts: Parts, wires: Mapping[RebuildPart, Wire]) -> None:
        for part, (_, found) in parts.items():
            if found.length(index):
                with _blaming(part):
                    wires[part].send_index(index)

    def _examine(self, index: int, parts: Parts, target: memoryview) -> None:
        """The sum is wrong: read every part again and find out why. Raises PartFailed; if it was the line,
        `target` is right now."""
        weights, pieces = [], []
        for part, (weight, found) in parts.items():
            length = found.length(index)
            if not length:
                continue
            with _blaming(part), open_part(part, self._dial, found.digests) as wire:
                wire.send_index(index)
                if wire.receive_chunk_header() != (index, length):
                    raise WireBroken("it sent a chunk that was not asked for")
                chunk = memoryview(bytearray(length))
                wire.receive_into(chunk)
            if digest_chunk(chunk) != found.digests.values[index]:
                raise PartFailed(part, f"chunk {index} does not match its digest", corrupt=True)
            weights.append(weight)
            pieces.append(chunk)
        coding.combine(target, weights, pieces)
        if digest_chunk(target) != self._digests.values[index]:
            blocks = [part for part in parts if part.share is not None]
            reason = f"chunk {index} matches its digest, and does not fit to the members'"
            raise PartFailed(blocks[0], reason, certain=len(blocks) == 1)


@dataclass(frozen=True)
class _Inflow:
    """One chunk of one part, as it streams in."""

    part: RebuildPart
    wire: Wire
    length: int
    buffer: memoryview

    def begin(self, index: int) -> None:
        """Raises PartFailed."""
        if self.length:
            with _blaming(self.part):
                if self.wire.receive_chunk_header() != (index, self.length):
                    raise WireBroken("it sent a chunk that was not asked for")

    def fill(self, begin: int) -> int:
        """Receive the fragment that begins there; returns its bytes. Raises PartFailed."""
        size = max(0, min(FRAGMENT, self.length - begin))
        if size:
            with _blaming(self.part):
                self.wire.receive_into(self.buffer[:size])
        return size


def _receive(index: int, inflows: list[_Inflow], adder: coding.Adder, size: int) -> None:
    """Add up chunk `index`, which has `size` bytes; the parts' may have more."""
    for each in inflows:
        each.begin(index)
    for begin in range(0, max(each.length for each in inflows), FRAGMENT):
        filled = [each.fill(begin) for each in inflows]
        if begin < size:
            adder.add(begin, min(FRAGMENT, size - begin), filled)


@contextlib.contextmanager
def _blaming(part: RebuildPart) -> Iterator[None]:
    """Whatever goes wrong is this part's. Raises PartFailed."""
    try:
        yield
    except (WireBroken, PeerRefused, PartMissing) as error:
        raise PartFailed(part, str(error)) from error


def _write_all(file: int, view: memoryview, offset: int) -> None:
    """Write `view` at `offset`. Raises OSError."""
    while view:
        written = os.pwrite(file, view, offset)
        offset += written
        view = view[written:]
