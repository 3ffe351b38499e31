"""A peer counts as lost at the first sign, and as well only after it answered for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.directive import Peer
from tiercheck.protocol.report import Break
from tiercheck_sidecar.model.peer_watch import CALM, MOST, PeerWatch

ONE, OTHER = Peer(1, "10.0.0.1"), Peer(2, "10.0.0.2")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watching(*peers: Peer) -> tuple[PeerWatch, Clock, list[None]]:
    clock, news = Clock(), list[None]()
    watch = PeerWatch(lambda: news.append(None), clock)
    watch.only(peers or (ONE, OTHER))
    news.clear()
    return watch, clock, news


def test_lost_peer_is_named_with_the_moment_of_its_last_answer() -> None:
    watch, clock, news = watching()
    watch.answered(ONE)
    clock.now += 4
    watch.broken(ONE, Break.SILENT)
    (lost,) = watch.unreachable()
    assert (lost.worker, lost.host, lost.since, lost.how) == (1, "10.0.0.1", 1000.0, Break.SILENT)
    assert len(news) == 1
    watch.broken(ONE, Break.SILENT)
    assert len(news) == 1, "the same again is no news"


def test_flapping_peer_stays_lost_until_it_is_calm() -> None:
    watch, clock, _ = watching()
    watch.broken(ONE, Break.SILENT)
    for _ in range(10):
        clock.now += 1
        watch.answered(ONE)
        watch.broken(ONE, Break.SILENT)
    assert watch.unreachable()[0].since == 1000.0
    for _ in range(CALM - 1):
        watch.answered(ONE)
    assert watch.unreachable()
    watch.answered(ONE)
    assert watch.unreachable() == ()


def test_peer_of_an_earlier_attempt_is_forgotten() -> None:
    watch, _, _ = watching()
    watch.broken(ONE, Break.REFUSED)
    watch.only([OTHER])
    watch.broken(ONE, Break.REFUSED)
    assert watch.unreachable() == ()


def test_isolation_needs_peers_and_all_of_them_lost_for_long() -> None:
    watch, clock, _ = watching()
    watch.broken(ONE, Break.SILENT)
    clock.now += 100
    assert not watch.all_lost(60)
    watch.broken(OTHER, Break.REFUSED)
    assert watch.all_lost(60)
    assert not watch.all_lost(100)
    watch.only([])
    assert not watch.all_lost(0), (
        "a job of one worker is never isolated: nobody could have gone on without it"
    )


def test_report_stays_small_however_many_are_lost() -> None:
    peers = [Peer(worker, f"10.0.1.{worker}") for worker in range(100)]
    watch, _, _ = watching(*peers)
    for peer in peers:
        watch.broken(peer, Break.SILENT)
    assert len(watch.unreachable()) == MOST


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_peer_is_reachable_exactly_if_it_was_never_lost_or_calm_since(events: list[tuple[bool, int]]) -> None:
    watch, clock, _ = watching()
    lost, calm = False, 0
    for answered, seconds in events:
        clock.now += seconds
        if answered:
            watch.answered(ONE)
            calm += 1
            lost = lost and calm < CALM
        else:
            watch.broken(ONE, Break.SILENT)
            lost, calm = True, 0
        assert bool(watch.unreachable()) == lost
        for each in watch.unreachable():
            assert each.since <= clock.now
