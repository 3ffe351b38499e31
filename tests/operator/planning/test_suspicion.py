"""Whom the rule gives up, and above all whom it never does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tiercheck_operator.model.observed import Patience
from tiercheck_operator.planning.suspicion import (
    PodEvidence,
    Training,
    UnreachableReport,
    find_suspected_pods,
)

LIMITS = Patience(unreachable=2, suspect=10, silent=60, isolated=30)


def pods(count: int, per_node: int = 1) -> list[PodEvidence]:
    return [PodEvidence(f"p{index}", f"n{index // per_node}") for index in range(count)]


def reporting(
    witness: PodEvidence, *named: str, seconds: float = 5.0, host_silent: bool = True
) -> PodEvidence:
    return replace(
        witness, unreachable_peers=tuple(UnreachableReport(name, seconds, host_silent) for name in named)
    )


def test_silent_pod_that_a_peer_misses_too_is_given_up_in_seconds() -> None:
    a, b, c = pods(3)
    seen = [reporting(a, "p2"), b, replace(c, silent=3.0)]
    found = find_suspected_pods(seen, LIMITS)
    assert set(found) == {"p2"}
    assert found["p2"].reporters == ("p0",)
    assert found["p2"].host_silent


def test_peers_silence_counts_once_it_has_lasted_as_long_as_ours_must() -> None:
    """A sidecar says so at once, so that both may wait at the same time."""
    a, b, c = pods(3)
    late = reporting(a, "p2", seconds=1.9)
    assert find_suspected_pods([late, b, replace(c, silent=3.0)], LIMITS) == {}
    assert find_suspected_pods([late, b, replace(c, silent=59.0)], LIMITS) == {}
    assert set(find_suspected_pods([reporting(a, "p2", seconds=2.1), b, replace(c, silent=2.1)], LIMITS)) == {
        "p2"
    }


def test_nodes_that_fail_together_are_given_up_together() -> None:
    """The first of a rack is silent a moment before the second: a new pod must not go to that one."""
    a, b, c, d = pods(4)
    first = reporting(a, "p2")
    asked = replace(d, heard=6.0)
    assert find_suspected_pods([first, b, replace(c, silent=3.0), asked], LIMITS) == {}, (
        "p3 has not answered since"
    )
    both = reporting(a, "p2", "p3")
    assert set(find_suspected_pods([both, b, replace(c, silent=3.0), replace(d, silent=2.5)], LIMITS)) == {
        "p2",
        "p3",
    }
    assert set(find_suspected_pods([first, b, replace(c, silent=3.0), replace(d, heard=0.9)], LIMITS)) == {
        "p2"
    }, "it has answered since"
    assert find_suspected_pods([first, b, replace(c, silent=3.0), replace(d, heard=1.1)], LIMITS) == {}, (
        "it answered when p2 was silent already, and may have fallen silent a moment later"
    )
    assert set(find_suspected_pods([first, b, replace(c, silent=7.0), asked], LIMITS)) == {"p2"}, (
        "not for ever"
    )


def test_silence_alone_takes_a_minute_and_broken_training_shortens_it() -> None:
    a, b = pods(2)
    assert find_suspected_pods([a, replace(b, silent=59.0)], LIMITS) == {}
    assert set(find_suspected_pods([a, replace(b, silent=61.0)], LIMITS)) == {"p1"}
    assert set(find_suspected_pods([replace(a, failed=True), replace(b, silent=11.0)], LIMITS)) == {"p1"}


def test_sidecar_that_is_closed_is_given_the_time_to_start_again() -> None:
    a, b = pods(2)
    seen = [reporting(a, "p1", host_silent=False), replace(b, silent=9.0)]
    assert find_suspected_pods(seen, LIMITS) == {}
    seen[1] = replace(b, silent=11.0)
    found = find_suspected_pods(seen, LIMITS)
    assert set(found) == {"p1"}
    assert not found["p1"].host_silent


def test_one_confused_peer_moves_nobody_who_answers() -> None:
    a, b, c, d = pods(4)
    assert find_suspected_pods([reporting(a, "p1", "p2", "p3", seconds=1e6), b, c, d], LIMITS) == {}


def test_accusations_of_the_silent_do_not_count() -> None:
    a, b, c = pods(3)
    seen = [replace(reporting(a, "p1"), silent=3.0), replace(b, silent=3.0), c]
    assert find_suspected_pods(seen, LIMITS) == {}


def test_late_answer_between_others_hides_no_node_that_is_cut_off() -> None:
    seen = pods(6, per_node=2)
    seen[2] = reporting(seen[2], "p0", seconds=40)
    seen[4] = reporting(seen[4], "p1", seconds=40)
    found = find_suspected_pods(seen, LIMITS)
    seen[3] = reporting(seen[3], "p5", seconds=0.4)
    assert find_suspected_pods(seen, LIMITS) == found != {}


def test_node_that_no_other_node_reaches_is_given_up_with_all_its_pods() -> None:
    seen = pods(6, per_node=2)
    seen[2] = reporting(seen[2], "p0", seconds=40)
    seen[4] = reporting(seen[4], "p1", seconds=40)
    found = find_suspected_pods(seen, LIMITS)
    assert set(found) == {"p0", "p1"}
    assert all(suspicion.answers for suspicion in found.values())
    seen[4] = reporting(seen[4], "p1", seconds=20)
    assert find_suspected_pods(seen, LIMITS) == {}, "it may pass"


def test_node_is_believed_about_its_own_isolation_only_if_another_one_agrees() -> None:
    a, b, c, d = pods(4)
    alone = reporting(a, "p1", "p2", seconds=40)
    assert find_suspected_pods([alone, b, c, d], LIMITS) == {}
    assert set(find_suspected_pods([alone, reporting(b, "p0", seconds=40), c, d], LIMITS)) == {"p0"}


def test_network_that_falls_apart_in_the_middle_gives_up_nobody() -> None:
    a, b, c, d = pods(4)
    far = {"seconds": 1e6}
    seen = [
        reporting(a, "p2", "p3", **far),
        reporting(b, "p2", "p3", **far),
        reporting(c, "p0", "p1", **far),
        reporting(d, "p0", "p1", **far),
    ]
    assert find_suspected_pods(seen, LIMITS) == {}


def test_side_that_we_cannot_hear_is_the_only_one_given_up() -> None:
    a, b, c, d = pods(4)
    seen = [
        reporting(a, "p2", "p3"), reporting(b, "p2", "p3"),
        replace(reporting(c, "p0", "p1"), silent=3.0), replace(reporting(d, "p0", "p1"), silent=3.0),
    ]  # fmt: skip
    assert set(find_suspected_pods(seen, LIMITS)) == {"p2", "p3"}


def test_most_of_a_job_is_not_given_up_in_seconds() -> None:
    a, b, c = pods(3)
    seen = [reporting(a, "p1", "p2"), replace(b, silent=30.0), replace(c, silent=30.0)]
    assert find_suspected_pods(seen, LIMITS) == {}
    assert set(find_suspected_pods([seen[0], replace(b, silent=61.0), replace(c, silent=61.0)], LIMITS)) == {
        "p1",
        "p2",
    }


def test_host_that_takes_our_connection_is_not_dead_however_long_its_sidecar_has_no_time_for_peers() -> None:
    a, b, c = pods(3)
    seen = [reporting(a, "p2"), b, replace(c, silent=8.0, host_answers=True)]
    assert find_suspected_pods(seen, LIMITS) == {}, "a busy node"
    assert set(find_suspected_pods([*seen[:2], replace(seen[2], silent=11.0)], LIMITS)) == {"p2"}


def test_step_of_training_vouches_for_all_who_take_part() -> None:
    a, b, c = pods(3)
    seen = [reporting(a, "p2"), b, replace(c, silent=1e6)]
    assert find_suspected_pods(seen, LIMITS, Training(stepped=1.0, pace=1.0)) == {}
    found = find_suspected_pods(seen, LIMITS, Training(stepped=3.0, pace=1.0))
    assert found["p2"].seconds == 3.0, "since the last step"
    seen[2] = replace(seen[2], takes_part=False)
    assert set(find_suspected_pods(seen, LIMITS, Training(stepped=1.0, pace=1.0))) == {"p2"}


def test_steps_that_take_long_are_given_the_time_where_nothing_else_is_known() -> None:
    a, b = pods(2)
    slow = Training(stepped=70.0, pace=40.0)
    assert find_suspected_pods([a, replace(b, silent=1e6)], LIMITS, slow) == {}
    assert (
        find_suspected_pods([reporting(a, "p1", host_silent=False), replace(b, silent=1e6)], LIMITS, slow)
        == {}
    )
    assert set(find_suspected_pods([reporting(a, "p1"), replace(b, silent=1e6)], LIMITS, slow)) == {"p1"}


def test_sidecar_that_its_kubelet_starts_again_is_waited_for() -> None:
    a, b = pods(2)
    closed = reporting(a, "p1", host_silent=False)
    for held in (300.0, 10.0, 0.0, -1e6):
        assert find_suspected_pods([closed, replace(b, silent=1e6, held=held)], LIMITS) == {}, (
            "nothing waits for it"
        )
    waits = Training(waits=True)
    for held, given_up in ((300.0, True), (31.0, True), (29.0, False), (-149.0, False), (-151.0, True)):
        seen = [closed, replace(b, silent=1e6, held=held)]
        assert bool(find_suspected_pods(seen, LIMITS, waits)) is given_up
        seen[0] = replace(a, failed=True)
        assert bool(find_suspected_pods(seen, LIMITS)) is given_up
    assert set(find_suspected_pods([reporting(a, "p1"), replace(b, silent=3.0, held=300.0)], LIMITS)) == {
        "p1"
    }, "its host died"


@st.composite
def sights(draw: st.DrawFn) -> list[PodEvidence]:
    """Any job, any silence, any reports."""
    count = draw(st.integers(1, 8))
    per_node = draw(st.integers(1, 3))
    seconds = st.sampled_from([0.0, 1.0, 3.0, 11.0, 31.0, 61.0, 1e6])
    found = []
    for witness in pods(count, per_node):
        named = draw(st.lists(st.integers(0, count), max_size=count, unique=True))
        unreachable_peers = tuple(
            UnreachableReport(f"p{each}", draw(seconds), draw(st.booleans())) for each in named
        )
        silent = draw(st.none() | seconds)
        held = draw(st.none() | st.sampled_from([-1e6, -1.0, 5.0, 300.0])) if silent is not None else None
        failed, host_answers = draw(st.booleans()), draw(st.booleans())
        found.append(
            replace(
                witness,
                silent=silent,
                failed=failed,
                unreachable_peers=unreachable_peers,
                held=held,
                host_answers=host_answers,
            )
        )
    return found


TRAININGS = st.builds(
    Training, st.sampled_from([0.0, 1.0, 30.0, 1e6]), st.sampled_from([0.0, 1.0, 60.0]), st.booleans()
)


@given(sights(), TRAININGS)
def test_never_everybody_and_never_on_one_word(seen: list[PodEvidence], training: Training) -> None:
    found = find_suspected_pods(seen, LIMITS, training)
    by_name = {witness.pod: witness for witness in seen}
    answering = [witness for witness in seen if witness.silent is None]
    assert len(found) < len(seen) or not seen, "somebody is always left"
    if not answering:
        assert found == {}, "then it is the controller that is cut off"
    for pod, suspicion in found.items():
        witness = by_name[pod]
        if suspicion.answers:
            assert witness.silent is None
            assert {by_name[name].node for name in suspicion.reporters} - {witness.node}, (
                "not on its own word alone"
            )
        else:
            assert witness.silent is not None
            assert witness.silent > LIMITS.unreachable or witness.held is not None
    # Given up although they answer: the pods of one node, and fewer than half of the job.
    alive = [pod for pod, suspicion in found.items() if suspicion.answers]
    assert len({by_name[pod].node for pod in alive}) <= 1
    assert 2 * len(alive) < len(seen) or not alive
    assert any(witness.pod not in found for witness in answering) or not answering, (
        "of those who answer somebody is left"
    )


@given(sights())
def test_who_trains_is_never_given_up(seen: list[PodEvidence]) -> None:
    well = [replace(witness, failed=False) for witness in seen]
    assert find_suspected_pods(well, LIMITS, Training(stepped=1.0, pace=1.0)) == {}


@given(sights())
def test_more_silence_never_clears_anybody(seen: list[PodEvidence]) -> None:
    later = [replace(w, silent=None if w.silent is None else w.silent + 5) for w in seen]
    silent = {pod for pod, suspicion in find_suspected_pods(seen, LIMITS).items() if not suspicion.answers}
    assert silent <= set(find_suspected_pods(later, LIMITS))


@given(sights(), st.randoms(use_true_random=False))
def test_the_order_of_pods_does_not_matter(seen: list[PodEvidence], random: object) -> None:
    shuffled = list(seen)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert find_suspected_pods(seen, LIMITS) == find_suspected_pods(shuffled, LIMITS)
