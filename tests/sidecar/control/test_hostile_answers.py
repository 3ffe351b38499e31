"""Promise: nothing that another sidecar says ends what this one does."""

from __future__ import annotations

import dataclasses
import gzip
import socket
import struct

import pytest

from tests.operator_key import sign_attempt
from tests.sidecar.stations import MakeStations
from tests.sidecar.versions.reports import RankTiers, TierReport, tell
from tests.sidecar.world import JOB_UID, MakeWorld, error_of
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.signing import SignedAttempt
from tiercheck_sidecar.exchange.frames import Ask, Say, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import CallerClaim, Challenge
from tiercheck_sidecar.model.config import ConfigError, SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator

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


SIGNED = sign_attempt(JOB_UID, 40)
UNSIGNED = [SignedAttempt(2), SignedAttempt(40), SignedAttempt(2, SIGNED.signature), SignedAttempt(2, "²"),
    SignedAttempt(41, SIGNED.signature), SignedAttempt(2**63, "00" * 64),
    sign_attempt("another job", 40)]  # fmt: skip


@pytest.mark.parametrize("claimed", UNSIGNED)
def test_an_attempt_that_the_operator_has_not_signed_is_not_believed(
    state: SidecarState, claimed: SignedAttempt
) -> None:
    state.learn(claimed)
    assert (state.newest_attempt.attempt, state.fenced) == (1, False)


def test_a_signed_attempt_is_believed_however_far_ahead_it_is(state: SidecarState) -> None:
    state.learn(SIGNED)
    assert (state.newest_attempt, state.fenced) == (SIGNED, True)


def test_what_was_learned_before_the_first_directive_counts(state: SidecarState) -> None:
    fresh = SidecarState(state.config)
    fresh.learn(SIGNED)
    assert state.directive is not None
    fresh.accept(dataclasses.replace(state.directive, attempt=5, instance=fresh.instance))
    assert fresh.fenced
    fresh.accept(dataclasses.replace(state.directive, attempt=41, instance=fresh.instance, number=2))
    assert not fresh.fenced, "the operator began above it"


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
