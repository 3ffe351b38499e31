"""Loops look once for a burst of changes, at once for a change that comes alone, and miss none."""

from __future__ import annotations

from pathlib import Path

from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState


class World:
    """A state whose pauses pass by themselves, with changes while they last."""

    def __init__(self) -> None:
        config = SidecarConfig(
            job="ns/j", job_uid="u", worker=0, procs_per_worker=1, pod_uid="p", pod_ip="127.0.0.1",
            memory_dir=Path("/m"), memory_limit=1, run_dir=Path("/r"), credentials_dir=Path("/c"),
            remote=None, token="t",
        )  # fmt: skip
        self.now, self.quiet, self.burst, self.paused = 1000.0, 0.0, 0, 0
        self.state = SidecarState(config, clock=lambda: self.now)
        self.state.threads.pause = self.pause  # type: ignore[method-assign]
        self.state.wait = self.wait  # type: ignore[method-assign]

    def wait(self, seen: int, timeout: float) -> int:
        """The next change comes after a while."""
        self.now += self.quiet
        return SidecarState.wait(self.state, seen, timeout)

    def pause(self, seconds: float) -> bool:
        self.now, self.paused = self.now + seconds, self.paused + 1
        for _ in range(self.burst):
            self.state.bump()
        self.burst = 0
        return True


def test_change_that_comes_alone_is_looked_at_at_once() -> None:
    world = World()
    world.quiet = 1.0
    looks = world.state.looks(60.0)
    next(looks)
    for _ in range(3):
        world.state.bump()
        next(looks)
    assert world.paused == 0


def test_changes_of_a_burst_share_a_look_and_what_comes_after_it_has_its_own() -> None:
    world = World()
    looks, generations = world.state.looks(60.0), []
    for changes in (3, 5, 0):
        next(looks)
        generations.append(world.state._generation)
        world.burst = changes
        world.state.bump()  # while it looks
    assert world.paused == 2
    assert generations == [0, 4, 10], "each look comes after all changes that it stands for"


def test_clock_that_was_set_back_holds_up_nobody() -> None:
    world = World()
    looks = world.state.looks(60.0)
    next(looks)
    world.quiet = -3600.0
    world.state.bump()
    next(looks)
    assert world.now == 1000.0 - 3600.0 + 0.02


def test_looks_end_when_the_sidecar_stops() -> None:
    world = World()
    looks = world.state.looks(60.0)
    next(looks)
    world.state.stop()
    assert list(looks) == []
