"""Sidecars and their coordinator talk over TLS, and who means ill there harms nobody else."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from tests.sidecar.stations import MakeStations
from tests.sidecar.versions.reports import RankTiers, TierReport, tell, written
from tests.sidecar.world import DEADLINE, JOB_UID, MakeWorld, World, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import ConnectionFailure
from tiercheck.protocol.version import Version
from tiercheck_sidecar.control.api import _Line
from tiercheck_sidecar.decoding import Malformed, encode
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.tier_verdict import Span
from tiercheck_sidecar.versions import tier_line
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.report_updates import ReportUpdate, TierAnswer
from tiercheck_sidecar.versions.tally import WorkerHead
from tiercheck_sidecar.versions.tier_line import (
    PATH,
    PROTOCOL,
    AnswerLate,
    CallFailed,
    CoordinatorClient,
    Messages,
    framed,
)


class Far:
    """Worker 1's end; its own process is not there."""

    def __init__(self, world: World, token: str | None = None) -> None:
        config = SidecarConfig.from_env(world.env(1))
        config = config if token is None else replace(config, token=token)
        self.heard: SimpleQueue[TierAnswer] = SimpleQueue()
        self.world, self.line = world, CoordinatorClient(config, world.host(0), self.heard.put)

    def say(self, step: int, number: int, attempt: int | None = None) -> TierAnswer:
        tiers = RankTiers(1, (Span(1, step, step),), (Version(step, 1),), reached=Version(step, 1))
        report = TierReport(JOB_UID, attempt or self.world.attempt, 1, (tiers,))
        try:
            return self.line.send(written(report, number), number)
        except AnswerLate:
            return until(self.waited, "an answer")

    def waited(self) -> TierAnswer | None:
        with contextlib.suppress(AnswerLate):
            return self.line.wait()
        return None


@pytest.fixture
def patience() -> dict[str, float]:
    return {}


@pytest.fixture
def world(make_world: MakeWorld, patience: dict[str, float]) -> World:
    world = make_world(workers=3)
    world.patience |= patience
    world.start(0)
    world.begin()
    return world


def test_what_is_said_is_answered_and_verdicts_come_on_their_own(world: World) -> None:
    far = Far(world)
    assert far.say(4, 1) == TierAnswer(1)
    assert far.heard.get(timeout=10).verdict is not None
    assert far.say(5, 2) == TierAnswer(2)
    far.line.close()


def test_dead_coordinator_is_noticed_and_the_next_one_is_found(world: World) -> None:
    far = Far(world)
    far.say(4, 1)
    world.kill(0)
    until(lambda: not far.line.is_open, "the end of the connection is seen")
    with pytest.raises(CallFailed) as failed:
        far.say(5, 2)
    assert failed.value.how is ConnectionFailure.REFUSED
    world.start(0)
    world.direct(Phase.RELEASE)
    assert far.say(5, 3) == TierAnswer(3)
    far.line.close()


def test_without_the_token_there_is_no_connection(world: World) -> None:
    with pytest.raises(CallFailed, match="401"):
        Far(world, token="guessed").say(4, 1)
    assert world.call(0, "GET", PATH, token="wrong")[0] == 401
    assert world.call(0, "GET", PATH)[0] == 426, "nothing else is spoken there"


def test_message_without_end_ends_the_connection_alone(world: World) -> None:
    far, other = Far(world), Far(world)
    far.say(4, 1), other.say(4, 1)
    with pytest.raises(CallFailed):
        far.line.send(b"x" * (20 << 20), 2)
    assert other.say(5, 2) == TierAnswer(2)
    assert world.is_ready(0)
    other.line.close()


def test_report_of_an_attempt_that_is_over_is_refused(world: World) -> None:
    far = Far(world)
    world.begin()
    assert far.say(4, 1, attempt=1).refused == "attempt 1 is over, the job is at attempt 2"
    far.line.close()


def test_messages_come_in_pieces_of_any_size() -> None:
    said = [b"", b"a", b"bc" * 1000]
    stream = b"".join(map(framed, said))
    for size in (1, 3, len(stream)):
        messages = Messages()
        found = [text for at in range(0, len(stream), size) for text in messages.feed(stream[at : at + size])]
        assert found == said
    with pytest.raises(Malformed):
        Messages().feed(b"\xff\xff\xff\xff")


# Somebody with the job's token who means ill


Connect = Callable[..., ssl.SSLSocket]
PORT = "tiercheck_sidecar.control.api"


@pytest.fixture
def connect(world: World) -> Iterator[Connect]:
    """Somebody with the token, at an address of his own."""
    opened: list[ssl.SSLSocket] = []
    context = ssl.create_default_context(cafile=str(world.root / "credentials" / "ca.crt"))

    def connect(worker: int = 0, more: bytes = b"") -> ssl.SSLSocket:
        raw = socket.create_connection((world.host(worker), names.CONTROL_PORT), DEADLINE, (world.host(2), 0))
        connection = context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)
        opened.append(connection)
        head = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n"
        connection.sendall(f"{head}Authorization: Bearer {world.token}\r\n\r\n".encode() + more)
        return connection

    yield connect
    for connection in opened:
        connection.close()


def is_over(connection: ssl.SSLSocket) -> bool:
    """Whatever came before is read. False if it is still open after seconds."""
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def word(world: World, worker: int, number: int = 1) -> bytes:
    return written(TierReport(JOB_UID, world.attempt, worker, (RankTiers(worker),)), number)


def test_who_says_more_before_he_is_answered_is_cut_off(world: World, connect: Connect) -> None:
    """Or a flood would fill the coordinator's memory, and keep everybody waiting."""
    flood = connect()
    assert b" 101 " in flood.recv(4096)
    flood.sendall(framed(word(world, 2)) * 50)
    assert is_over(flood)
    honest = Far(world)
    assert honest.say(4, 1) == TierAnswer(1)
    honest.line.close()


def test_crowd_of_connections_finds_no_more_than_its_room(world: World, connect: Connect) -> None:
    honest = Far(world)
    assert honest.say(4, 1) == TierAnswer(1)
    crowd = []
    for _ in range(80):
        crowd.append(connect())
        assert b" 101 " in crowd[-1].recv(4096)
    assert all(map(is_over, crowd[:10])), "70 are the most, and the oldest of a crowd give way"
    assert honest.say(5, 2) == TierAnswer(2)
    honest.line.close()


def test_who_speaks_in_anothers_name_keeps_him_out_for_a_moment_only(world: World) -> None:
    honest, other = Far(world), Far(world)
    assert honest.say(4, 1) == TierAnswer(1)
    assert other.say(9, 1) == TierAnswer(1)
    until(lambda: not honest.line.is_open, "the older connection ends")
    assert honest.say(5, 2) == TierAnswer(2), "on a new one"
    until(lambda: not other.line.is_open, "the impostor's ends")
    honest.line.close()


@pytest.mark.parametrize("patience", [{f"{PORT}:_LEAST_SILENCE": 0.2, f"{PORT}:_SILENCES": 0.2}])
def test_who_says_nothing_any_more_is_forgotten(world: World, connect: Connect) -> None:
    assert is_over(connect())


def test_nobody_is_connected_to_a_sidecar_that_coordinates_nothing(world: World, connect: Connect) -> None:
    world.start(1)
    assert b" 503 " in connect(1).recv(4096)


def test_words_that_come_with_the_question_do_no_harm(world: World, connect: Connect) -> None:
    connect(more=framed(word(world, 2)) + b"\xff" * 100)
    connect(more=b"GET /v1/report?wait=0 HTTP/1.1\r\nHost: x\r\n\r\n")
    honest = Far(world)
    assert honest.say(4, 1) == TierAnswer(1)
    honest.line.close()


def test_numbers_out_of_order_are_taken_for_no_base(world: World, connect: Connect) -> None:
    odd = connect()
    assert b" 101 " in odd.recv(4096)
    for number, base in ((-1, 0), (0, 0), (2**62, 7), (3, 2**62), (3, 3), (3, -3)):
        odd.sendall(framed(encode(ReportUpdate(number, base, WorkerHead(JOB_UID, world.attempt, 2)))))
        assert odd.recv(4096)
    honest = Far(world)
    assert honest.say(4, 1) == TierAnswer(1)
    honest.line.close()


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (RankTiers(2, snapshots=tuple(Version(k, 1) for k in range(300))), "300 versions"),
        (RankTiers(2, leaving=(Version(-1, 1),)), "cannot be"),
    ],
)
def test_what_would_be_told_to_all_is_bounded(stations: MakeStations, tiers: RankTiers, why: str) -> None:
    coordinator = Coordinator(stations(workers=3)[0].state)
    assert why in tell(coordinator, TierReport(JOB_UID, 1, 2, (tiers,))).refused


def test_text_that_would_become_far_more_than_it_is_is_refused(stations: MakeStations) -> None:
    text = b'{"number":1,"own":[' + b",".join([b'{"rank":1}'] * 300_000) + b"]}"
    answer = Coordinator(stations(workers=3)[0].state).handle_update(Caller(), text)
    assert "values" in answer.refused


def test_who_reads_nothing_is_cut_off_before_much_waits_for_him() -> None:
    aborted: list[bool] = []
    waiting = [0]
    transport = SimpleNamespace(
        is_closing=lambda: bool(aborted),
        write=lambda data: waiting.__setitem__(0, waiting[0] + len(data)),
        get_write_buffer_size=lambda: waiting[0],
        abort=lambda: aborted.append(True),
    )
    line = SimpleNamespace(_transport=transport)
    for _ in range(100):
        _Line.write(line, b"x" * 100_000)  # type: ignore[arg-type]
    assert waiting[0] < 1_300_000


ENDLESS = {
    "a head without end": b"HTTP/1.1 101 Switching",
    "a message without end": b"HTTP/1.1 101 Switching Protocols\r\n\r\n\xff\xff\xff\xff",
    "no message": b"HTTP/1.1 101 Switching Protocols\r\n\r\n\0\0\0\0",
    "a verdict that is none": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + framed(b'{"verdict":7}'),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_coordinator_that_lies_is_given_up(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = make_world(workers=2)
    monkeypatch.setattr(tier_line, "_CONNECT_PATIENCE", 1.0)
    monkeypatch.setattr(tier_line, "_PATIENCE", 0.4)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.root / "credentials" / "tls.crt", world.root / "credentials" / "tls.key")
    over = threading.Event()
    with socket.create_server((world.host(0), names.CONTROL_PORT)) as listener:

        def answer() -> None:
            with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.recv(65536)
                connection.sendall(ENDLESS[name])
                over.wait(20)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CallFailed):
            Far(world).say(4, 1)
        over.set()
        thread.join()
