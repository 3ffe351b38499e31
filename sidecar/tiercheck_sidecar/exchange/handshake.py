"""Lets no strangers on the wire: both ends prove first that they know the job's token.

The token itself never travels. Each side answers the other's fresh nonce with an HMAC over everything that
was claimed and over the address at which the two met, so a recorded proof is worth nothing, and neither is a
proof made for the other direction or passed on by somebody in between, such as whoever has a dead pod's
address now. What was said so far, and the token, then give the keys for everything that follows
(`protection`), so that nobody can speak in the place of either end later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.protocol.directive import Peer
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.names import endpoint
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.exchange.frames import IO_TIMEOUT, LONGEST_STRANGER, Say, Wire, wire_error
from tiercheck_sidecar.exchange.protection import directions
from tiercheck_sidecar.vault.tags import Tagger

CONNECT_TIMEOUT = 3.0
"""Seconds to connect, and for each step of the handshake."""


class PeerRefused(Exception):
    """The other sidecar does not talk to us, or is not one of this job; the message is a sentence."""

    def __init__(self, message: str, attempt: int | None = None) -> None:
        """`attempt`: the one that it follows; None: it did not prove to be who was meant."""
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

    def tagger(self, artifact: Artifact, salt: str) -> Tagger:
        """For an artifact of this job that was sealed with `salt`."""
        return Tagger(self.token, self.job_uid, artifact, salt)


def dial(identity: Identity, attempt: int, peer: Peer, port: int) -> Wire:
    """A proven connection to `peer`'s sidecar. `port`: the usual one, which its address need not name. Raises
    WireBroken, PeerRefused."""
    host = peer.host
    try:
        connection = socket.create_connection(endpoint(host, port), CONNECT_TIMEOUT, (identity.host, 0))
    except OSError as error:
        raise type(wire_error(error))(f"{host} cannot be reached: {error}") from error
    wire = Wire(connection, CONNECT_TIMEOUT)
    try:
        claim = CallerClaim(
            identity.job_uid, identity.worker, attempt, secrets.token_hex(16), identity.encrypts()
        )
        wire.send(claim)
        challenge = wire.receive(Challenge, LONGEST_STRANGER)
        if not _same(challenge.proof, _proof(identity.token, "server", claim, challenge, wire.far_end)):
            raise PeerRefused(
                f"{host} does not know this job's token, or was meant to be reached at another address"
            )
        # Workers are numbered anew between attempts, and not all are told at once. Within one, somebody else
        # has the address now.
        if challenge.worker != peer.worker and challenge.attempt >= attempt:
            called = f"worker {challenge.worker}, not {peer.worker}, in attempt {challenge.attempt}"
            raise PeerRefused(
                f"{host} is the sidecar of {called}",
                None if challenge.attempt == attempt else challenge.attempt,
            )
        if claim.encrypted and not challenge.encrypted:
            raise PeerRefused(f"{host} does not encrypt")
        wire.send(CallerProof(_proof(identity.token, "client", claim, challenge, wire.far_end)))
        out, into = directions(
            identity.token, _said("keys", claim, challenge, wire.far_end), challenge.encrypted
        )
        wire.protect(out, into, identity.tagger)
        said = wire.receive(Say, LONGEST_STRANGER)
        if said.state != "ok":
            raise PeerRefused(f"{host}: {said.message}", said.attempt)
        wire.patience(IO_TIMEOUT)
    except BaseException:
        wire.close()
        raise
    return wire


def admit(
    wire: Wire,
    identity: Identity,
    objection: Callable[[CallerClaim], str],
    attempt: Callable[[], int] = lambda: 0,
    newest: Callable[[], int] = lambda: 0,
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
    wire.send(Say("refused" if reason else "ok", reason, attempt=newest()))
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
