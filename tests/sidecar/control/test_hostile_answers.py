"""Promise: nothing that another sidecar says ends what this one does."""

from __future__ import annotations

import dataclasses
import gzip
import socket
import struct
from collections.abc import Callable

import pytest

from tests.sidecar.stations import Stations
from tests.sidecar.versions.reports import RankTiers, TierReport, tell
from tests.sidecar.world import JOB_UID, World, error_of
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import to_json
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, Challenge
from tiercheck_sidecar.model.config import ConfigError, SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator

MakeWorld = Callable[..., World]
MakeStations = Callable[..., Stations]
SENSELESS = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"worker":1,"nonce":"\xff","proof":""}', b'{"x":' + b"[" * 6000,
        b'{"worker":' + b"9" * 5000 + b"}",
    b'{"worker":1e400,"nonce":"","proof":""}',
    b'{"worker":18446744073709551616,"nonce":"","proof":"","state":"x","op":"x","rank":99999999999999999999}',
)  # fmt: skip


@pytest.fixture
def state(stations: MakeStations) -> SidecarState:
    return stations(workers=2)[0].state


@pytest.mark.parametrize("text", SENSELESS, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("cls", [Ask, Say, CallerClaim, Challenge])
def test_every_senseless_message_breaks_its_connection_and_nothing_else(text: bytes, cls: type) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as theirs:
        ours, _ = listener.accept()
        wire = Wire(ours)
        theirs.sendall(struct.pack("<I", len(text)) + text)
        with pytest.raises(WireBroken):
            wire.receive(cls)
        wire.close()


@pytest.mark.parametrize("claimed", [10**4, 10**9, 10**18, 2**63 - 1])
def test_an_attempt_that_cannot_be_is_not_believed(state: SidecarState, claimed: int) -> None:
    assert state.attempt == 1
    state.learn(claimed)
    assert (state.newest_attempt, state.fenced) == (1, False)
    state.learn(3)
    assert (state.newest_attempt, state.fenced) == (3, True), "one that can be is believed all the same"


def test_what_was_claimed_before_the_first_directive_counts_if_it_can_be_true(state: SidecarState) -> None:
    for claimed, fenced in ((7, True), (10**18, False)):
        fresh = SidecarState(state.config)
        fresh.learn(claimed)
        assert state.directive is not None
        fresh.accept(dataclasses.replace(state.directive, attempt=5, instance=fresh.instance))
        assert fresh.fenced is fenced


def test_step_by_step_nobody_is_led_away_either(state: SidecarState) -> None:
    for claimed in range(500, 100_000, 500):
        state.learn(claimed)
    assert state.newest_attempt <= state.attempt + 1000


def test_an_environment_of_nonsense_is_named(make_world: MakeWorld) -> None:
    env = make_world().env(0)
    for text in ("²", "٣", "-1", "1_0", "1e3", "9" * 5000, " 1"):
        for name in (names.ENV_WORKER, names.ENV_MEMORY_LIMIT, names.ENV_GRACE_SECONDS):
            with pytest.raises(ConfigError, match=name):
                SidecarConfig.from_env({**env, name: text})


def test_a_compressed_body_is_no_message(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.new_attempt()
    body = gzip.compress(to_json(world.directive(0, Phase.HOLD)))
    status, said = world.call(0, "PUT", "/v1/directive", body, headers={"Content-Encoding": "gzip"})
    assert (status, "not a directive" in error_of(said)) == (422, True)
    assert world.report(0).attempt == 0


def test_the_control_api_refuses_every_senseless_body_with_a_sentence(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    for body in SENSELESS:
        status, said = world.call(0, "PUT", "/v1/directive", body)
        assert (status, error_of(said)[:5]) == (422, "not a"), body[:40]


@pytest.mark.parametrize("text", SENSELESS, ids=lambda text: repr(text[:20]))
def test_coordinator_refuses_every_senseless_report(state: SidecarState, text: bytes) -> None:
    coordinator = Coordinator(state)
    assert coordinator.hear_news(Caller(), text).refused
    assert not tell(coordinator, TierReport(JOB_UID, 1, 1, (RankTiers(1),))).refused
