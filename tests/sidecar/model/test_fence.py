"""The fence: who is of an attempt that is over is refused and counted; who is ahead is told to wait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tiercheck_sidecar.model.fence import Fence


@dataclass
class Followed:
    attempt: int


@pytest.mark.parametrize(
    ("attempt", "followed", "past", "future", "counted"),
    [
        (2, Followed(3), "attempt 2 is over, the job is at attempt 3", "", 2),
        (3, Followed(3), "", "", 0),
        (4, Followed(3), "", "attempt 4 is not known here yet", 0),
        (1, None, "", "attempt 1 is not known here yet", 0),
    ],
)
def test_only_what_is_past_is_counted(
    attempt: int, followed: Followed | None, past: str, future: str, counted: int
) -> None:
    counts: list[None] = []
    fence = Fence(lambda: counts.append(None))
    assert fence.refuse_past(attempt, followed) == past  # type: ignore[arg-type]
    assert fence.refuse_future(attempt, followed) == future  # type: ignore[arg-type]
    assert fence.refuse_other(attempt, followed) == past + future  # type: ignore[arg-type]
    assert len(counts) == counted
