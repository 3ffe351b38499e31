"""No strangers on the wire: both ends prove that they know the job's token before anything else is said.

The token itself never travels. Each side answers the other's fresh nonce with an HMAC over everything that was claimed,
so a recorded proof is worth nothing, and neither is a proof made for the other direction.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.protocol.address import endpoint
from tiercheck_sidecar.exchange.frames import IO_TIMEOUT, LONGEST_STRANGER, Say, Wire, broken

CONNECT_TIMEOUT = 3.0
"""Seconds to connect, and for each step of the handshake."""


class PeerRefused(Exception):
    """The other sidecar does not talk to us, or is not one of this job; the message is a sentence."""

    def __init__(self, message: str, attempt: int | None = None) -> None:
        """`attempt`: the one that it follows; None: it did not prove to be of this job."""
        super().__init__(message)
        self.attempt = attempt


@dataclass(frozen=True)
class Claim:
    """Who calls, about which job, in which attempt."""

    job_uid: str
    worker: int
    attempt: int
    nonce: str


@dataclass(frozen=True)
class Challenge:
    worker: int
    nonce: str
    proof: str


@dataclass(frozen=True)
class Proof:
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


def dial(identity: Identity, attempt: int, host: str, port: int) -> Wire:
    """A proven connection to another sidecar. `host`: its address; `port`: the usual one, which that need not name. Raises WireBroken, PeerRefused."""
    try:
        connection = socket.create_connection(endpoint(host, port), CONNECT_TIMEOUT, (identity.host, 0))
    except OSError as error:
        raise type(broken(error))(f"{host} cannot be reached: {error}") from error
    wire = Wire(connection, CONNECT_TIMEOUT)
    try:
        claim = Claim(identity.job_uid, identity.worker, attempt, secrets.token_hex(16))
        wire.send(claim)
        challenge = wire.receive(Challenge, LONGEST_STRANGER)
        if not hmac.compare_digest(challenge.proof, _proof(identity.token, "server", claim, challenge)):
            raise PeerRefused(f"{host} does not know this job's token")
        wire.send(Proof(_proof(identity.token, "client", claim, challenge)))
        said = wire.receive(Say, LONGEST_STRANGER)
        if said.state != "ok":
            raise PeerRefused(f"{host}: {said.message}", said.attempt)
        wire.patience(IO_TIMEOUT)
    except BaseException:
        wire.close()
        raise
    return wire


def admit(
    wire: Wire, identity: Identity, objection: Callable[[Claim], str], attempt: Callable[[], int] = lambda: 0
) -> Claim:
    """The other end of `dial`. `objection` gives a sentence if a proven caller is refused, who is told the `attempt` that we follow.

    Raises WireBroken, PeerRefused.
    """
    wire.patience(CONNECT_TIMEOUT)
    wire.hurry(CONNECT_TIMEOUT)
    claim = wire.receive(Claim, LONGEST_STRANGER)
    blank = Challenge(identity.worker, secrets.token_hex(16), "")
    wire.send(Challenge(blank.worker, blank.nonce, _proof(identity.token, "server", claim, blank)))
    proof = wire.receive(Proof, LONGEST_STRANGER)
    if not hmac.compare_digest(proof.proof, _proof(identity.token, "client", claim, blank)):
        raise PeerRefused("the caller does not know this job's token")
    reason = objection(claim)
    wire.send(Say("refused" if reason else "ok", reason, attempt=attempt()))
    if reason:
        raise PeerRefused(reason)
    wire.patience(IO_TIMEOUT)
    wire.hurry(float("inf"))
    return claim


def _proof(token: str, role: str, claim: Claim, challenge: Challenge) -> str:
    parts = (role, claim.job_uid, claim.worker, claim.attempt, claim.nonce, challenge.worker, challenge.nonce)
    return hmac.new(token.encode(), "\n".join(map(str, parts)).encode(), hashlib.sha256).hexdigest()
