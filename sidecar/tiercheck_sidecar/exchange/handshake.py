"""Authenticates both ends of a connection: each proves that it knows the job's token.

The token itself is never sent. Each side answers the other's fresh nonce with an HMAC over everything that
was claimed and over the server's address. So a recorded proof is worthless, and so is one that was made for
the other direction or relayed by a third party, such as a pod that got a dead pod's address. The messages so
far, and the token, then give the keys for everything that follows (`channel`), so that no third party can
impersonate either end later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiercheck.protocol.directive import Peer
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.names import endpoint
from tiercheck.protocol.signing import SignedAttempt
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.exchange.addresses import PeerAddresses
from tiercheck_sidecar.exchange.channel import UcxChannel, directions
from tiercheck_sidecar.exchange.frames import (
    IO_TIMEOUT,
    LONGEST_UNAUTHENTICATED,
    PeerRequest,
    PeerResponse,
    Wire,
    WireBroken,
    wire_error,
)
from tiercheck_sidecar.tags import Tagger

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 3.0
"""Seconds to connect, and for each step of the handshake."""


class PeerRefused(Exception):
    """A sidecar refuses the connection, or is not one of this job; the message is a sentence."""

    def __init__(self, message: str, attempt: SignedAttempt | None = None) -> None:
        """`attempt`: the newest that the peer knows; None: it is not authenticated as the expected one."""
        super().__init__(message)
        self.attempt = attempt


@dataclass(frozen=True)
class CallerClaim:
    """The client's identity: its job, worker and attempt."""

    job_uid: str
    worker: int
    attempt: int
    nonce: str
    encrypted: bool = False
    """True if the client requires encryption."""


@dataclass(frozen=True)
class Challenge:
    """The server's answer: its worker, and the attempt that it follows."""

    worker: int
    nonce: str
    proof: str
    attempt: int = 0
    encrypted: bool = False
    """True if the connection will be encrypted, because either end requires it."""


@dataclass(frozen=True)
class CallerProof:
    proof: str


@dataclass
class Identity:
    """Holds what this sidecar presents to its peers."""

    job_uid: str
    worker: int
    """The worker number, which changes when this sidecar becomes another worker."""
    token: str
    host: str
    """The source address of connections, so that network rules can distinguish pods."""
    encrypts: Callable[[], bool] = lambda: False
    """Returns whether all connections must be encrypted."""
    ucx: Callable[[], bool] = lambda: False
    """Returns whether UCX is to carry what follows a handshake, and is available."""
    addresses: PeerAddresses = field(default_factory=PeerAddresses)
    """The addresses of this sidecar and its peers, beside those of their pods."""

    def tagger(self, artifact: Artifact, salt: str) -> Tagger:
        """Returns the tagger for an artifact of this job that was sealed with `salt`."""
        return Tagger(self.token, self.job_uid, artifact, salt)


def dial(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire:
    """Returns an authenticated connection to `peer`'s sidecar. Raises WireBroken, PeerRefused.

    It uses the job's interfaces, or else the pod's address. `port`: the default if `peer.host` names none."""
    wire = _dial_routes(identity, attempt, peer, port)
    if wire is None:
        wire, is_news = dial_pod(identity, attempt, peer, port)
        with _closed_by_failure(wire):
            better = _dial_routes(identity, attempt, peer, port) if is_news else None
        if better is not None:
            wire.close()
            wire = better
    if wire.offers_ucx and identity.ucx():
        with _closed_by_failure(wire):
            ask_for_ucx(wire)
    return wire


def dial_pod(identity: Identity, attempt: int, peer: Peer, port: int) -> tuple[Wire, bool]:
    """Connects by the pod's address alone. Also returns whether the peer names new addresses.

    Raises WireBroken, PeerRefused."""
    wire, said = _meet(identity, attempt, peer, endpoint(peer.host, port), identity.host)
    return wire, identity.addresses.record(peer, said.addresses)


def _dial_routes(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire | None:
    """Returns None if no route works. Raises PeerRefused if the authenticated peer itself refuses."""
    book = identity.addresses
    for route in book.routes(peer):
        try:
            target = (route.host, endpoint(peer.host, port)[1])
            wire, said = _meet(identity, attempt, peer, target, route.source)
        except (WireBroken, PeerRefused) as error:
            if isinstance(error, PeerRefused) and error.attempt is not None:
                raise
            if book.failed(route):
                log.warning(
                    "worker %d is not reached at %s from %s: %s. Other addresses are used",
                    peer.worker,
                    route.host,
                    route.source,
                    error,
                )
            continue
        book.answered(route, wire)
        book.record(peer, said.addresses)
        return wire
    return None


def _meet(
    identity: Identity, attempt: int, peer: Peer, target: tuple[str, int], source: str
) -> tuple[Wire, PeerResponse]:
    """Returns a connection to `target`, and its last answer. Raises WireBroken, PeerRefused."""
    host = target[0]
    try:
        connection = socket.create_connection(target, CONNECT_TIMEOUT, (source, 0))
    except OSError as error:
        raise type(wire_error(error))(f"{host} cannot be reached: {error}") from error
    wire = Wire(connection, CONNECT_TIMEOUT)
    with _closed_by_failure(wire):
        claim = CallerClaim(
            identity.job_uid, identity.worker, attempt, secrets.token_hex(16), identity.encrypts()
        )
        wire.send(claim)
        challenge = wire.receive(Challenge, LONGEST_UNAUTHENTICATED)
        if not _same(challenge.proof, _proof(identity.token, "server", claim, challenge, wire.far_end)):
            raise PeerRefused(
                f"{host} does not know this job's token, or was meant to be reached at another address"
            )
        # Workers are renumbered between attempts, and not all learn it at once: a newer attempt is reported
        # below. Within one attempt, another worker has got the address.
        if challenge.worker != peer.worker and challenge.attempt == attempt:
            called = f"worker {challenge.worker}, not {peer.worker}, in attempt {challenge.attempt}"
            raise PeerRefused(f"{host} is the sidecar of {called}")
        if claim.encrypted and not challenge.encrypted:
            raise PeerRefused(f"{host} does not encrypt")
        wire.send(CallerProof(_proof(identity.token, "client", claim, challenge, wire.far_end)))
        out, into = directions(
            identity.token, _said("keys", claim, challenge, wire.far_end), challenge.encrypted
        )
        wire.protect(out, into, identity.tagger)
        said = wire.receive(PeerResponse, LONGEST_UNAUTHENTICATED)
        if said.state != "ok":
            raise PeerRefused(f"{host}: {said.message}", SignedAttempt(said.attempt, said.signature))
        wire.patience(IO_TIMEOUT)
        wire.offers_ucx = said.ucx
    return wire, said


@contextlib.contextmanager
def _closed_by_failure(wire: Wire) -> Iterator[None]:
    try:
        yield
    except BaseException:
        wire.close()
        raise


def ask_for_ucx(wire: Wire) -> None:
    """Switches an authenticated connection to UCX, unless an end cannot use it. Raises WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
    except OSError as error:
        log.warning("TCP carries copies, not UCX: %s", error)
        return
    wire.send(PeerRequest("ucx", address=channel.address))
    said = wire.receive(PeerResponse)
    if said.state != "ok":
        log.warning("TCP carries copies, not UCX: %s", said.message)
        return
    try:
        channel.meet(said.address)
    except OSError as error:  # the other end has moved already
        raise wire_error(error) from error
    wire.move(channel)


def answer_ucx(wire: Wire, address: str) -> None:
    """Answers `ask_for_ucx` on the other end. Raises WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
        channel.meet(address)
    except OSError as error:
        wire.send(PeerResponse("refused", str(error)))
        return
    wire.send(PeerResponse("ok", address=channel.address))
    wire.move(channel)


def admit(
    wire: Wire,
    identity: Identity,
    objection: Callable[[CallerClaim], str],
    attempt: Callable[[], int] = lambda: 0,
    newest: Callable[[], SignedAttempt] = lambda: SignedAttempt(0),
) -> CallerClaim:
    """Authenticates a client: the other end of `dial`. Raises WireBroken, PeerRefused.

    `objection` returns a sentence if an authenticated client is refused. The client gets the `attempt` that
    this sidecar follows, and the `newest` that it knows.
    """
    wire.patience(CONNECT_TIMEOUT)
    wire.set_deadline(CONNECT_TIMEOUT)
    claim = wire.receive(CallerClaim, LONGEST_UNAUTHENTICATED)
    follows = attempt()  # read first: a worker's new number is set before the attempt
    encrypted = claim.encrypted or identity.encrypts()
    blank = Challenge(identity.worker, secrets.token_hex(16), "", follows, encrypted)
    proof = _proof(identity.token, "server", claim, blank, wire.near_end)
    wire.send(dataclasses.replace(blank, proof=proof))
    given = wire.receive(CallerProof, LONGEST_UNAUTHENTICATED).proof
    if not _same(given, _proof(identity.token, "client", claim, blank, wire.near_end)):
        raise PeerRefused("the caller does not know this job's token, or meant another address")
    into, out = directions(identity.token, _said("keys", claim, blank, wire.near_end), encrypted)
    wire.protect(out, into, identity.tagger)
    reason = objection(claim)
    said = PeerResponse("refused" if reason else "ok", reason, **newest()._asdict())
    if not reason:
        said = dataclasses.replace(said, addresses=identity.addresses.own, ucx=identity.ucx())
    wire.send(said)
    if reason:
        raise PeerRefused(reason)
    wire.patience(IO_TIMEOUT)
    wire.set_deadline(float("inf"))
    return claim


def _proof(token: str, role: str, claim: CallerClaim, challenge: Challenge, address: tuple[str, int]) -> str:
    return hmac.new(token.encode(), _said(role, claim, challenge, address), hashlib.sha256).hexdigest()


def _said(role: str, claim: CallerClaim, challenge: Challenge, address: tuple[str, int]) -> bytes:
    """Returns the bytes to sign. `address`: the server's IP and port, which nothing between pods rewrites."""
    return to_json([role, claim, dataclasses.replace(challenge, proof=""), list(address)])


def _same(given: str, expected: str) -> bool:
    """Compares as bytes: `compare_digest` rejects non-ASCII text, which an unknown peer may send."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
