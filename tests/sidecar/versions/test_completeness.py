"""Whatever the schedule and the accidents, what is committed is kept, and newer completes.

What the coordinator calls complete is still there, though a rank gave its snapshot up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.versions.memory_model import Model
from tests.sidecar.versions.reports import RankTiers, TierReport, tell, told
from tests.sidecar.world import JOB_UID
from tiercheck.protocol.report import ConnectionFailure
from tiercheck.protocol.version import Artifact, Kind, Version, rebuildable
from tiercheck_sidecar.model.tier_verdict import spans
from tiercheck_sidecar.versions import tiers
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.reclaim import Reclaimer
from tiercheck_sidecar.versions.report_updates import TierAnswer
from tiercheck_sidecar.versions.tier_line import CallFailed
from tiercheck_sidecar.versions.tiers import TierClient

seeds = st.integers(0, 2**32)
worlds = st.integers(1, 5)
ACTIONS = 500
"""Per worker: about twenty steps."""


def play(model: Model, actions: int = ACTIONS) -> None:
    for _ in range(actions * model.world):
        model.act()
    model.check()


def announced(model: Model) -> Version:
    mark = model.standing.peer if model.parity or model.world > 1 else model.standing.local
    return mark or Version(0, 0)


def advances(model: Model) -> None:
    before = announced(model)
    play(model, 2 * ACTIONS)
    assert announced(model) > before, "versions stopped becoming complete"


@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds, world=worlds, copies=st.integers(1, 2), skips=st.sampled_from([0.02, 0.3]))
def test_committed_is_kept_and_versions_complete_whatever_is_skipped(
    seed: int, world: int, copies: int, skips: float
) -> None:
    model = Model(world, random.Random(seed), copies=copies, skips=skips)
    play(model)
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 5), copies=st.integers(1, 2), skips=st.sampled_from([0.0, 0.05, 0.3]))
def test_newest_snapshot_that_all_holders_have_can_be_had_of_every_rank_when_a_worker_is_lost(
    seed: int, world: int, copies: int, skips: float
) -> None:
    """That is what fewer ranks can go on from. Where there is room: before a rank lets a gap be among its
    deltas, it gives up the snapshot."""
    play(Model(world, random.Random(seed), copies=copies, skips=skips, chains=9))


@settings(max_examples=examples(10), deadline=None)
@given(seed=seeds, world=worlds)
def test_committed_is_kept_with_two_snapshot_slots_too(seed: int, world: int) -> None:
    """Progress is not promised there: ranks that never stand at the same step can miss each other for
    long.
    """
    play(Model(world, random.Random(seed), slots=2, skips=0.1))


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), parity=st.integers(1, 2), skips=st.sampled_from([0.02, 0.2]))
def test_what_parity_protects_can_be_rebuilt_at_every_moment(
    seed: int, world: int, parity: int, skips: float
) -> None:
    model = Model(world, random.Random(seed), parity=parity, skips=skips)
    play(model)
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), copies=st.integers(1, 2))
@example(seed=605417, world=2, copies=1)  # skipped before a restart
def test_sidecars_that_restart_make_nobody_throw_away_what_is_committed(
    seed: int, world: int, copies: int
) -> None:
    rng = random.Random(seed)
    model = Model(world, rng, copies=copies)
    for _ in range(6):
        play(model, ACTIONS // 6)
        model.restart_sidecar(rng.randrange(world))
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=seeds, world=st.integers(1, 4), cadence=st.sampled_from([2, 4]), skips=st.sampled_from([0.0, 0.05])
)
@example(seed=4859550, world=3, cadence=2, skips=0.0)  # a copy is freed, and its owner still counts upon it
def test_memory_that_rots_keeps_nothing_from_becoming_complete_for_ever(
    seed: int, world: int, cadence: int, skips: float
) -> None:
    """Of what can no longer be complete nobody keeps so much that no slot is left for what can."""
    rng = random.Random(seed)
    model = Model(world, rng, cadence=cadence, skips=skips)
    for _ in range(4):
        play(model, rng.randrange(ACTIONS // 2))
        model.rot(rng.randrange(world))
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4), parity=st.integers(0, 1))
@example(seed=104690, world=2, parity=0)  # a delta was being sealed when all went back to its version
@example(seed=1326, world=2, parity=0)  # a delta was sealed so late that slots were nearly used up
def test_lost_worker_costs_nothing_that_was_announced_and_its_attempt_protects_again(
    seed: int, world: int, parity: int
) -> None:
    rng = random.Random(seed)
    model = Model(world, rng, parity=parity, skips=0.05)
    for _ in range(4):
        play(model, rng.randrange(ACTIONS // 2))
        protected = model.standing.peer
        back = model.lose(rng.randrange(world))
        assert protected is None or (back is not None and back >= protected), (protected, back)
        model.check()
    model.skips = 0.0
    advances(model)


@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds, world=st.integers(2, 4))
def test_what_an_earlier_attempt_protected_is_kept_until_this_one_has_done_as_much(
    seed: int, world: int
) -> None:
    """All training processes end before new holders have anything; then a worker is lost that held nothing of
    it."""
    rng = random.Random(seed)
    model = Model(world, rng)
    play(model)
    protected = model.standing.peer
    model.lose()
    for _ in range(100 * world):
        model.act()
        if model.standing.peer is not None:
            return
    back = model.lose(rng.randrange(world))
    assert protected is None or (back is not None and back >= protected)


SIZE = 100_000


def v(step: int) -> Version:
    return Version(step, 1)


class Wire:
    """As `CoordinatorClient`, of a pair."""

    is_open = True

    def __init__(self, pair: Pair, host: str, heard: Callable[[TierAnswer], None]) -> None:
        self._pair, self.host, self._heard, self._caller = pair, host, heard, Caller()

    def send(self, text: bytes, number: int) -> TierAnswer:
        if self._pair.cut:
            raise CallFailed("connection refused", ConnectionFailure.REFUSED)
        answer = self._pair.coordinator.handle_update(self._caller, text)
        *news, answer = self._pair.coordinator.replies(self._caller, answer)
        for each in news:
            self._heard(each)
        return answer


class Pair:
    """Worker 0 coordinates, and only says what it has; worker 1 is whole. Nobody keeps copies.

    Worker 1 lacks the delta of step 13, worker 0 the snapshot and the delta of step 14. So step 14 cannot be
    complete, and worker 1 has been told so; but it is worker 1's only way to steps 15 to 17.
    """

    def __init__(self, job: Stations, monkeypatch: pytest.MonkeyPatch) -> None:
        self.station = job[1]
        self.coordinator = Coordinator(job[0].state)
        self.cut = False
        state, vault = self.station.state, self.station.vault
        self.reclaimer = Reclaimer(state, vault)
        self.tiers = TierClient(state, vault, lambda _: [], lambda *_: ())
        monkeypatch.setattr(tiers, "CoordinatorClient", lambda config, *more: Wire(self, *more))
        for step in (10, 14):
            self.station.save(v(step), SIZE)
        for step in (11, 12, 15, 16, 17):
            self.station.save(v(step), SIZE, Kind.DELTA)
        self.tell()
        self.worker_0_has({10}, range(11, 14), unfinished=16)
        self.tell()
        word = state.verdict
        assert word is not None
        assert (word.watermarks.local, word.abandoned) == (v(12), (v(14),))

    def worker_0_has(self, snapshots: set[int], deltas: range, unfinished: int = 0) -> None:
        found = rebuildable(set(map(v, snapshots)), set(map(v, deltas)), self.station.job.history)
        writing = (v(unfinished),) if unfinished else ()
        newest = v(max(snapshots | {unfinished}))
        said = RankTiers(
            0,
            spans(found),
            tuple(map(v, sorted(snapshots))),
            writing,
            unfinished_deltas=writing,
            reached=newest,
        )
        assert not tell(self.coordinator, TierReport(JOB_UID, 1, 0, (said,))).refused

    def announced(self) -> Version | None:
        """What everybody is told next."""
        self.coordinator.next_verdict()
        return told(self.coordinator).watermarks.local

    def tell(self) -> None:
        self.coordinator.next_verdict()
        directive = self.station.state.directive
        assert directive is not None
        self.tiers._report(directive, self.tiers.gather(directive))

    def can_go_back_to(self, step: int) -> bool:
        held = self.station.vault.held()
        snapshots = {seal.version for seal in held if seal.kind is Kind.SNAPSHOT}
        deltas = {seal.version for seal in held if seal.kind is Kind.DELTA}
        return v(step) in rebuildable(snapshots, deltas, self.station.job.history)


@pytest.fixture
def pair(stations: MakeStations, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(stations(workers=2), monkeypatch)


def test_what_a_rank_said_that_it_has_stays_until_it_has_taken_that_back(pair: Pair) -> None:
    pair.station.save(v(18), SIZE)  # its newest now, and step 16 does not rest on it
    pair.reclaimer.step()
    pair.worker_0_has({10, 16}, range(11, 14))
    assert pair.announced() == v(16), "by what worker 1 said last"
    assert pair.can_go_back_to(16)
    pair.tell()
    pair.reclaimer.step()
    assert pair.can_go_back_to(16)


def test_what_nobody_counts_on_any_more_makes_room_for_the_next_snapshot(pair: Pair) -> None:
    pair.station.save(v(18), SIZE)
    pair.reclaimer.step()
    pair.tell()
    pair.reclaimer.step()
    assert not pair.station.holds(Artifact(1, v(14)))
    pair.station.save(v(20), SIZE)
    pair.worker_0_has({10, 16}, range(11, 14))
    assert pair.announced() == v(12), "step 16 is not there any more, and nobody says so"


def test_word_that_does_not_arrive_takes_nothing_back(pair: Pair) -> None:
    pair.station.save(v(18), SIZE)
    pair.reclaimer.step()
    pair.cut = True
    pair.tell()
    pair.reclaimer.step()
    pair.worker_0_has({10, 16}, range(11, 14))
    assert pair.announced() == v(16)
    assert pair.can_go_back_to(16)


def test_what_is_wanted_again_is_said_again_and_stays(pair: Pair) -> None:
    """A coordinator that begins anew knows of no abandoned snapshot at first."""
    pair.station.save(v(18), SIZE)
    pair.reclaimer.step()
    before = pair.station.state.verdict
    pair.tell()
    pair.station.state.verdict = None
    pair.reclaimer.step()
    pair.tell()
    pair.station.state.verdict = before
    pair.reclaimer.step()
    pair.worker_0_has({10, 16}, range(11, 14))
    assert pair.announced() == v(16)
    assert pair.can_go_back_to(16)
