"""A few strikes on real processes: the campaign itself works, and finds nothing.

`make chaos` is the long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import campaign, report

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


def test_job_comes_through_ten_strikes_bit_for_bit(tmp_path: Path) -> None:
    told: list[str] = []
    plan = campaign.Plan(
        seed=3, injections=10, seconds=1e9, workers=2, pace=0.05, rest=(0.0, 0.2), stopped=3.0
    )
    course = campaign.run(plan, tmp_path, told.append)
    assert not course.broken, "\n".join(told)
    assert len(course.strikes) >= 8, "\n".join(told)
    assert course.compared > 2 * course.steps
    report.write(course, tmp_path)
    assert "0 promises broken" in (tmp_path / "chaos.md").read_text()
