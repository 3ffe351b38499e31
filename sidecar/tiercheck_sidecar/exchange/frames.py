"""Sends and receives on an exchange connection: JSON messages with a length, and chunks.

Once the two ends have proved who they are, everything carries a tag (`channel`). Chunks whose tags were
made when their artifact was sealed (`tags`) travel bare: only their header is tagged here, and the kernel
takes their bytes from the slot. Others pass through a small buffer that stays in the cache. All go from the
connection to their place.
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
LONGEST_STRANGER = 16 * 1024
"""Bytes of a message from someone who has not proved anything yet."""
LONGEST = 64 * 1024 * 1024
END = 0xFFFFFFFF
"""Instead of a chunk's index: no more chunks for now."""

_NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<II?")
"""Index, bytes, and whether they travel bare."""
_MESSAGE, _INDEX, _PART = b"m", b"i", b"c"
"""Kinds of frames: none is taken for one of another."""
_PIECE = 256 * 1024
"""Bytes that are read, tagged and sent at once, from the cache."""


class WireBroken(OSError):
    """The connection failed, timed out, or said something senseless. A new one may work."""


class PeerSilent(WireBroken):
    """Nothing came back in time, or there is no way to the host."""


class Altered(WireBroken):
    """A chunk that travelled bare is not what was sealed: its bytes changed on the way, or in the memory that
    they came from. Sent again, not bare, it shows which. What comes after it on the connection is as good as
    before.
    """


@dataclass(frozen=True)
class Ask:
    """From the side that connected. `op`:

    - "offer": will you keep this artifact? - "join": chunks of `transfer` follow, until END; answered by the
      damaged ones.
    - "commit": all chunks were sent. - "read": have you this artifact? Then its chunks are asked for by
      index, until END.
    - "corrupt": the chunks of this artifact do not match their digests. - "list": which artifacts of `rank`
      have you?
    - "pulse": are you there? - "ucx": may UCX carry what follows? Its worker here has `address`.
    - "fold": will you fold this artifact of mine into a block? - "chunks": chunks of it follow, until END;
      answered by the damaged ones.
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
    """With "offer": chunks may come bare."""
    bare: bool = False
    """With "read": whether chunks may come bare."""
    address: str = ""
    share: Share | None = None

    @staticmethod
    def about(op: str, artifact: Artifact, **more: Any) -> Ask:
        """With the artifact's name."""
        return Ask(op, artifact.rank, artifact.version, kind=artifact.kind, **more)

    @property
    def artifact(self) -> Artifact:
        """Raises WireBroken if it names none."""
        if self.version is None or self.rank < 0:
            raise WireBroken("which artifact?")
        return Artifact(self.rank, self.version, self.kind)


@dataclass(frozen=True)
class ListedArtifact:
    """A whole artifact that a peer holds, or that a parity block there is made of."""

    artifact: Artifact
    bytes: int


@dataclass(frozen=True)
class Say:
    """The answer. `state`: "send", "have", "busy", "refused", "found", "missing", "listed", "ok", "again",
    "bad", "status"; "in" (folded; other members' are awaited), "late" (nobody will need the block)."""

    state: str
    message: str = ""
    transfer: str = ""
    world_size: int = 0
    digests: Digests | None = None
    damaged: tuple[int, ...] = ()
    listed: tuple[ListedArtifact, ...] = ()
    attempt: int = 0
    """The newest attempt that the one who answers knows; 0: not said."""
    signature: str = ""
    """The operator's, of that attempt."""
    tags: Tags | None = None
    addresses: tuple[NamedAddress, ...] = ()
    """With "ok" to the handshake: where the one who answers listens beside its pod's address."""
    ucx: bool = False
    """With "ok" to the handshake: UCX may carry what follows."""
    address: str = ""
    """With "ok" to "ucx": of the worker there."""
    missing: tuple[int, ...] = ()
    """Chunks that no stream brought yet."""
    members: tuple[Digests, ...] = ()
    """Of a block that is found: of each member's artifact, in coding order."""
    complete: tuple[Artifact, ...] = ()
    """Artifacts of the asking worker whose blocks are sealed here."""
    folded: tuple[Artifact, ...] = ()
    """Artifacts of the asking worker that are wholly in blocks which still wait for other members."""


def _nobody(_: object) -> None:
    """For what nobody watches."""


class Wire:
    """One connection. Used and closed by one thread at a time; only `cut` may come from another."""

    def __init__(self, connection: TcpChannel | socket.socket, timeout: float = IO_TIMEOUT) -> None:
        self._channel = TcpChannel(connection) if isinstance(connection, socket.socket) else connection
        self._seconds = timeout
        self.patience(timeout)
        self.offers_ucx = False
        """Whether the other end does."""
        self.sent = 0
        """Bytes of chunks, whether or not they arrived."""
        self.heard: Callable[[int], None] = _nobody
        """Called with the bytes of each piece of a chunk that was received; what it raises ends the
        receiving."""
        self._deadline = float("inf")
        self._out: Direction | None = None
        self._in: Direction | None = None
        self._chunk: Frame | None = None
        self._bare = False
        self._left = 0
        """Bytes of the chunk that is arriving."""
        self._buffer = memoryview(b"")
        self._tagger: Callable[[Artifact, str], Tagger] | None = None

    def protect(self, out: Direction, into: Direction, tagger: Callable[[Artifact, str], Tagger]) -> None:
        """From now on, for each direction. `tagger`: for artifacts of the job that both ends belong to, by
        their salts."""
        self._out, self._in, self._tagger = out, into, tagger

    def tagger(self, artifact: Artifact, salt: str) -> Tagger:
        """To check tags with that the other end names. Raises WireBroken."""
        if self._tagger is None:
            raise WireBroken("nothing was proved yet")
        return self._tagger(artifact, salt)

    @property
    def near_end(self) -> tuple[str, int]:
        """IP address and port of our end. Raises WireBroken."""
        return _address(lambda: self._channel.near_end)

    @property
    def far_end(self) -> tuple[str, int]:
        """IP address and port of the other end. Raises WireBroken."""
        return _address(lambda: self._channel.far_end)

    def patience(self, seconds: float) -> None:
        """How long one call may wait for progress."""
        self._seconds = seconds
        self._channel.patience(seconds)

    @property
    def channel(self) -> TcpChannel:
        """What carries it."""
        return self._channel

    def move(self, channel: TcpChannel) -> None:
        """`channel` carries what follows; the other end does the same."""
        channel.patience(self._seconds)
        self._channel = channel

    def hurry(self, seconds: float) -> None:
        """Everything received from now on must have come within `seconds`, however steadily it trickles."""
        self._deadline = time.monotonic() + seconds

    def cut(self) -> None:
        """End whatever the other thread waits for."""
        self._channel.cut()

    def close(self) -> None:
        self._channel.close()

    def send(self, message: object) -> None:
        """Raises WireBroken."""
        body = bytearray(to_json(message))
        header = _LENGTH.pack(len(body))
        tag = b""
        if self._out is not None:
            frame = self._out.sending(_MESSAGE + header)
            frame.work(body)
            tag = frame.tag()
        self._send_all(header + body + tag)

    def receive(self, cls: type[T], longest: int = LONGEST) -> T:
        """Raises WireBroken."""
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
        """From the open file `file`; `bare` if the other end has its tag. Nothing travels bare where it is to
        be encrypted. Raises WireBroken."""
        bare = bare and not (self._out is not None and self._out.encrypted)
        header = _CHUNK.pack(index, length, bare)
        frame = self._sending(_PART + header)
        try:
            self._channel.send(header + (frame.tag() if bare else b""), more=True)
            failpoint("mid-chunk")
            for begin, size in _portions(offset, length, pace):
                if bare:
                    self._send_bare(file, begin, size)
                else:
                    self._send_tagged(file, begin, size, frame)
            if not bare:
                self._channel.send(frame.tag())
        except OSError as error:
            raise wire_error(error) from error

    def receive_chunk_header(self) -> tuple[int, int]:
        """(index, length); index END ends the stream. The bytes are to be received next, all of them."""
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
        """Fill `view` with the next bytes of a chunk. They are worth nothing before its last ones were
        received.

        What comes bare must be `sealed`, all of the chunk at once: then True is returned, and nothing else
        need be compared. Raises WireBroken, Altered.
        """
        if self._chunk is None or len(view) > self._left:
            raise WireBroken("the chunk has fewer bytes")
        bare = sealed if self._bare else None
        if self._bare and (bare is None or len(view) < self._left):
            raise WireBroken("the chunk came bare, and nothing is known to check it with")
        self._fill(view, bare.update if bare is not None else _nobody)
        if bare is None:
            self._chunk.work(view)
        self._left -= len(view)
        if bare is not None and not bare.fits():
            raise Altered("the bytes are not those that were sealed")
        if bare is None and self._left == 0:
            self._check(self._chunk)
        self.heard(len(view))
        return bare is not None

    def _send_bare(self, file: int, offset: int, size: int) -> None:
        while size:
            sent = self._channel.send_file(file, offset, size)
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
            self._channel.send(self._buffer[:got], more=True)
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
        """Receive the tag that ends `frame`. Raises WireBroken."""
        try:
            frame.check(self._take(TAG))
        except Forged as error:
            raise WireBroken(str(error)) from error

    def _fill(self, view: memoryview, check: Callable[[memoryview], None] = _nobody) -> None:
        """`check` is shown what each call brought, while it is in the core's own cache. To ask for less
        at once costs more than that saves."""
        try:
            while view:
                got = self._channel.receive_into(view)
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
            self._channel.send(data)
        except OSError as error:
            raise wire_error(error) from error


def _portions(offset: int, length: int, pace: Portion | None) -> Iterator[tuple[int, int]]:
    """Where to send from next, and how many bytes, as `pace` grants them."""
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
    """`error` of a socket, told apart."""
    if isinstance(error, WireBroken):
        return error
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return PeerSilent("no progress in time")
    if error.errno in _NO_WAY:
        return PeerSilent(str(error))
    return WireBroken(str(error))
