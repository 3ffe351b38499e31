"""Sends and receives on an exchange connection: JSON messages with a length, and chunks.

Once the two ends are authenticated, everything carries a tag (`channel`). Chunks that were tagged when their
artifact was sealed (`tags`) are sent bare: only their header is tagged here, and the kernel takes their bytes
from the slot. Others pass through a small buffer that stays in the cache. Received chunks are written
directly to their destination.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tiercheck.failpoints import failpoint
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.version import Artifact, Digests, Kind, Share, Version
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.exchange.addresses import NamedAddress
from tiercheck_sidecar.exchange.channel import GIVEN_UP, TAG, Direction, Forged, Frame, TcpChannel
from tiercheck_sidecar.pacing import Portion
from tiercheck_sidecar.tags import ChunkTag, Tagger, Tags

T = TypeVar("T")

IO_TIMEOUT = GIVEN_UP
"""Seconds without any progress after which a connection counts as broken."""
IDLE_TIMEOUT = 600.0
"""Seconds that a connection may lie idle between two artifacts."""
LONGEST_UNAUTHENTICATED = 16 * 1024
"""Bytes. The limit for a message from a peer that is not authenticated yet."""
LONGEST = 64 * 1024 * 1024
END = 0xFFFFFFFF
"""The index that ends a sequence of chunks."""

_NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<II?")
"""The header of a chunk: its index, its length, and whether it is sent bare."""
_MESSAGE, _INDEX, _PART = b"m", b"i", b"c"
"""Kinds of frames, which are part of what is tagged, so that none is taken for another kind."""
_PIECE = 256 * 1024
"""Bytes that are read, tagged and sent at once, from the cache."""


class WireBroken(OSError):
    """The connection failed, timed out, or carried an invalid message. A new one may work."""


class PeerSilent(WireBroken):
    """Nothing arrived in time, or there is no route to the host."""


class Altered(WireBroken):
    """A chunk that was sent bare is not what was sealed.

    Its bytes changed on the way, or in the sender's memory. Sending it again, not bare, shows which. The
    connection remains usable.
    """


@dataclass(frozen=True)
class PeerRequest:
    """A request of the client. `op` is one of:

    - "offer": keep this artifact.
    - "join": chunks of `transfer` follow, until END; the answer names the damaged ones.
    - "commit": all chunks were sent.
    - "read": open this artifact; its chunks are then requested by index, until END.
    - "corrupt": the chunks of this artifact do not match their digests.
    - "list": list the artifacts of `rank` that are held.
    - "pulse": a heartbeat.
    - "ucx": let UCX carry what follows; the client's UCX worker has `address`.
    - "fold": fold this artifact of the client into a block.
    - "chunks": chunks of it follow, until END; the answer names the damaged ones.
    - "status": answered when it differs from the last answer on this connection, or after a few seconds.

    With a `share`, "read", "list" and "corrupt" are about that parity block of the version and kind.
    """

    op: str
    rank: int = -1
    version: Version | None = None
    world_size: int = 0
    digests: Digests | None = None
    transfer: str = ""
    kind: Kind = Kind.SNAPSHOT
    tags: Tags | None = None
    """The tags of an offered artifact: its chunks may be sent bare."""
    bare: bool = False
    """True if a "read" accepts bare chunks."""
    address: str = ""
    share: Share | None = None

    @staticmethod
    def about(op: str, artifact: Artifact, **more: Any) -> PeerRequest:
        return PeerRequest(op, artifact.rank, artifact.version, kind=artifact.kind, **more)

    @property
    def artifact(self) -> Artifact:
        """Returns the artifact that the request names. Raises WireBroken if it names none."""
        if self.version is None or self.rank < 0:
            raise WireBroken("which artifact?")
        return Artifact(self.rank, self.version, self.kind)


@dataclass(frozen=True)
class ListedArtifact:
    """A whole artifact that a peer holds, or that a parity block there was made from."""

    artifact: Artifact
    bytes: int


@dataclass(frozen=True)
class PeerResponse:
    """An answer. `state` is one of:

    "send", "have", "busy", "refused", "found", "missing", "listed", "ok", "again", "bad", "status", "in"
    (folded; other members' artifacts are awaited), "late" (the block will not be needed)."""

    state: str
    message: str = ""
    transfer: str = ""
    world_size: int = 0
    digests: Digests | None = None
    damaged: tuple[int, ...] = ()
    listed: tuple[ListedArtifact, ...] = ()
    attempt: int = 0
    """The newest attempt that the server knows; 0: not given."""
    signature: str = ""
    tags: Tags | None = None
    addresses: tuple[NamedAddress, ...] = ()
    """The server's addresses beside its pod's, sent with "ok" to the handshake."""
    ucx: bool = False
    """True if UCX may carry what follows, sent with "ok" to the handshake."""
    address: str = ""
    """The address of the server's UCX worker, sent with "ok" to "ucx"."""
    missing: tuple[int, ...] = ()
    """Chunks that no stream has delivered yet."""
    members: tuple[Digests, ...] = ()
    """The digests of each member's artifact in a block that is found, in coding order."""
    complete: tuple[Artifact, ...] = ()
    """Artifacts of the client in blocks that are sealed here."""
    folded: tuple[Artifact, ...] = ()
    """Artifacts of the client that are wholly in blocks which still wait for other members."""


def _ignore(_: object) -> None:
    """Does nothing."""


class Wire:
    """One connection. One thread at a time uses and closes it; only `cut` may be called from another."""

    def __init__(self, connection: TcpChannel | socket.socket, timeout: float = IO_TIMEOUT) -> None:
        self.channel = TcpChannel(connection) if isinstance(connection, socket.socket) else connection
        self._seconds = timeout
        self.patience(timeout)
        self.offers_ucx = False
        """True if the other end offers UCX."""
        self.sent = 0
        """Bytes of chunks that were sent, whether or not they arrived."""
        self.on_received: Callable[[int], None] = _ignore
        """A callback that gets the size of each received piece of a chunk; its exceptions end receiving."""
        self._deadline = float("inf")
        self._out: Direction | None = None
        self._in: Direction | None = None
        self._chunk: Frame | None = None
        self._bare = False
        self._left = 0
        """Bytes that are still missing of the chunk that is arriving."""
        self._buffer = memoryview(b"")
        self._tagger: Callable[[Artifact, str], Tagger] | None = None

    def protect(self, out: Direction, into: Direction, tagger: Callable[[Artifact, str], Tagger]) -> None:
        """Protects all that follows, in each direction. `tagger` returns an artifact's tagger for a salt."""
        self._out, self._in, self._tagger = out, into, tagger

    def tagger(self, artifact: Artifact, salt: str) -> Tagger:
        """Returns the tagger that checks tags which the other end sent. Raises WireBroken."""
        if self._tagger is None:
            raise WireBroken("nothing was proved yet")
        return self._tagger(artifact, salt)

    @property
    def near_end(self) -> tuple[str, int]:
        """Returns the IP address and port of this end. Raises WireBroken."""
        return _address(lambda: self.channel.near_end)

    @property
    def far_end(self) -> tuple[str, int]:
        """Returns the IP address and port of the other end. Raises WireBroken."""
        return _address(lambda: self.channel.far_end)

    def patience(self, seconds: float) -> None:
        """Sets how long one call may wait for progress."""
        self._seconds = seconds
        self.channel.patience(seconds)

    def move(self, channel: TcpChannel) -> None:
        """Switches to `channel`; the other end does the same."""
        channel.patience(self._seconds)
        self.channel = channel

    def set_deadline(self, seconds: float) -> None:
        """Sets a deadline in `seconds` for all further receiving, however steadily data arrives."""
        self._deadline = time.monotonic() + seconds

    def cut(self) -> None:
        """Ends another thread's wait."""
        self.channel.cut()

    def close(self) -> None:
        self.channel.close()

    def send(self, message: object) -> None:
        """Sends a message as JSON. Raises WireBroken."""
        body = bytearray(to_json(message))
        header = _LENGTH.pack(len(body))
        tag = b""
        if self._out is not None:
            frame = self._out.sending(_MESSAGE + header)
            frame.work(body)
            tag = frame.tag()
        self._send_all(header + body + tag)

    def receive(self, cls: type[T], longest: int = LONGEST) -> T:
        """Receives a message of at most `longest` bytes. Raises WireBroken."""
        header = self._take(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        if length > longest:
            raise WireBroken(f"a message of {length} bytes is refused")
        body = self._take(length)
        if self._in is not None:
            frame = self._in.receiving(_MESSAGE + header)
            frame.work(body)
            self._check(frame)
        try:
            return decode(body, cls, longest)
        except Malformed as error:
            raise WireBroken(f"not a {cls.__name__}: {error}") from error

    def send_index(self, index: int) -> None:
        header = _LENGTH.pack(index)
        self._send_all(header + self._sending(_INDEX + header).tag())

    def receive_index(self) -> int:
        header = self._take(_LENGTH.size)
        self._check(self._receiving(_INDEX + header))
        return int(_LENGTH.unpack(header)[0])

    def send_end(self) -> None:
        header = _CHUNK.pack(END, 0, False)
        self._send_all(header + self._sending(_PART + header).tag())

    def send_chunk(
        self,
        file: int,
        index: int,
        offset: int,
        length: int,
        pace: Portion | None = None,
        *,
        bare: bool = False,
    ) -> None:
        """Sends a chunk of the open file `file`. Raises WireBroken.

        `bare` if the other end has its tag; on an encrypted connection no chunk is sent bare."""
        bare = bare and not (self._out is not None and self._out.encrypted)
        header = _CHUNK.pack(index, length, bare)
        frame = self._sending(_PART + header)
        try:
            self.channel.send(header + (frame.tag() if bare else b""), more=True)
            failpoint("mid-chunk")
            for begin, size in _portions(offset, length, pace):
                if bare:
                    self._send_bare(file, begin, size)
                else:
                    self._send_tagged(file, begin, size, frame)
            if not bare:
                self.channel.send(frame.tag())
        except OSError as error:
            raise wire_error(error) from error

    def receive_chunk_header(self) -> tuple[int, int]:
        """Returns (index, length); index END ends the stream. All its bytes must be received next."""
        header = self._take(_CHUNK.size)
        index, length, bare = _CHUNK.unpack(header)
        frame = self._receiving(_PART + header)
        if bare or index == END or length == 0:
            self._check(frame)
        if bare and self._in is not None and self._in.encrypted:
            raise WireBroken("it does not encrypt")
        self._chunk, self._bare, self._left = frame, bare, length
        return index, length

    def receive_into(self, view: memoryview, sealed: ChunkTag | None = None) -> bool:
        """Fills `view` with the next bytes of a chunk, which are unverified until its last ones arrive.

        A bare chunk must be received at once and match `sealed`: then True is returned, and its digest need
        not be compared. Raises WireBroken, Altered.
        """
        if self._chunk is None or len(view) > self._left:
            raise WireBroken("the chunk has fewer bytes")
        bare = sealed if self._bare else None
        if self._bare and (bare is None or len(view) < self._left):
            raise WireBroken("the chunk came bare, and nothing is known to check it with")
        self._fill(view, bare.update if bare is not None else _ignore)
        if bare is None:
            self._chunk.work(view)
        self._left -= len(view)
        if bare is not None and not bare.fits():
            raise Altered("the bytes are not those that were sealed")
        if bare is None and self._left == 0:
            self._check(self._chunk)
        self.on_received(len(view))
        return bare is not None

    def _send_bare(self, file: int, offset: int, size: int) -> None:
        while size:
            sent = self.channel.send_file(file, offset, size)
            if sent == 0:
                raise WireBroken("the slot is shorter than its artifact")
            self.sent += sent
            offset, size = offset + sent, size - sent

    def _send_tagged(self, file: int, offset: int, size: int, frame: Frame) -> None:
        if not self._buffer:
            self._buffer = memoryview(bytearray(_PIECE))
        while size:
            got = os.preadv(file, [self._buffer[:size]], offset)
            if got == 0:
                raise WireBroken("the slot is shorter than its artifact")
            frame.work(self._buffer[:got])
            self.channel.send(self._buffer[:got], more=True)
            self.sent += got
            offset, size = offset + got, size - got

    def _sending(self, header: bytes) -> Frame:
        if self._out is None:
            raise WireBroken("nothing was proved yet")
        return self._out.sending(header)

    def _receiving(self, header: bytes) -> Frame:
        if self._in is None:
            raise WireBroken("nothing was proved yet")
        return self._in.receiving(header)

    def _check(self, frame: Frame) -> None:
        """Receives and checks the tag that ends `frame`. Raises WireBroken."""
        try:
            frame.check(self._take(TAG))
        except Forged as error:
            raise WireBroken(str(error)) from error

    def _fill(self, view: memoryview, check: Callable[[memoryview], None] = _ignore) -> None:
        """Fills `view`. `check` gets what each call received, while it is in the core's own cache.

        Receiving less per call costs more than it saves."""
        try:
            while view:
                got = self.channel.receive_into(view)
                if got == 0:
                    raise WireBroken("the connection was closed")
                check(view[:got])
                view = view[got:]
                if view and time.monotonic() > self._deadline:
                    raise WireBroken("it took too long")
        except OSError as error:
            raise wire_error(error) from error

    def _take(self, length: int) -> bytearray:
        buffer = bytearray(length)
        self._fill(memoryview(buffer))
        return buffer

    def _send_all(self, data: bytes) -> None:
        try:
            self.channel.send(data)
        except OSError as error:
            raise wire_error(error) from error


def _portions(offset: int, length: int, pace: Portion | None) -> Iterator[tuple[int, int]]:
    """Yields the offset and size of each piece to send, as `pace` permits."""
    end = offset + length
    while offset < end:
        size = min(pace.piece or length, end - offset) if pace else length
        if pace:
            pace.take(size)
        yield offset, size
        offset += size


def _address(of: Callable[[], Any]) -> tuple[str, int]:
    """Raises WireBroken."""
    try:
        host, port, *_ = of()
    except OSError as error:
        raise wire_error(error) from error
    except ValueError as error:
        raise WireBroken("the connection has no address") from error
    return str(host), int(port)


def wire_error(error: OSError) -> WireBroken:
    """Converts a socket's `error` to WireBroken or PeerSilent."""
    if isinstance(error, WireBroken):
        return error
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return PeerSilent("no progress in time")
    if error.errno in _NO_WAY:
        return PeerSilent(str(error))
    return WireBroken(str(error))
