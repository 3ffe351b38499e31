"""A rehearsal verifies what a recovery would read while a job trains, and shows its oldest proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sidecar.restore.test_restore import slots, training
from tests.sidecar.stations import MakeStations, Station, Stations
from tests.sidecar.world import MakeWorld, World, flip, until
from tiercheck.protocol.directive import Phase, Policy, Tier
from tiercheck.protocol.report import Proof, Watermarks
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.rehearsal.ledger import (
    ADVICE,
    AGAIN,
    FRESH,
    WIRE_SECONDS,
    Look,
    ScrubLog,
    due_in,
    seconds_to_rest,
)
from tiercheck_sidecar.rehearsal.rehearser import REHEARSAL_FAILED, Rehearser
from tiercheck_sidecar.vault import Seal, Vault

CHUNK = 64 * 1024
"""Bytes per digest in these tests, so that small artifacts have several."""
SIZE = 3 * CHUNK + 5000


class Stage:
    """Worker 0 rehearses in the test's own thread. Whenever it would wait, the next of `happenings` takes
    place; no time passes."""

    def __init__(self, job: Stations, every: float | None = 600.0) -> None:
        self.job, self.me = job, job[0]
        job.next_attempt(policy=Policy(None, 1_000_000, 5, rehearse_every=every))
        self.version = Version(5, job.attempt)
        self.happenings: list[Callable[[], object]] = []
        self.waits = 0
        self.now = 0.0
        self.rehearser = Rehearser(
            self.me.state, self.me.vault, self.me.sidecar.reach, wait=self._wait, clock=lambda: self.now
        )

    def _wait(self, until: Callable[[], bool], seconds: float) -> bool:
        self.waits += 1
        if self.happenings:
            self.happenings.pop(0)()
        return until()

    def save(self, version: Version, size: int = SIZE) -> Seal:
        """A version of every worker, with its copies, that is complete in both tiers."""
        seals = [station.save(version, size) for station in self.job.stations]
        if self.job.workers > 1:
            for station, seal in zip(self.job.stations, seals, strict=True):
                copy(station, self.job[(station.worker + 1) % self.job.workers], seal)
        self.complete(version)
        return seals[0]

    def complete(self, version: Version) -> None:
        state = self.me.state
        peer = version if self.job.workers > 1 else None
        with state.lock:
            state.verdict = TierVerdict(state.attempt, Watermarks(local=version, peer=peer))
        state.bump()

    def proved(self) -> dict[Tier, Version]:
        return {proof.tier: proof.version for proof in self.me.state.proofs}

    def complaint(self) -> str:
        found = [each.message for each in self.me.state.problems if each.reason == REHEARSAL_FAILED]
        return found[0] if found else ""


def copy(giver: Station, holder: Station, seal: Seal) -> None:
    draft = holder.vault.draft(replace(seal, tier=Tier.PEER))
    draft.view[:] = giver.content(seal, Tier.LOCAL)
    draft.keep()


@pytest.fixture
def job(stations: MakeStations, monkeypatch: pytest.MonkeyPatch) -> Stations:
    monkeypatch.setattr(
        "tiercheck_sidecar.vault.vault.digest_and_tag", lambda view, _: (digest(view, chunk=CHUNK), None)
    )
    return stations()


@pytest.fixture
def stage(job: Stations) -> Stage:
    return Stage(job)


def test_intact_version_is_proved_in_own_memory_and_at_its_holder(stage: Stage) -> None:
    seal = stage.save(stage.version)
    stage.rehearser.look()
    assert stage.proved() == {Tier.LOCAL: stage.version, Tier.PEER: stage.version}
    assert not stage.complaint()
    assert all(proof.bytes == seal.digests.size and proof.parts == 1 for proof in stage.me.state.proofs)
    assert stage.me.state.counters.proved == 2


def test_chain_of_deltas_is_read_with_its_snapshot(stage: Stage) -> None:
    base = stage.save(stage.version)
    after = Version(stage.version.step + 1, stage.version.attempt)
    for station in stage.job.stations:
        seal = station.save(after, CHUNK, Kind.DELTA)
        copy(station, stage.job[1 - station.worker], seal)
    stage.complete(after)
    stage.rehearser.look()
    assert stage.proved() == {Tier.LOCAL: after, Tier.PEER: after}
    assert {proof.bytes for proof in stage.me.state.proofs} == {base.digests.size + seal.digests.size}


@pytest.mark.parametrize("chunk", [0, 2, 3])
@pytest.mark.parametrize("tier", [Tier.LOCAL, Tier.PEER])
def test_one_flipped_bit_is_told_with_tier_artifact_and_place_and_stays_where_it_is(
    stage: Stage, tier: Tier, chunk: int
) -> None:
    seal = stage.save(stage.version)
    keeper = stage.me if tier is Tier.LOCAL else stage.job[1]
    keeper.flip(seal, tier, chunk)
    stage.rehearser.look()
    place = "own memory" if tier is Tier.LOCAL else "worker 1"
    assert (
        f"the {Artifact(0, stage.version)}, would not come back from {place}: chunk {chunk}"
        in stage.complaint()
    )
    assert set(stage.proved()) == {Tier.LOCAL, Tier.PEER} - {tier}
    assert keeper.holds(Artifact(0, stage.version), tier), "a rehearsal reads only"
    assert not keeper.state.quarantined
    assert stage.me.state.counters.disproved == 1


def test_complaint_ends_when_a_later_version_is_proved(stage: Stage) -> None:
    stage.job[1].flip(stage.save(stage.version), Tier.PEER, 1)
    stage.rehearser.look()
    assert stage.complaint()
    later = Version(stage.version.step + 1, stage.version.attempt)
    stage.save(later)
    stage.rehearser.look()
    assert stage.complaint(), "its turn has not come"
    stage.now += 301
    stage.rehearser.look()
    assert not stage.complaint()
    assert stage.proved()[Tier.PEER] == later


def test_complaint_ends_with_the_attempt_in_which_it_was_made(stage: Stage) -> None:
    stage.me.flip(stage.save(stage.version), Tier.LOCAL, 1)
    stage.rehearser.look()
    assert stage.complaint()
    stage.job.next_attempt(stage.version.step, Policy(None, 1_000_000, 5, rehearse_every=600.0))
    stage.rehearser.look()
    assert not stage.complaint(), "all of it was restored, and nothing of it was read yet"


def test_copy_that_its_holder_does_not_have_is_told(stage: Stage) -> None:
    stage.save(stage.version)
    stage.job[1].vault.evict(lambda seal: seal.tier is Tier.PEER)
    stage.rehearser.look()
    assert "would not come back from worker 1" in stage.complaint()
    assert str(Artifact(0, stage.version)) in stage.complaint()


def test_holder_that_cannot_be_reached_is_tried_again_before_it_is_told(stage: Stage) -> None:
    stage.save(stage.version)
    stage.job[1].server.stop()
    stage.rehearser.look()
    assert "worker 1" in stage.complaint()
    assert "cannot be reached" in stage.complaint()
    assert stage.proved() == {Tier.LOCAL: stage.version}


def test_nothing_is_read_where_it_is_turned_off(job: Stations) -> None:
    stage = Stage(job, every=None)
    stage.save(stage.version)
    stage.rehearser.look()
    assert (stage.proved(), stage.waits) == ({}, 0)


def test_turning_it_off_takes_back_what_was_said(stage: Stage) -> None:
    stage.me.flip(stage.save(stage.version), Tier.LOCAL, 1)
    stage.rehearser.look()
    assert stage.complaint()
    assert stage.proved()
    stage.me.accept(replace(stage.me.state.directive, policy=Policy(None, 1_000_000, 5)))  # type: ignore[type-var]
    stage.rehearser.look()
    assert (stage.proved(), stage.complaint()) == ({}, "")


def test_a_tier_waits_for_its_turn_and_a_new_attempt_begins_anew(stage: Stage) -> None:
    stage.save(stage.version)
    stage.rehearser.look()
    later = Version(stage.version.step + 1, stage.version.attempt)
    stage.save(later)
    stage.now += 599
    stage.rehearser.look()
    assert set(stage.proved().values()) == {stage.version}
    stage.now += 1
    stage.rehearser.look()
    assert set(stage.proved().values()) == {later}
    stage.job.next_attempt(later.step, Policy(None, 1_000_000, 5, rehearse_every=600.0))
    newest = Version(later.step + 1, stage.job.attempt)
    for station in stage.job.stations:
        station.vault.evict(lambda seal: seal.version == stage.version)
    stage.save(newest)
    stage.rehearser.look()
    assert set(stage.proved().values()) == {newest}


# Out of everybody's way.


def test_save_that_begins_is_finished_before_the_next_chunk_is_read(stage: Stage) -> None:
    stage.save(stage.version)
    vault, later = stage.me.vault, Version(stage.version.step + 1, stage.version.attempt)
    begun: list[Path] = []
    read: list[int] = []
    pin = vault.pin

    def watched(*arguments: object) -> object:
        read.append(len(vault.unfinished()))
        return pin(*arguments)  # type: ignore[arg-type]

    vault.pin = watched  # type: ignore[method-assign, assignment]
    stage.happenings = [
        lambda: begun.append(vault.begin(0, later)),  # in the pause after the first chunk
        lambda: vault.release(begun[0]),  # it gives way, and meanwhile the save ends
    ]
    stage.rehearser.look()
    assert begun
    assert len(read) >= 4
    assert not any(read), "a chunk was read while a slot was being written"
    assert stage.proved()[Tier.LOCAL] == stage.version


def test_between_two_chunks_no_slot_is_held_here_or_at_the_holder(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whatever is reclaimed is free at once, and the next save or copy finds its slot."""
    monkeypatch.setattr(
        "tiercheck_sidecar.exchange.session.IO_TIMEOUT", 600.0
    )  # a silent conversation ends no sooner
    stage.save(stage.version)
    later = Version(stage.version.step + 1, stage.version.attempt)

    def nothing_is_doomed(vault: Vault) -> bool:
        with vault._lock:
            return not any(slot.doomed for slot in vault._slots.values())

    def overtaken() -> None:
        stage.save(later)
        for station in stage.job.stations:
            station.vault.evict(lambda seal: seal.version == stage.version)
            until(
                lambda vault=station.vault: nothing_is_doomed(vault),
                "what was freed is free",
            )

    stage.happenings = [*[lambda: None] * 10, overtaken]  # in the midst of the holder's copy
    stage.rehearser.look()
    assert not stage.happenings
    assert not stage.complaint()
    peer = next(proof for proof in stage.me.state.proofs if proof.tier is Tier.PEER)
    assert (peer.version, peer.parts) == (later, 2), "the reading went on in the next version"


def test_reclaimed_version_goes_on_in_the_next_one_where_it_stopped(stage: Stage) -> None:
    seal = stage.save(stage.version)
    later = Version(stage.version.step + 1, stage.version.attempt)

    def overtaken() -> None:
        stage.save(later)
        stage.me.vault.evict(lambda each: each.version == stage.version)

    stage.happenings = [lambda: None, overtaken]
    stage.rehearser.look()
    local = next(proof for proof in stage.me.state.proofs if proof.tier is Tier.LOCAL)
    assert (local.version, local.parts, local.bytes) == (later, 2, seal.digests.size)
    assert not stage.complaint()


def test_versions_that_are_freed_before_they_can_be_read_are_no_failure_and_not_tried_without_pause(
    stations: MakeStations,
) -> None:
    stage = Stage(stations(workers=1))
    stage.save(stage.version, 1000)
    asked: list[Version] = []
    pin = stage.me.vault.pin

    def overtaken(artifact: Artifact, *arguments: object) -> object:
        """Each is freed when it is asked for, and its successor is complete."""
        asked.append(artifact.version)
        stage.me.vault.evict(lambda each: each.artifact == artifact)
        stage.save(Version(artifact.version.step + 1, artifact.version.attempt), 1000)
        return pin(artifact, *arguments)  # type: ignore[arg-type]

    stage.me.vault.pin = overtaken  # type: ignore[method-assign, assignment]
    stage.rehearser.look()
    tried = len(asked)
    assert tried > 2
    assert (stage.proved(), stage.complaint()) == ({}, "")
    stage.rehearser.look()
    assert len(asked) == tried
    stage.now += 600
    stage.rehearser.look()
    assert len(asked) > tried


@pytest.mark.parametrize("after", range(1, 16, 3))
def test_next_attempt_ends_it_at_once_without_a_word(stage: Stage, after: int) -> None:
    stage.save(stage.version)
    directive = stage.me.state.directive
    assert directive is not None
    hold = replace(directive, attempt=directive.attempt + 1, phase=Phase.HOLD)
    waits: list[int] = []

    def recovery() -> None:
        stage.me.accept(hold)
        waits.append(stage.waits)

    stage.happenings = [*[lambda: None] * after, recovery]
    stage.rehearser.look()
    assert stage.waits == waits[0], "it read on beside the restore"
    assert not stage.complaint()
    assert stage.me.state.counters.disproved == 0


# In real sidecars, beside a job that trains.


def proofs(world: World, worker: int = 0) -> set[Tier]:
    return {proof.tier for proof in world.report(worker).proofs}


def complaint(world: World, worker: int = 0) -> str:
    return next(
        (each.message for each in world.report(worker).problems if each.reason == REHEARSAL_FAILED), ""
    )


def rehearsing(world: World) -> World:
    world.policy = replace(world.policy, rehearse_every=1.0)
    return world


def test_job_with_all_tiers_is_told_that_each_would_come_back(make_world: MakeWorld) -> None:
    world = training(rehearsing(make_world(workers=2)), remote=True)
    world.train(4)
    for worker in range(2):
        until(lambda worker=worker: proofs(world, worker) == set(Tier), "each tier is proved")
    newest = {proof.tier: proof.version for proof in world.report(0).proofs}
    assert newest[Tier.REMOTE] == Version(1, 1)
    assert not complaint(world)


@pytest.mark.parametrize("word", ["own-0", "copy-0"])
def test_bad_memory_is_found_while_the_job_trains(make_world: MakeWorld, word: str) -> None:
    world = training(make_world(workers=2))
    world.train(3)
    flip(slots(world, int(word == "copy-0"), word)[1], 150_000)
    rehearsing(world).direct(Phase.RELEASE)
    message = until(lambda: complaint(world), "it is told")
    assert "the snapshot of rank 0, step 1 (attempt 1), would not come back" in message
    assert ("own memory" if word == "own-0" else "worker 1") in message


def test_bad_object_in_the_store_is_found_before_anybody_needs_it(make_world: MakeWorld) -> None:
    world = training(make_world(workers=2), remote=True)
    world.train(3)
    world.reach("remote", Version(1, 1))
    settings = json.loads(world.remote or "")
    (stored, *_) = sorted(
        path
        for path in Path(settings["directory"]["path"]).rglob("*")
        if path.is_file() and path.stat().st_size > 100_000
    )
    flip(stored, 150_000)
    rehearsing(world).direct(Phase.RELEASE)
    message = until(lambda: complaint(world, 0) or complaint(world, 1), "it is told")
    assert "would not come back from the remote tier" in message
    assert "does not match its digest" in message


PIECES = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 26)), min_size=1, max_size=50)
V, W = Version(5, 1), Version(6, 1)
COURSE = (1, "placement")


@given(pieces=PIECES, bandwidth=st.none() | st.integers(1, 1 << 40))
def test_whatever_pieces_cost_together_they_take_one_percent_of_a_core_and_of_the_bandwidth(
    pieces: list[tuple[float, int]], bandwidth: int | None
) -> None:
    seconds = sum(seconds_to_rest(core, moved, bandwidth) for core, moved in pieces)
    assert sum(core for core, _ in pieces) <= 0.01 * seconds * (1 + 1e-9)
    moved = sum(moved for _, moved in pieces)
    assert moved * WIRE_SECONDS <= 0.01 * seconds * (1 + 1e-9)
    if bandwidth is not None:
        assert moved <= 0.01 * bandwidth * seconds * (1 + 1e-9)


@given(core=st.floats(0, 10), moved=st.integers(0, 1 << 26), bandwidth=st.none() | st.integers(1, 1 << 40))
def test_it_rests_no_longer_than_the_tightest_of_its_limits_demands(
    core: float, moved: int, bandwidth: int | None
) -> None:
    limits = [core * 100, moved * WIRE_SECONDS * 100, 0 if bandwidth is None else moved * 100 / bandwidth]
    assert seconds_to_rest(core, moved, bandwidth) == pytest.approx(max(limits))


def test_first_time_of_a_tier_and_of_a_new_attempt_or_placement_is_at_once() -> None:
    assert due_in(0.0, 600, None, COURSE, V) == 0
    look = Look(COURSE, 100.0, good=True)
    assert due_in(101.0, 600, look, COURSE, V) == 599
    for other in ((2, "placement"), (1, "another")):
        assert due_in(101.0, 600, look, other, V) == 0


@given(every=st.floats(1, 1e6), passed=st.floats(0, 1e6))
def test_turn_comes_after_as_long_as_asked_for_and_sooner_where_something_was_wrong(
    every: float, passed: float
) -> None:
    assert due_in(passed, every, Look(COURSE, 0.0, good=True), COURSE, V) == pytest.approx(
        max(0, every - passed)
    )
    again = due_in(passed, every, Look(COURSE, 0.0, good=False), COURSE, V)
    assert again == pytest.approx(max(0, min(every, AGAIN) - passed))


def test_version_that_was_proved_whole_is_not_read_again_for_half_a_day() -> None:
    look = Look(COURSE, 0.0, good=True, whole=V)
    assert due_in(600.0, 600, look, COURSE, V) == FRESH - 600
    assert due_in(FRESH, 600, look, COURSE, V) == 0
    assert due_in(600.0, 600, look, COURSE, W) == 0, "a new version is another matter"
    assert due_in(FRESH, 2 * FRESH, look, COURSE, V) == FRESH, "who wants it less often gets it less often"


def proof(version: Version, at: float, tier: Tier = Tier.PEER) -> Proof:
    return Proof(tier, version, at, 1.0, 10)


def test_tier_is_shown_when_all_ranks_are_proved_and_as_old_as_the_oldest() -> None:
    ledger = ScrubLog().proved(0, proof(W, 20.0)).proved(1, proof(V, 30.0))
    assert ledger.shown((0, 1, 2)) == ()
    (shown,) = ledger.shown((0, 1))
    assert (shown.version, shown.at, shown.bytes, shown.seconds) == (V, 20.0, 20, 2.0)
    assert ledger.shown((0,)) == (proof(W, 20.0),), "ranks of an earlier identity do not count"
    assert ledger.shown(()) == ()


def test_fault_stays_until_the_same_rank_and_tier_are_proved() -> None:
    ledger = (
        ScrubLog().disproved(0, Tier.PEER, ["the one is bad"]).disproved(1, Tier.PEER, ["the other is bad"])
    )
    assert "the one is bad" in ledger.complaint()
    assert "the other is bad" in ledger.complaint()
    ledger = ledger.proved(0, proof(V, 1.0)).proved(1, proof(V, 1.0, Tier.LOCAL))
    assert ledger.complaint() == f"the other is bad. {ADVICE[Tier.PEER]}."
    assert ledger.proved(1, proof(V, 2.0)).complaint() == ""
    assert ledger.without_faults().complaint() == ""


def test_many_faults_are_counted_and_not_listed() -> None:
    ledger = ScrubLog()
    for rank in range(8):
        ledger = ledger.disproved(rank, Tier.REMOTE, [f"rank {rank} is bad"])
    assert ledger.complaint().endswith("; and 6 more.")
