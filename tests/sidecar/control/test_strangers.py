"""Nobody without the job's credentials, and nothing of an older attempt, is heard on any channel.

Promise: nothing that another sidecar says ends what this one does.
"""

from __future__ import annotations

import dataclasses
import gzip
import socket
import ssl
import struct
import threading
from dataclasses import replace

import pytest

from tests.operator_key import sign_attempt, sign_pod
from tests.sidecar.stations import MakeStations, image, send_bytes
from tests.sidecar.versions.reports import RankTiers, TierReport, tell
from tests.sidecar.world import JOB_UID, MakeWorld, World, error_of, layout, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive, Phase
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report, Watermarks
from tiercheck.protocol.signing import HEADER, SignedAttempt
from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import decode
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange.frames import PeerRequest, PeerResponse, Wire, WireBroken
from tiercheck_sidecar.exchange.handshake import (
    CallerClaim,
    CallerProof,
    Challenge,
    Identity,
    PeerRefused,
    dial,
)
from tiercheck_sidecar.model.config import ConfigError, SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.tier_line import PATH


def identity(world: World, worker: int, token: str | None = None, job_uid: str = JOB_UID) -> Identity:
    return Identity(job_uid, worker, token or world.token, world.host(worker))


def reach(world: World, who: Identity, attempt: int, target: int) -> Wire:
    return dial(who, attempt, world.peer(target), names.EXCHANGE_PORT)


def test_control_api_refuses_without_the_token(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.new_attempt()
    body = to_json(world.directive(0, Phase.HOLD))
    for method, path in (("PUT", "/v1/directive"), ("GET", "/v1/report"), ("GET", PATH)):
        for token in ("", "wrong", world.token[:-1]):
            assert world.call(0, method, path, body, token=token)[0] == 401
    assert world.report(0).attempt == 0


@pytest.mark.parametrize("signature", ["", "00" * 64, "²", "that of another pod"])
def test_who_has_the_token_of_the_job_does_not_speak_for_the_operator(
    make_world: MakeWorld, signature: str
) -> None:
    """Each sidecar has the token. What the operator shows to one pod is worth nothing at another."""
    world = make_world()
    world.start()
    world.new_attempt()
    shown = sign_pod("pod-1") if " " in signature else {HEADER: signature}
    body = meant_for(world.report(0), world.directive(0, Phase.FINISH))
    for method, path in (("PUT", "/v1/directive"), ("GET", "/v1/report")):
        assert world.call(0, method, path, body, headers=shown)[0] == 403
    assert world.report(0).attempt == 0


def test_certificate_is_of_the_jobs_own_authority(make_world: MakeWorld) -> None:
    world, other = make_world(), make_world()
    world.start()
    context = ssl.create_default_context(cafile=str(other.root / "credentials" / "ca.crt"))
    with socket.create_connection((world.host(0), names.CONTROL_PORT)) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname=names.TLS_SERVER_NAME)


def test_exchange_refuses_a_caller_without_the_token(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with pytest.raises(PeerRefused, match="does not know this job's token"):
        reach(world, identity(world, 1, token="guessed"), 1, 0)


def test_exchange_refuses_a_caller_that_ignores_the_servers_proof(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    wire = Wire(socket.create_connection((world.host(0), names.EXCHANGE_PORT)))
    wire.send(CallerClaim(JOB_UID, 1, 1, "nonce"))
    challenge = wire.receive(Challenge)
    wire.send(CallerProof(challenge.proof))  # the server's own proof, sent back
    with pytest.raises(WireBroken):
        wire.receive(PeerResponse)
    wire.close()


def test_caller_recognises_a_server_without_the_token(make_world: MakeWorld) -> None:
    """A process that took a dead pod's address learns nothing and is sent nothing."""
    world = make_world(workers=2)
    with socket.create_server((world.host(1), names.EXCHANGE_PORT)) as impostor:

        def pretend() -> None:
            wire = Wire(impostor.accept()[0])
            wire.receive(CallerClaim)
            wire.send(Challenge(1, "nonce", "0" * 64))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PeerRefused, match="does not know this job's token"):
            reach(world, identity(world, 0), 1, 1)
        thread.join()


def test_exchange_refuses_another_jobs_sidecar(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with pytest.raises(PeerRefused, match="belongs to job"):
        reach(world, identity(world, 1, job_uid="recreated"), 1, 0)


def test_partitioned_old_worker_is_refused_and_nothing_it_sends_is_readable(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    world.save_everywhere(10)
    early = reach(world, identity(world, 1), 1, 0)  # a connection from before the partition healed
    artifact = image(1, Version(20, 1), layout(300_000), world_size=2)
    early.send(PeerRequest("offer", 1, Version(20, 1), 2, digest(memoryview(artifact))))
    offered = early.receive(PeerResponse)
    assert offered.state == "send"
    world.begin(Version(10, 1))
    with pytest.raises(PeerRefused, match="attempt 1 is over"):
        reach(world, identity(world, 1), 1, 0)
    early.send(PeerRequest("join", transfer=offered.transfer))
    send_bytes(early, 0, artifact)
    early.send_end()
    assert early.receive(PeerResponse).damaged == ()
    early.send(PeerRequest("commit", transfer=offered.transfer))
    assert early.receive(PeerResponse).state == "refused"
    early.send(PeerRequest("offer", 1, Version(21, 1), 2, digest(memoryview(artifact))))
    assert early.receive(PeerResponse).state == "refused"
    early.close()
    assert not world.holds(0, 1, Version(20, 1))
    assert world.report(0).counters.refused_stale >= 3


def test_older_directive_is_refused(make_world: MakeWorld) -> None:
    world = make_world().launch()
    old = world.directive(0, Phase.HOLD)
    world.begin()
    status, body = world.send(0, old)
    assert (status, error_of(body)) == (409, "attempt 1 is over, the job is at attempt 2")
    status, body = world.send(0, world.directive(0, Phase.HOLD))
    assert status == 409
    assert "past Hold" in error_of(body)
    assert world.report(0).counters.refused_stale >= 1


def test_verdict_of_an_older_attempt_is_not_followed(stations: MakeStations) -> None:
    job = stations(workers=2)
    job.next_attempt()
    state = job[1].state
    state.follow(TierVerdict(1, Watermarks(local=Version(99, 1)), floor=Version(99, 1)))
    assert state.verdict is None
    assert state.counters.refused_stale == 1


def meant_for(report: Report, directive: Directive) -> bytes:
    """As an operator that has heard `report` last would send it."""
    return to_json(replace(directive, instance=report.instance, number=report.followed + 1))


def test_directive_that_arrives_after_a_later_one_of_its_attempt_is_refused_and_may_be_repeated(
    make_world: MakeWorld,
) -> None:
    world = make_world().launch()
    early = replace(world.directive(0, Phase.RELEASE), placement="one", revision="early")
    later = replace(early, placement="other", revision="later")
    known = world.report(0)
    first = meant_for(known, early)
    assert world.call(0, "PUT", "/v1/directive", first)[0] == 200
    answer = world.call(0, "PUT", "/v1/directive", meant_for(world.report(0), later))
    assert decode(answer[1], Report).followed == known.followed + 2
    for _ in range(2):
        status, body = world.call(0, "PUT", "/v1/directive", first)
        assert (status, error_of(body)) == (
            409,
            f"directive {known.followed + 1} comes too late, {known.followed + 2} is followed",
        )
        assert world.report(0).revision == "later"
    repeated = meant_for(replace(known, followed=known.followed + 1), later)
    assert world.call(0, "PUT", "/v1/directive", repeated)[0] == 200, "the same again does no harm"
    assert world.report(0).followed == known.followed + 2
    beside = meant_for(
        replace(known, followed=known.followed + 1), replace(early, revision="of another operator")
    )
    assert world.call(0, "PUT", "/v1/directive", beside)[0] == 409, (
        "who decided without knowing of the later one"
    )
    assert world.call(0, "PUT", "/v1/directive", meant_for(world.report(0), early))[0] == 200, (
        "who knows of it"
    )
    assert world.report(0).revision == "early"


def test_directive_for_the_process_that_was_there_before_is_refused(make_world: MakeWorld) -> None:
    world = make_world().launch()
    known, wanted = world.report(0), world.directive(0, Phase.RELEASE)
    world.kill(0)
    world.start(0)
    status, body = world.call(0, "PUT", "/v1/directive", meant_for(known, wanted))
    assert status == 409
    assert "started again" in error_of(body)
    assert world.report(0).attempt == 0
    assert world.call(0, "PUT", "/v1/directive", meant_for(world.report(0), wanted))[0] == 200
    assert world.report(0).attempt == wanted.attempt


def test_worker_pushing_someone_elses_rank_or_to_a_stranger_is_refused(make_world: MakeWorld) -> None:
    world = make_world(workers=3).launch()
    artifact = digest(memoryview(image(1, Version(5, 1), layout(300_000), world_size=3)))
    for sender, rank, wrong in ((2, 1, "not of worker 2"), (1, 1, "does not keep copies for worker 1")):
        wire = reach(world, identity(world, sender), 1, 0)
        wire.send(PeerRequest("offer", rank, Version(5, 1), 3, artifact))
        said = wire.receive(PeerResponse)
        assert said.state == "refused"
        assert wrong in said.message
        wire.close()


def test_bytes_that_are_not_the_artifact_they_claim_to_be_are_not_kept(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    lie = image(1, Version(6, 1), layout(300_000), world_size=2)
    wire = reach(world, identity(world, 1), 1, 0)
    wire.send(PeerRequest("offer", 1, Version(5, 1), 2, digest(memoryview(lie))))
    said = wire.receive(PeerResponse)
    wire.send(PeerRequest("join", transfer=said.transfer))
    send_bytes(wire, 0, lie)
    wire.send_end()
    wire.receive(PeerResponse)
    wire.send(PeerRequest("commit", transfer=said.transfer))
    assert "its seal says" in wire.receive(PeerResponse).message
    wire.close()
    assert world.report(0).holdings == ()


def test_damaged_chunk_is_named_and_not_acknowledged_until_it_is_good(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    good = image(1, Version(5, 1), layout(300_000), world_size=2)
    bad = good[:100_000] + bytes([good[100_000] ^ 4]) + good[100_001:]
    wire = reach(world, identity(world, 1), 1, 0)
    wire.send(PeerRequest("offer", 1, Version(5, 1), 2, digest(memoryview(good))))
    transfer = wire.receive(PeerResponse).transfer
    for sent, damaged, commit in ((bad, (0,), "again"), (good, (), "ok")):
        wire.send(PeerRequest("join", transfer=transfer))
        send_bytes(wire, 0, sent)
        wire.send_end()
        assert wire.receive(PeerResponse).damaged == damaged
        wire.send(PeerRequest("commit", transfer=transfer))
        assert wire.receive(PeerResponse).state == commit
    wire.close()
    until(lambda: world.holds(0, 1, Version(5, 1)), "kept")


def test_socket_refuses_ranks_of_other_workers(make_world: MakeWorld) -> None:
    world = make_world(workers=2).launch()
    with world.rank(0) as rank:
        assert not rank.welcome.error
    stranger = world.rank(0, world_size=7)
    assert "the job has 2 ranks" in stranger.welcome.error
    stranger.close()


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
@pytest.mark.parametrize("cls", [PeerRequest, PeerResponse, CallerClaim, Challenge])
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
    assert coordinator.handle_update(Caller(), text).refused
    assert not tell(coordinator, TierReport(JOB_UID, 1, 1, (RankTiers(1),))).refused
