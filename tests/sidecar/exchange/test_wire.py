"""The wire keeps what the handshake proved: who is meant, who is heard, and every byte that they say."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.operator_key import sign_attempt
from tests.sidecar.stations import TOKEN, MakeStations, Stations, send_bytes
from tests.sidecar.world import JOB_UID, until
from tiercheck.protocol.directive import Peer, Tier
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.app import Sidecar
from tiercheck_sidecar.exchange import handshake
from tiercheck_sidecar.exchange.channel import TAG, directions
from tiercheck_sidecar.exchange.frames import END, PeerRequest, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import (
    CallerClaim,
    CallerProof,
    Challenge,
    Identity,
    PeerRefused,
    admit,
    dial,
)
from tiercheck_sidecar.exchange.streams import ConnectionPool
from tiercheck_sidecar.replicate.lane import push
from tiercheck_sidecar.tags import ChunkTag, Tagger, Tags

MIB = 1 << 20


class Between:
    """Somebody without the token who listens at an address and passes on what is said, both ways."""

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self.there = there
        self.heard: dict[str, bytes] = {"caller": b"", "called": b""}
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(here)
        self._run(self._accept)

    def pass_on(self, data: bytes, side: str, offset: int) -> bytes:
        """What to say in place of `data`, of which `offset` bytes went before."""
        return data

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with_shut(end)
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.there)
            self._ends += [near, far]
            self._run(self._pump, near, far, "caller")
            self._run(self._pump, far, near, "called")

    def _pump(self, source: socket.socket, sink: socket.socket, side: str) -> None:
        offset = 0
        try:
            while data := source.recv(65536):
                self.heard[side] += data
                sink.sendall(self.pass_on(data, side, offset))
                offset += len(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with_shut(end)

    def _run(self, body: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


def with_shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("target", [1, 2], ids=["the one who is meant", "another of the job"])
def test_whoever_has_a_dead_pods_address_and_passes_the_handshake_on_is_sent_nothing(
    stations: MakeStations, target: int
) -> None:
    """Without the token, but in touch with a live sidecar that has it."""
    job = stations(workers=3)
    seal = job[0].save(Version(5, 1), MIB)
    dead = (f"{job.network}.200", job.port)
    with (
        closing(Between(dead, (job.host(target), job.port))) as impostor,
        ConnectionPool(lambda: dial(job[0].identity, 1, Peer(1, dead[0]), job.port)) as line,
    ):
        with pytest.raises((PeerRefused, WireBroken)):
            push(job[0].vault, seal, line)
        assert line.sent == 0
        # The caller's claim went out, and nothing that proves anything or tells of the model.
        assert impostor.heard["caller"].count(b'"proof"') == 0
        assert b"offer" not in impostor.heard["caller"]


def test_caller_refuses_the_sidecar_of_another_worker(stations: MakeStations) -> None:
    """An address that another pod of the same job has by now."""
    job = stations(workers=3)
    with pytest.raises(PeerRefused, match="worker 2, not 1") as refused:
        dial(job[0].identity, 1, Peer(1, job.host(2)), job.port)
    assert refused.value.attempt is None, "that worker 1 cannot be reached is told"


def test_sidecar_that_is_to_be_another_worker_and_was_not_told_yet_is_talked_to(
    stations: MakeStations,
) -> None:
    """A restore need not wait for it: what it holds it has, whoever it is called."""
    job = stations(workers=3)
    dial(job[0].identity, 2, Peer(1, job.host(2)), job.port).close()


def test_caller_that_is_late_learns_of_the_attempt_in_which_workers_have_other_numbers(
    stations: MakeStations,
) -> None:
    job = stations(workers=3)
    job.next_attempt()
    with pytest.raises(PeerRefused, match="the job is at attempt 2") as refused:
        dial(job[0].identity, 1, Peer(1, job.host(2)), job.port)
    assert refused.value.attempt == sign_attempt(JOB_UID, 2)


def test_caller_ends_nobodys_attempt_unless_the_operator_signed_a_newer_one(stations: MakeStations) -> None:
    job = stations(workers=3)
    dial(job[2].identity, 1001, job.peer(0), job.port).close()
    assert not job[0].state.fenced
    job[0].run("heartbeat")
    job[1].state.learn(sign_attempt(JOB_UID, 40))
    until(lambda: job[0].state.fenced, "it hears of it")
    assert job[0].sidecar.reporter.report().newest_attempt == 40


@contextmanager
def answering(answer: Callable[[Wire], object], host: str, port: int) -> Iterator[None]:
    """A server at that address that says `answer` to each caller."""
    listener = socket.create_server((host, port))

    def serve() -> None:
        while True:
            try:
                wire = Wire(listener.accept()[0])
            except OSError:
                return
            with closing(wire):
                answer(wire)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with_shut(listener)
        listener.close()
        thread.join(10)


NO_PROOFS = ["", "é", "\x00", "0" * 64, "☃" * 64, "ÿ" * 64]


@pytest.mark.parametrize("proof", NO_PROOFS)
def test_proof_of_any_text_is_refused_by_the_caller(stations: MakeStations, proof: str) -> None:
    job = stations(workers=1)
    host = f"{job.network}.200"

    def answer(wire: Wire) -> None:
        wire.receive(CallerClaim)
        wire.send(Challenge(1, "nonce", proof))

    with (
        answering(answer, host, job.port),
        pytest.raises(PeerRefused, match="does not know this job's token"),
    ):
        dial(job[0].identity, 1, Peer(1, host), job.port)


@pytest.mark.parametrize("proof", NO_PROOFS)
def test_proof_of_any_text_is_refused_by_the_one_who_is_called(proof: str) -> None:
    ours = socket.create_server(("127.0.0.1", 0))
    with closing(ours), closing(socket.create_connection(ours.getsockname())) as theirs:
        caller = Wire(theirs)
        caller.send(CallerClaim(JOB_UID, 1, 1, "nonce"))
        caller.send(CallerProof(proof))
        with (
            closing(Wire(ours.accept()[0])) as wire,
            pytest.raises(PeerRefused, match="does not know this job's token"),
        ):
            admit(wire, Identity(JOB_UID, 0, TOKEN, "127.0.0.1"), lambda _: "")


def test_connection_that_is_gone_has_no_address_and_says_so_as_every_broken_one_does() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        wire = Wire(socket.create_connection(listener.getsockname()))
        there, here = wire.far_end, wire.near_end
        assert there == listener.getsockname()
        assert here != there
        with closing(socket.socketpair()[0]) as other:
            os.dup2(other.fileno(), wire.channel._socket.fileno())  # type: ignore[attr-defined]  # as where a test cuts a link
            for ask in (lambda: wire.near_end, lambda: wire.far_end):
                with pytest.raises(WireBroken):
                    ask()
        wire.close()


# Every byte after the handshake


@dataclass(frozen=True)
class Said:
    """One thing that an end says, and how the other end hears it."""

    kind: str
    body: bytes = b""

    def say(self, wire: Wire) -> None:
        if self.kind == "message":
            wire.send(PeerRequest(self.body.hex()))
        elif self.kind == "index":
            wire.send_index(len(self.body))
        elif self.kind in ("chunk", "bare"):
            send_bytes(wire, len(self.body), self.body, bare=self.kind == "bare")
        else:
            wire.send_end()

    def hear(self, wire: Wire) -> Said:
        """What is heard where this is expected. Raises WireBroken."""
        if self.kind == "message":
            return Said("message", bytes.fromhex(wire.receive(PeerRequest).op))
        if self.kind == "index":
            return Said("index", bytes(min(wire.receive_index(), 1000)))
        index, length = wire.receive_chunk_header()
        if index == END:
            return Said("end")
        if length != len(self.body):
            raise WireBroken("a chunk does not fit into the artifact")
        target = bytearray(length)
        if self.kind == "bare":
            wire.receive_into(memoryview(target), self.sealed())
            return Said("bare" if index == length else "a chunk of another place", bytes(target))
        half = len(target) // 2
        for part in (memoryview(target)[:half], memoryview(target)[half:]):
            if part:
                wire.receive_into(part)
        return Said("chunk" if index == length else "a chunk of another place", bytes(target))

    def sealed(self) -> ChunkTag:
        """By the tag that came with the index, long before."""
        tagger = Tagger(TOKEN, JOB_UID, ARTIFACT, "salt")
        tag = tagger.running(len(self.body))
        tag.update(memoryview(self.body))
        told = Tags("salt", NO_TAG * len(self.body) + tag.hex())
        return tagger.running(len(self.body), told.of(len(self.body)))


ARTIFACT = Artifact(0, Version(5, 1))
NO_TAG = "0" * 32
IDENTITY = Identity(JOB_UID, 0, TOKEN, "127.0.0.1")


class Tape(socket.socket):
    """A connection of which one end is this test."""

    def __init__(self, stream: bytes = b"") -> None:
        super().__init__()
        self.sent, self.stream = b"", stream

    def sendall(self, data: Any, flags: int = 0) -> None:  # type: ignore[override]
        self.sent += bytes(data)

    def sendfile_(self, out: int, file: int, offset: int, size: int) -> int:
        assert out == self.fileno()
        self.sent += os.pread(file, size, offset)
        return size

    def recv_into(self, view: Any, size: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        got = min(len(view), len(self.stream))
        view[:got], self.stream = self.stream[:got], self.stream[got:]
        return got


def spoken(
    words: list[Said], encrypted: bool, conversation: bytes = b"this one", back: bool = False
) -> list[bytes]:
    """What travels for each of `words`."""
    frames = []
    with closing(Tape()) as tape, patch.object(os, "sendfile", tape.sendfile_):
        wire = Wire(tape)
        out, into = directions(TOKEN, conversation, encrypted)
        wire.protect(*((into, out) if back else (out, into)), IDENTITY.tagger)
        for word in words:
            word.say(wire)
            frames.append(tape.sent)
            tape.sent = b""
    return frames


def heard(words: list[Said], stream: bytes, encrypted: bool) -> list[Said]:
    """What is understood of `stream` by one who expects `words`, until it hangs up."""
    understood: list[Said] = []
    with closing(Tape(stream)) as tape:
        wire = Wire(tape)
        out, into = directions(TOKEN, b"this one", encrypted)
        wire.protect(into, out, IDENTITY.tagger)
        with suppress(WireBroken):
            for word in words:
                understood.append(word.hear(wire))
    return understood


SAID = st.one_of(
    st.builds(Said, st.just("message"), st.binary(max_size=40)),
    st.integers(0, 40).map(lambda number: Said("index", bytes(number))),
    st.builds(Said, st.sampled_from(["chunk", "bare"]), st.binary(min_size=1, max_size=3000)),
    st.just(Said("end")),
)
MODES = pytest.mark.parametrize("encrypted", [False, True], ids=["authenticated", "encrypted"])


@MODES
@given(words=st.lists(SAID, min_size=1, max_size=6))
@settings(max_examples=examples(60))
def test_what_is_said_is_heard(encrypted: bool, words: list[Said]) -> None:
    assert heard(words, b"".join(spoken(words, encrypted)), encrypted) == words


@MODES
@given(data=st.data())
@settings(max_examples=examples(250))
def test_whatever_is_done_to_the_bytes_on_their_way_nothing_is_heard_that_was_not_said(
    encrypted: bool, data: st.DataObject
) -> None:
    """Bits turned, bytes left out, put in, repeated or swapped, frames of another connection or of the other
    direction."""
    words = data.draw(st.lists(SAID, min_size=1, max_size=6))
    frames = spoken(words, encrypted)
    whole = b"".join(frames)
    how = data.draw(
        st.sampled_from(["flip", "cut", "insert", "repeat", "drop", "swap", "other", "back", "body"])
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    which = data.draw(st.integers(0, len(frames) - 1))
    if how == "flip":
        stream = whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :]
    elif how == "cut":
        stream = whole[:at] + whole[at + data.draw(st.integers(1, 50)) :]
    elif how == "insert":
        stream = whole[:at] + data.draw(st.binary(min_size=1, max_size=50)) + whole[at:]
    elif how == "repeat":
        stream = b"".join([*frames[: which + 1], *frames[which:]])
    elif how == "drop":
        stream = b"".join([*frames[:which], *frames[which + 1 :]])
    elif how == "swap":
        other = data.draw(st.integers(0, len(frames) - 1))
        frames[which], frames[other] = frames[other], frames[which]
        stream = b"".join(frames)
    elif how == "body":  # the bytes of a chunk are in front of its tag, or, bare, behind that of its header
        length = len(words[which].body) if words[which].kind in ("chunk", "bare") else 0
        new = data.draw(st.binary(min_size=length, max_size=length))
        begin = len(frames[which]) - length - (0 if words[which].kind == "bare" and not encrypted else TAG)
        frames[which] = frames[which][:begin] + new + frames[which][begin + length :]
        stream = b"".join(frames)
    else:
        frames[which] = spoken(
            words, encrypted, b"another one" if how == "other" else b"this one", how == "back"
        )[which]
        stream = b"".join(frames)
    understood = heard(words, stream, encrypted)
    assert understood == words[: len(understood)], "a beginning of what was said"
    same = next(
        (n for n, (one, two) in enumerate(zip(whole, stream, strict=False)) if one != two), len(whole)
    )
    if len(understood) == len(words):
        assert stream[: len(whole)] == whole
    else:
        assert same < len(whole) or len(stream) < len(whole), "nothing is refused without need"


class Turning(Between):
    """On the path between two sidecars, which turns one bit of what the caller says."""

    def __init__(self, here: tuple[str, int], there: tuple[str, int], at: int | None = None) -> None:
        self.at = at
        super().__init__(here, there)

    def pass_on(self, data: bytes, side: str, offset: int) -> bytes:
        if side == "called" or self.at is None or not offset <= self.at < offset + len(data):
            return data
        place, self.at = self.at - offset, None
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@contextmanager
def on_the_path(
    job: Stations, monkeypatch: pytest.MonkeyPatch, at: int | None = None
) -> Iterator[tuple[Turning, ConnectionPool]]:
    """Worker 0's line to worker 1 leads through somebody who is no end of it: both believe to be connected
    directly."""
    here = (f"{job.network}.200", job.port)
    monkeypatch.setattr(Wire, "near_end", property(lambda _: here))
    with (
        closing(Turning(here, (job.host(1), job.port), at)) as middle,
        ConnectionPool(lambda: dial(job[0].identity, 1, Peer(1, here[0]), job.port)) as line,
    ):
        yield middle, line


@pytest.mark.parametrize("how", ["with tags", "without tags", "encrypted"])
def test_bit_that_turned_on_the_way_is_noticed_and_the_copy_is_right_in_the_end(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    job = stations()
    job[0].identity.encrypts = lambda: how == "encrypted"
    if how == "without tags":
        monkeypatch.setattr(job[0].vault, "_tagger", lambda _: None)
    seal = job[0].save(Version(5, 1), 2 * MIB)
    assert (seal.tags is None) == (how == "without tags")
    with on_the_path(job, monkeypatch, at=MIB) as (middle, line):
        assert push(job[0].vault, seal, line)
        assert middle.at is None
        assert line.sent > seal.digests.size, "the chunk was sent again"
    assert job[1].content(seal, Tier.PEER) == job[0].content(seal, Tier.LOCAL)


@pytest.mark.parametrize("who", ["caller", "called", "nobody"])
def test_whoever_listens_reads_the_state_only_if_neither_end_wants_it_encrypted(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    job = stations()
    for worker, name in enumerate(("caller", "called")):
        job[worker].identity.encrypts = lambda wanted=who == name: wanted  # type: ignore[misc]
    seal = job[0].save(Version(5, 1), 2 * MIB)
    content = job[0].content(seal, Tier.LOCAL)
    with on_the_path(job, monkeypatch) as (middle, line):
        assert push(job[0].vault, seal, line)
    sides = middle.heard["caller"] + middle.heard["called"]
    secret = [content[MIB : MIB + 64], b'"offer"', b"weight"]
    assert [each in sides for each in secret] == [who == "nobody"] * 3
    assert job[1].content(seal, Tier.PEER) == content


def test_every_connection_of_a_sidecar_is_encrypted_once_its_job_wants_that(stations: MakeStations) -> None:
    (station,) = stations(workers=1).stations
    sidecar = Sidecar(station.state.config)
    directive = station.state.directive
    assert directive is not None
    assert not sidecar.identity.encrypts()
    policy = replace(directive.policy, peer_encrypted=True)
    sidecar.state.accept(replace(directive, policy=policy, instance=sidecar.state.instance))
    assert sidecar.identity.encrypts()
    for part in (sidecar.replicator, sidecar.parity, sidecar.heartbeat, sidecar.exchange):
        assert part._identity is sidecar.identity


def test_caller_that_wants_encryption_hangs_up_on_one_who_does_not_grant_it(stations: MakeStations) -> None:
    """A sidecar that does not know of it proves who it is, and would go on in the clear."""
    job = stations(workers=1)
    host = f"{job.network}.200"
    job[0].identity.encrypts = lambda: True

    def answer(wire: Wire) -> None:
        claim = wire.receive(CallerClaim)
        blank = Challenge(1, "nonce", "", 1)
        proof = handshake._proof(TOKEN, "server", claim, blank, (host, job.port))
        wire.send(Challenge(1, "nonce", proof, 1))
        with suppress(WireBroken):
            said.append(wire.receive(CallerProof))

    said: list[CallerProof] = []
    with answering(answer, host, job.port), pytest.raises(PeerRefused, match="does not encrypt"):
        dial(job[0].identity, 1, Peer(1, host), job.port)
    assert said == []
