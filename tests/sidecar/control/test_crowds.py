"""However many strangers come, the job's own parts find room on every port of a sidecar."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.operator_key import sign_pod
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.world import MakeWorld, write_credentials
from tiercheck import connections
from tiercheck.connections import UnauthenticatedClient, UnauthenticatedClients, pick_victim
from tiercheck.protocol import names
from tiercheck.protocol.directive import Peer
from tiercheck_sidecar.control import api
from tiercheck_sidecar.control.api import ControlApi, GuardedPort, server_context
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.exchange import server
from tiercheck_sidecar.model.watches import named_addresses

ROOM = 16


@contextmanager
def silent(count: int, there: tuple[str, int], network: str, addresses: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing, from so many addresses."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(there, 10, (f"{network}.{n % addresses + 1}", 0)))
            for n in range(count)
        ]


@pytest.mark.parametrize("addresses", [1, 5, 2 * ROOM])
def test_peer_is_admitted_whatever_crowd_of_strangers_says_nothing(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch, addresses: int
) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", ROOM)
    job = stations(workers=2)
    strangers = job.network.rsplit(".", 1)[0] + ".251"
    with silent(3 * ROOM, (job.host(0), job.port), strangers, addresses):
        for _ in range(10):
            job[1].connect(0).close()


def test_peer_that_no_directive_names_is_admitted_too(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a loss: a worker reads copies of those who are not its neighbours any more."""
    monkeypatch.setattr(server, "_MOST_STRANGERS", ROOM)
    job = stations(workers=5)
    assert job.host(2) not in {
        peer.host for peer in (*job[0].state.directive.holders, *job[0].state.directive.hosted)
    }
    with silent(3 * ROOM, (job.host(0), job.port), job.network.rsplit(".", 1)[0] + ".251", 1):
        for _ in range(10):
            job[2].connect(0).close()


def test_strangers_hold_no_more_than_their_room(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", ROOM)
    job = stations(workers=2)
    strangers = job.network.rsplit(".", 1)[0] + ".251"
    with silent(3 * ROOM, (job.host(0), job.port), strangers, 3) as connections:
        for one in connections[: 2 * ROOM]:  # those who came first gave way
            assert one.recv(1) == b""


ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"])


@given(
    arrivals=st.lists(ADDRESSES, max_size=80),
    named=st.frozensets(ADDRESSES),
    most=st.integers(1, 10),
    per_address=st.integers(1, 6),
)
def test_whoever_comes_finds_room_and_no_one_else_takes_that_of_a_named_address(
    arrivals: list[str], named: frozenset[str], most: int, per_address: int
) -> None:
    guests: list[UnauthenticatedClient] = []
    for address in arrivals:
        loser = pick_victim(guests, address, named, most, per_address)
        counts = Counter(guest.address for guest in guests if guest.address not in named)
        if loser is not None:
            if loser.address != address:
                assert loser.address not in named, "its room is its own"
                assert counts[loser.address] == max(counts.values()), "whoever crowds most gives way"
            assert loser is next(guest for guest in guests if guest.address == loser.address), "the oldest"
            guests.remove(loser)
        guests.append(UnauthenticatedClient(address, lambda: None))
        everyone = Counter(guest.address for guest in guests)
        assert max(everyone.values()) <= per_address
        assert sum(count for each, count in everyone.items() if each not in named) <= most


def test_address_that_makes_no_sense_names_nobody(stations: MakeStations) -> None:
    """A directive never ends the loop that lets peers in."""
    directive = stations(workers=1)[0].state.directive
    assert directive is not None
    odd = ["", "x", "10.0.0.9:", "10.0.0.9:port", "[fd00::1]", "[", "]:", "\x00", "1:2"]
    hosts = [*odd, "10.0.0.9", "10.0.0.10:12000", "[fd00::1]:12003"]
    named = named_addresses(replace(directive, holders=tuple(Peer(1, host) for host in hosts)))
    assert named >= {"10.0.0.9", "10.0.0.10", "fd00::1"}
    assert named_addresses(None) == frozenset()


# Ports for HTTP


class Port:
    """The control API of a sidecar on its guarded port, in this process."""

    def __init__(self, job: Stations, root: Path, most: int) -> None:
        write_credentials(root / "credentials")
        self.here = (f"{job.network}.77", names.CONTROL_PORT)
        state = job[0].state
        api = ControlApi(state, Reporter(state, job[0].vault))
        config = type(state.config)(**{**vars(state.config), "credentials_dir": root / "credentials"})
        self.guard = GuardedPort(api.build(), UnauthenticatedClients(lambda: most), server_context(config))
        api.on_proof = self.guard.believe
        self.token = config.token

    async def __aenter__(self) -> Port:
        await self.guard.start(*self.here)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.guard.stop()

    def dial(self, encrypted: bool = True) -> socket.socket:
        raw = socket.create_connection(self.here, 10)
        if not encrypted:
            return raw
        return insecure().wrap_socket(raw)

    def ask(
        self, token: bytes | None = None, path: str = "/v1/report", wire: socket.socket | None = None
    ) -> bytes:
        """The status line of an answer."""
        given = self.token.encode() if token is None else token
        (header,) = (": ".join(pair) for pair in sign_pod("pod-0").items())
        text = f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\nAuthorization: Bearer ".encode()
        text += given + b"\r\n\r\n"
        if wire is None:
            with self.dial() as own:
                own.sendall(text)
                return own.recv(4096).split(b"\r\n")[0]
        wire.sendall(text)
        return wire.recv(65536).split(b"\r\n")[0]


async def test_whoever_has_the_token_is_answered_whatever_crowd_of_strangers_holds_connections(
    stations: MakeStations, tmp_path: Path
) -> None:
    async with Port(stations(), tmp_path, ROOM) as port:
        with ExitStack() as stack:
            for n in range(3 * ROOM):
                stack.enter_context(await asyncio.to_thread(port.dial, n % 2 == 0))
            for _ in range(5):
                assert b" 200 " in await asyncio.to_thread(port.ask)


async def test_stranger_is_hung_up_on_and_who_has_the_token_may_stay(
    stations: MakeStations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Port(stations(), tmp_path, ROOM) as port:
        with ExitStack() as stack:
            friend = stack.enter_context(await asyncio.to_thread(port.dial))
            assert b" 200 " in await asyncio.to_thread(port.ask, wire=friend)
            monkeypatch.setattr(api, "PATIENCE", 0.3)
            for say in STRANGE:
                raw = stack.enter_context(await asyncio.to_thread(port.dial, False))
                assert await asyncio.to_thread(ended, raw, say)
            assert b" 200 " in await asyncio.to_thread(port.ask, wire=friend)


STRANGE: list[bytes | None] = [
    None,  # not even TLS
    b"",
    b"GET /v1/report HTTP/1.1\r\nHo",
    b"GET /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guessed\r\n\r\n",
]


def ended(raw: socket.socket, say: bytes | None) -> bool:
    """Whether the other side hangs up on who says that, through TLS, and no more."""
    connection = raw
    try:
        if say is not None:
            connection = insecure().wrap_socket(raw)
            connection.sendall(say)
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.close()
    return True


def insecure() -> ssl.SSLContext:
    """As one who checks nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.parametrize("token", [b"\xff", b"\xc3\xa9", b"", b"token\xff"])
async def test_token_of_any_bytes_is_refused(stations: MakeStations, tmp_path: Path, token: bytes) -> None:
    async with Port(stations(), tmp_path, ROOM) as port:
        assert b" 401 " in await asyncio.to_thread(port.ask, token)


@pytest.mark.parametrize("wait", ["nan", "inf", "-inf"])
async def test_call_that_waits_for_no_time_at_all_is_malformed(
    stations: MakeStations, tmp_path: Path, wait: str
) -> None:
    async with Port(stations(), tmp_path, ROOM) as port:
        said = await asyncio.to_thread(port.ask, None, f"/v1/report?after=99&wait={wait}")
        assert b" 422 " in said


async def test_port_that_could_not_accept_for_a_while_accepts_again(
    stations: MakeStations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a process has no descriptor left."""
    failures = 3
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def failing(listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(24, "Too many open files")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr(connections, "_AGAIN", 0.0)

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.add_routes([web.get("/", hello)])
    host = f"{stations().network}.78"
    port = GuardedPort(app, UnauthenticatedClients(lambda: ROOM))
    await port.start(host, 8470)

    def ask() -> bytes:
        connection = http.client.HTTPConnection(host, 8470, timeout=10)
        try:
            connection.request("GET", "/")
            return connection.getresponse().read()
        finally:
            connection.close()

    try:
        assert await asyncio.to_thread(ask) == b"hello"
    finally:
        await port.stop()
    assert failures == 0


def test_strangers_on_the_metrics_port_keep_no_probe_out(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((world.host(0), names.METRICS_PORT), 10))
        assert world.is_ready(0)
