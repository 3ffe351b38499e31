"""Lets no strangers on the wire: both ends prove first that they know the job's token.

The token itself never travels. Each side answers the other's fresh nonce with an HMAC over everything that
was claimed and over the address at which the two met, so a recorded proof is worth nothing, and neither is a
proof made for the other direction or passed on by somebody in between, such as whoever has a dead pod's
address now. What was said so far, and the token, then give the keys for everything that follows
(`channel`), so that nobody can speak in the place of either end later.
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
    LONGEST_STRANGER,
    Ask,
    Say,
    Wire,
    WireBroken,
    wire_error,
)
from tiercheck_sidecar.tags import Tagger

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 3.0
"""Seconds to connect, and for each step of the handshake."""


class PeerRefused(Exception):
    """The other sidecar does not talk to us, or is not one of this job; the message is a sentence."""

    def __init__(self, message: str, attempt: SignedAttempt | None = None) -> None:
        """`attempt`: the one that it knows; None: it did not prove to be who was meant."""
        super().__init__(message)
        self.attempt = attempt


@dataclass(frozen=True)
class CallerClaim:
    """Who calls, about which job, in which attempt."""

    job_uid: str
    worker: int
    attempt: int
    nonce: str
    encrypted: bool = False
    """Whether it wants the connection to be encrypted."""


@dataclass(frozen=True)
class Challenge:
    """Who was called, and the attempt that it follows."""

    worker: int
    nonce: str
    proof: str
    attempt: int = 0
    encrypted: bool = False
    """Whether the connection will be encrypted: if either wants it."""


@dataclass(frozen=True)
class CallerProof:
    proof: str


@dataclass
class Identity:
    """This sidecar, as it presents itself."""

    job_uid: str
    worker: int
    """Set anew when this sidecar becomes another worker."""
    token: str
    host: str
    """Connections start here, so that network rules can tell pods apart."""
    encrypts: Callable[[], bool] = lambda: False
    """Whether nothing may leave or arrive in the clear."""
    ucx: Callable[[], bool] = lambda: False
    """Whether UCX shall carry what follows a handshake, and is there."""
    addresses: PeerAddresses = field(default_factory=PeerAddresses)
    """Of this sidecar and its peers, beside those of their pods."""

    def tagger(self, artifact: Artifact, salt: str) -> Tagger:
        """For an artifact of this job that was sealed with `salt`."""
        return Tagger(self.token, self.job_uid, artifact, salt)


def dial(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire:
    """A proven connection to `peer`'s sidecar, over the interfaces that the job names; over its pod's
    address, where none of them leads there. `port`: the usual one, which that address need not name. Raises
    WireBroken, PeerRefused."""
    wire = _dial_routes(identity, attempt, peer, port)
    if wire is None:
        wire, is_news = _dial_pod(identity, attempt, peer, port)
        with _closed_by_failure(wire):
            better = _dial_routes(identity, attempt, peer, port) if is_news else None
        if better is not None:
            wire.close()
            wire = better
    if wire.offers_ucx and identity.ucx():
        with _closed_by_failure(wire):
            ask_for_ucx(wire)
    return wire


def dial_pod(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire:
    """As `dial`, over the pod's address: whether that works is the question. Raises WireBroken,
    PeerRefused."""
    return _dial_pod(identity, attempt, peer, port)[0]


def _dial_pod(identity: Identity, attempt: int, peer: Peer, port: int) -> tuple[Wire, bool]:
    """Also returns whether the peer told addresses that were not known. Raises WireBroken, PeerRefused."""
    wire, said = _meet(identity, attempt, peer, endpoint(peer.host, port), identity.host)
    return wire, identity.addresses.hear(peer, said.addresses)


def _dial_routes(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire | None:
    """None if no route works. Raises PeerRefused, as only the one who is meant can."""
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
        book.hear(peer, said.addresses)
        return wire
    return None


def _meet(
    identity: Identity, attempt: int, peer: Peer, target: tuple[str, int], source: str
) -> tuple[Wire, Say]:
    """A proven connection to `target`, and what was said last. Raises WireBroken, PeerRefused."""
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
        challenge = wire.receive(Challenge, LONGEST_STRANGER)
        if not _same(challenge.proof, _proof(identity.token, "server", claim, challenge, wire.far_end)):
            raise PeerRefused(
                f"{host} does not know this job's token, or was meant to be reached at another address"
            )
        # Workers are numbered anew between attempts, and not all are told at once: one of a newer attempt
        # will say so. Within one, somebody else has the address now.
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
        said = wire.receive(Say, LONGEST_STRANGER)
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
    """Let UCX carry what follows on a proven connection, unless one of its ends cannot. Raises
    WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
    except OSError as error:
        log.warning("TCP carries copies, not UCX: %s", error)
        return
    wire.send(Ask("ucx", address=channel.address))
    said = wire.receive(Say)
    if said.state != "ok":
        log.warning("TCP carries copies, not UCX: %s", said.message)
        return
    try:
        channel.meet(said.address)
    except OSError as error:  # the other end has moved already
        raise wire_error(error) from error
    wire.move(channel)


def answer_ucx(wire: Wire, address: str) -> None:
    """What the other end does meanwhile. Raises WireBroken."""
    try:
        channel = UcxChannel(wire.channel)
        channel.meet(address)
    except OSError as error:
        wire.send(Say("refused", str(error)))
        return
    wire.send(Say("ok", address=channel.address))
    wire.move(channel)


def admit(
    wire: Wire,
    identity: Identity,
    objection: Callable[[CallerClaim], str],
    attempt: Callable[[], int] = lambda: 0,
    newest: Callable[[], SignedAttempt] = lambda: SignedAttempt(0),
) -> CallerClaim:
    """The other end of `dial`. `objection` gives a sentence if a proven caller is refused. It is told the
    `attempt` that we follow, and the `newest` that we know.

    Raises WireBroken, PeerRefused.
    """
    wire.patience(CONNECT_TIMEOUT)
    wire.hurry(CONNECT_TIMEOUT)
    claim = wire.receive(CallerClaim, LONGEST_STRANGER)
    follows = attempt()  # first: who is another worker from an attempt on is so before it follows that
    encrypted = claim.encrypted or identity.encrypts()
    blank = Challenge(identity.worker, secrets.token_hex(16), "", follows, encrypted)
    proof = _proof(identity.token, "server", claim, blank, wire.near_end)
    wire.send(dataclasses.replace(blank, proof=proof))
    given = wire.receive(CallerProof, LONGEST_STRANGER).proof
    if not _same(given, _proof(identity.token, "client", claim, blank, wire.near_end)):
        raise PeerRefused("the caller does not know this job's token, or meant another address")
    into, out = directions(identity.token, _said("keys", claim, blank, wire.near_end), encrypted)
    wire.protect(out, into, identity.tagger)
    reason = objection(claim)
    said = Say("refused" if reason else "ok", reason, **newest()._asdict())
    if not reason:
        said = dataclasses.replace(said, addresses=identity.addresses.own, ucx=identity.ucx())
    wire.send(said)
    if reason:
        raise PeerRefused(reason)
    wire.patience(IO_TIMEOUT)
    wire.hurry(float("inf"))
    return claim


def _proof(token: str, role: str, claim: CallerClaim, challenge: Challenge, address: tuple[str, int]) -> str:
    return hmac.new(token.encode(), _said(role, claim, challenge, address), hashlib.sha256).hexdigest()


def _said(role: str, claim: CallerClaim, challenge: Challenge, address: tuple[str, int]) -> bytes:
    """`address`: IP address and port of the one who is called, as dialled and as bound: between pods nothing
    rewrites it."""
    return to_json([role, claim, dataclasses.replace(challenge, proof=""), list(address)])


def _same(given: str, expected: str) -> bool:
    """Compared as bytes: `compare_digest` takes no text that is not ASCII, and a stranger may say
    anything.
    """
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
