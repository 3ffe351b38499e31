"""The simulator's benchmarks read what they are given, and the parts of a run foretell that run."""

from __future__ import annotations

import pytest

from benchmarks.ettr import COLD, COLLECTIVES, PEERS, seconds_at, usual_times
from benchmarks.simulate_validation import (
    FAULTS,
    PAGE,
    TIMES_EACH,
    Record,
    Struck,
    costs,
    every_other,
    foretell,
    foretell_rows,
    halves,
    new_steps,
    page_times,
    real_rows,
)

ROWS = real_rows(PAGE.read_text())
CAUSES = {
    "crash": "TrainerCrash", "delete": "PodDeleted", "evict": "PodEvicted", "node": "NodeSilent",
    "rack": "DomainLost", "every pod": "AllPodsLost",
}  # fmt: skip
PACE = 0.25


def struck(number: int, fault: str, down: float) -> Struck:
    """After ten seconds of training, with a third of `down` for each part."""
    began = 1000.0 * number
    tier = {"crash": "local", "every pod": "remote"}.get(fault, "peer")
    behind = 20 if fault == "every pod" else 0
    told = {
        "attempt": number + 2, "cause": CAUSES[fault], "tiers": {tier: 3}, "detectSeconds": down / 3,
        "restoreSeconds": down / 3, "totalSeconds": down + PACE,
    }  # fmt: skip
    victims = {"crash": (), "every pod": (0, 1, 2)}.get(fault, (1,))
    after = began + 10.0 + down + PACE + behind * PACE
    return Struck(fault, began + 10.0, victims, began, began + 10.0, after, 41, told, 10)


@pytest.mark.parametrize("down", [6.0, 30.0])
def test_a_run_whose_recoveries_are_all_alike_is_foretold(down: float) -> None:
    life = [struck(number, fault, down) for number, fault in enumerate([*FAULTS, *FAULTS])]
    found = foretell(Record(life, PACE))["held out"]
    assert found["foretold"] == pytest.approx(found["measured"], rel=0.1)


def test_halves_have_as_many_of_each_fault() -> None:
    life = [struck(number, fault, 6.0) for number, fault in enumerate([*FAULTS, *FAULTS, *FAULTS, *FAULTS])]
    first, second = ([each.fault for each in half] for half in halves(life))
    assert sorted(first) == sorted(second)
    assert all(count % 2 == 0 for count in TIMES_EACH.values())


def test_a_step_is_new_when_the_first_rank_makes_it_and_only_once() -> None:
    made = {0: [(1.0, 1, 1), (2.0, 2, 1), (9.0, 2, 2), (10.0, 3, 2)], 1: [(1.1, 1, 1), (9.9, 3, 2)]}
    assert new_steps(made) == {1: 1.0, 2: 2.0, 3: 9.9}


def test_a_strike_costs_the_longest_wait_before_the_next_one() -> None:
    moments = [1.0, 2.0, 3.0, 3.1, 9.0, 10.0, 11.0, 20.0, 21.0]
    strikes = [Struck(fault, at, (), at, at, at, 0, {}, 0) for fault, at in (("node", 3.05), ("crash", 11.5))]
    first, second = costs(strikes, dict(enumerate(moments)), 1.0)
    assert (first.began, first.before, first.after) == (1.0, 3.1, 9.0)
    assert (second.began, second.before, second.after, second.steps) == (9.0, 11.0, 20.0, 3)


def test_the_page_of_the_real_cluster_tells_of_every_kind_of_failure_twice() -> None:
    assert len(ROWS) > 10
    assert all(len(row["ours"]) == len(row["next"]) == 2 for row in ROWS)
    assert {"TrainerCrash", "PodEvicted", "NodeSilent", "DomainLost", "AllPodsLost"} <= {
        row["cause"] for row in ROWS
    }


def test_the_runs_of_the_real_cluster_foretell_each_other_when_both_give_half() -> None:
    for first in (0, 1):
        found = foretell_rows(every_other(ROWS, first))
        assert found["foretold"] == pytest.approx(found["measured"], rel=0.2)


def test_the_real_clusters_times_are_within_what_its_page_tells() -> None:
    times = page_times(ROWS, usual_times())
    slowest = max(max(row["next"]) for row in ROWS)
    for kind in ("process", "pod", "host", "rack"):
        parts = times.of(kind)
        assert 0 < parts.detect + parts.replace * (kind != "process") + parts.restart < slowest


def test_published_seconds_are_kept_and_read_between() -> None:
    for published in (COLLECTIVES, COLD):
        assert [seconds_at(gpus, published) for gpus, _ in published] == [seconds for _, seconds in published]
    assert 17 < seconds_at(20_000, COLLECTIVES) < 30
    assert seconds_at(100_000, COLLECTIVES) > 200


def test_every_peer_is_named_with_its_source() -> None:
    assert all(peer.source.startswith("arXiv:") for peer in PEERS)
