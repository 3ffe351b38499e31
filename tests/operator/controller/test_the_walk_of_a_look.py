"""A person who follows one look at a healthy job through `decide` passes few modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from tests.operator import world_in_memory
from tests.operator.world_in_memory import World
from tiercheck_operator.model.actions import Decision
from tiercheck_operator.model.observed import Observation

ROOT = Path(__file__).parents[3]
PRODUCT = (ROOT / "operator", ROOT / "tiercheck")
MOST = 20


def modules_entered(decide: Callable[[Observation], Decision], seen: Observation) -> set[str]:
    """In which modules of the product a function is called between the observation and the decision."""
    files = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        decide(seen)
    finally:
        sys.setprofile(before)
    paths = map(Path, files)
    return {str(path.relative_to(ROOT)) for path in paths if any(map(path.is_relative_to, PRODUCT))}


def test_one_look_at_a_running_job_passes_few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(), list[Observation]()
    world.until("Running")
    world.train(9)
    decide = world_in_memory.decide

    def remember(obs: Observation) -> Decision:
        seen.append(obs)
        return decide(obs)

    monkeypatch.setattr(world_in_memory, "decide", remember)
    world.train(1)
    entered = modules_entered(decide, seen[-1])
    assert len(entered) <= MOST, sorted(entered)
