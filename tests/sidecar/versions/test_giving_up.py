"""What the coordinator calls complete is still there, though a rank gave its snapshot up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sidecar.stations import MakeStations, Stations
from tests.sidecar.versions.reports import RankTiers, TierReport, tell, told
from tests.sidecar.world import JOB_UID
from tiercheck.protocol.report import Break
from tiercheck.protocol.version import Artifact, Kind, Version, rebuildable
from tiercheck_sidecar.model.span import spans
from tiercheck_sidecar.versions import tiers
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.reclaim import Reclaimer
from tiercheck_sidecar.versions.tier_line import CallFailed
from tiercheck_sidecar.versions.tiers import TierClient
from tiercheck_sidecar.versions.words import TierAnswer

SIZE = 100_000


def v(step: int) -> Version:
    return Version(step, 1)


class Wire:
    """As `TierLine`, of a pair."""

    is_open = True

    def __init__(self, pair: Pair, host: str, heard: Callable[[TierAnswer], None]) -> None:
        self._pair, self.host, self._heard, self._caller = pair, host, heard, Caller()

    def tell(self, text: bytes, number: int) -> TierAnswer:
        if self._pair.cut:
            raise CallFailed("connection refused", Break.REFUSED)
        answer = self._pair.coordinator.hear_news(self._caller, text)
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
        monkeypatch.setattr(tiers, "TierLine", lambda config, *more: Wire(self, *more))
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
        self.coordinator.news()
        return told(self.coordinator).watermarks.local

    def tell(self) -> None:
        self.coordinator.news()
        directive = self.station.state.directive
        assert directive is not None
        self.tiers._tell(directive, self.tiers.gather(directive))

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
