"""Promise: a probe clones no more than its room, and in time comes to every element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.trainer.deltas.clones import ParameterPlace, ProbeCandidate, ProbePart, choose

ROOM = 100_000


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[ProbeCandidate]:
    found = []
    for number in sorted(draw(st.sets(st.integers(0, 60), max_size=12))):
        elements = draw(st.integers(1, 60_000))
        size = elements * draw(st.sampled_from([4, 8, 16])) + draw(st.integers(0, 64))
        found.append(ProbeCandidate(number, size, elements if draw(st.booleans()) else 0))
    return found


def spent(part: ProbePart, candidates: list[ProbeCandidate]) -> float:
    (each,) = [each for each in candidates if each.number == part.number]
    return each.size if part.is_whole else each.size * (part.end - part.begin) / each.elements


@given(candidate_lists(), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60_000))
def test_everything_has_its_turn_within_the_room(
    candidates: list[ProbeCandidate], most: int, number: int, element: int
) -> None:
    place = ParameterPlace(number, element)
    seen: dict[int, set[int]] = {each.number: set() for each in candidates}
    for _ in range(400):
        parts, place = choose(candidates, place, ROOM, most)
        assert len(parts) <= most
        assert sum(spent(part, candidates) for part in parts) <= ROOM
        assert len({part.number for part in parts}) == len(parts)
        for part in parts:
            seen[part.number].update(
                [0] if part.is_whole else range(part.begin // 1024, -(-part.end // 1024))
            )
    for each in candidates:
        wanted = range(1) if each.size <= ROOM else range(-(-each.elements // 1024))
        assert seen[each.number] == set(wanted)


def test_what_fits_is_never_cut_and_comes_next_time() -> None:
    candidates = [ProbeCandidate(0, 60, 60), ProbeCandidate(1, 60, 60)]
    parts, place = choose(candidates, ParameterPlace(), 100, 10)
    assert parts == [ProbePart(0)]
    assert choose(candidates, place, 100, 10) == ([ProbePart(1)], ParameterPlace(0))


def test_nothing_to_choose_from_is_no_trouble() -> None:
    assert choose([], ParameterPlace(3, 4), ROOM, 1) == ([], ParameterPlace())
    assert choose([ProbeCandidate(0, ROOM + 1)], ParameterPlace(3, 4), ROOM, 1) == ([], ParameterPlace())
