"""The state is fenced by attempts, looked at once per burst, and written by its own methods only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiercheck_sidecar
from tests.sidecar.values import config_of
from tiercheck_sidecar.model import state as state_module
from tiercheck_sidecar.model.fence import Fence
from tiercheck_sidecar.model.state import SidecarState

# The fence


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


# Looks


class World:
    """A state whose pauses pass by themselves, with changes while they last."""

    def __init__(self) -> None:
        self.now, self.quiet, self.burst, self.paused = 1000.0, 0.0, 0, 0
        self.state = SidecarState(config_of(), clock=lambda: self.now)
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


# Who writes


PRODUCT = Path(tiercheck_sidecar.__file__).parent


def written(tree: ast.AST) -> Iterator[tuple[ast.expr, str, int]]:
    """Each attribute that is set or deleted, or whose items are: of what, its name, and the line."""
    for node in ast.walk(tree):
        target = (
            node.value if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) else node
        )
        if isinstance(target, ast.Attribute) and not (target is node and isinstance(target.ctx, ast.Load)):
            yield target.value, target.attr, target.lineno


def is_self(of: ast.expr) -> bool:
    return isinstance(of, ast.Name) and of.id == "self"


def state_fields() -> set[str]:
    tree = ast.parse(Path(state_module.__file__).read_text())
    (state,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "SidecarState")
    return {name for of, name, _ in written(state) if is_self(of) and not name.startswith("_")}


def trespasses(source: str, fields: set[str]) -> list[str]:
    return [
        f"line {line}: {ast.unparse(of)}.{name}"
        for of, name, line in written(ast.parse(source))
        if name in fields and not is_self(of)
    ]


def test_no_module_writes_a_field_of_the_state() -> None:
    fields = state_fields()
    assert {"directive", "verdict", "restore", "remote"} <= fields
    found = {
        str(path.relative_to(PRODUCT)): trespasses(path.read_text(), fields) for path in PRODUCT.rglob("*.py")
    }
    assert not {path: lines for path, lines in found.items() if lines}


def test_each_way_to_write_a_field_is_seen() -> None:
    ways = [
        "self._state.verdict = None",
        "state.left_out &= gone",
        "state.reached[0] = version",
        "self.state.ending, rest = True, 1",
        "del state.remote",
        "state.proofs: tuple = ()",
    ]
    fields = {"verdict", "left_out", "reached", "ending", "remote", "proofs"}
    assert [len(trespasses(way, fields)) for way in ways] == [1] * len(ways)
    assert trespasses("self.verdict = state.verdict\nknown = state.reached[0]", fields) == []
