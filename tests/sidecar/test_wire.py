"""The wire keeps what the handshake proved: who is meant, who is heard, and every byte that they say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from stations import JOB, TOKEN, Stations

from tiercheck.protocol.directive import Peer
from tiercheck.protocol.version import Version
from tiercheck_sidecar.exchange.frames import Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import Challenge, Claim, Identity, PeerRefused, Proof, admit, dial
from tiercheck_sidecar.exchange.line import Line
from tiercheck_sidecar.exchange.sender import push

MakeStations = Callable[..., Stations]
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
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            end.close()
        for thread in self._threads:
            thread.join(10)

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
        Line(lambda: dial(job[0].identity, 1, Peer(1, dead[0]), job.port)) as line,
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


def test_sidecar_that_is_to_be_another_worker_and_was_not_told_yet_counts_as_there(stations: MakeStations) -> None:
    job = stations(workers=3)
    with pytest.raises(PeerRefused) as refused:
        dial(job[0].identity, 2, Peer(1, job.host(2)), job.port)
    assert refused.value.attempt == 1


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
        wire.receive(Claim)
        wire.send(Challenge(1, "nonce", proof))

    with answering(answer, host, job.port), pytest.raises(PeerRefused, match="does not know this job's token"):
        dial(job[0].identity, 1, Peer(1, host), job.port)


@pytest.mark.parametrize("proof", NO_PROOFS)
def test_proof_of_any_text_is_refused_by_the_one_who_is_called(proof: str) -> None:
    ours = socket.create_server(("127.0.0.1", 0))
    with closing(ours), closing(socket.create_connection(ours.getsockname())) as theirs:
        caller = Wire(theirs)
        caller.send(Claim(JOB, 1, 1, "nonce"))
        caller.send(Proof(proof))
        with (
            closing(Wire(ours.accept()[0])) as wire,
            pytest.raises(PeerRefused, match="does not know this job's token"),
        ):
            admit(wire, Identity(JOB, 0, TOKEN, "127.0.0.1"), lambda _: "")
