"""A placement is read back as it was written, and an older operator's is understood."""

from __future__ import annotations

import pytest

from tiercheck_operator.model.saved_placement import (
    CodeGroup,
    Replanning,
    SavedMember,
    SavedPlacement,
    placement_data,
    read_placement_data,
)

MOVING = SavedPlacement(
    3,
    (SavedMember(0, "j-0-0", "u0", 0, "n0", (2, 1)), SavedMember(1, "j-1-2", "u1", 2, "n1", (0,))),
    leaving=((0, (1,)),),
    replanning=Replanning("c", "w", 17.5, 4.0),
)


@pytest.mark.parametrize(
    "placement", [MOVING, SavedPlacement(1, MOVING.members[1:], groups=(CodeGroup((0, 1), (2,)),))]
)
def test_it_is_read_as_it_was_written(placement: SavedPlacement) -> None:
    assert read_placement_data(placement_data(placement)) == placement


def test_one_from_before_copies_could_move_is_read_as_one_that_stands_still() -> None:
    data = placement_data(MOVING)
    old = {key: data[key] for key in ("attempt", "workers", "groups")}
    assert read_placement_data(old) == SavedPlacement(3, MOVING.members)


def test_holders_that_leave_are_not_the_lasting_ones() -> None:
    assert MOVING.holders() == {0: (2, 1), 1: (0,)}
    assert MOVING.lasting() == {0: (2,), 1: (0,)}


@pytest.mark.parametrize("broken", ["{", "[1]", '{"since": "soon"}'])
def test_what_is_no_placement_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        read_placement_data({**placement_data(MOVING), "replanning": broken})
