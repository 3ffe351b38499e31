"""Checks a history of real processes with the simulation's checker, from outside.

Whose memory held what is not recorded there.

Each injection is a window: what counts as struck, and what must come after it, begins anew with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.checker import Checker, Step

TIERS = ("local", "peer", "remote")


@dataclass
class LifeChecker(Checker):
    """As `Checker`; "injection" begins a window, "settled" ends it."""

    ends: bool = True
    """Training may be ended by what struck last."""
    costs_copies: bool = True
    """What was complete in memory only may be lost to it."""
    struck: str = "the start"
    complete: dict[str, Step] = field(default_factory=dict)
    """The newest mark of each tier, of whatever attempt: what may not be lost."""

    def _injection(self, f: Mapping[str, Any]) -> None:
        self.faults.clear()
        self.lives.clear()
        self.ends, self.costs_copies, self.struck = f["ends"], f["costs_copies"], f["name"]

    def _stuck(self, f: Mapping[str, Any]) -> None:
        self._say("it goes on", f["why"])

    def _verdict(self, f: Mapping[str, Any]) -> None:
        # The status is silent of a tier while nobody answers for it. What it says next must not be less than
        # what it said before.
        known = self.marks.get((f["by"], f["attempt"], f["placement"]), {})
        f = {**f, **{name: f[name] or _as_mark(known.get(name)) for name in TIERS}}
        super()._verdict(f)
        for name in TIERS:
            if f["attempt"] == self.attempt and name in self.announced:
                self.complete[name] = self.announced[name]

    def _look_at_mark(self, name: str, version: Step) -> None:
        # An operator that was stopped tells what was so before: retention may have put newer ones in the
        # place of it.
        newer = any(each >= version and self._on_line(each, self.attempt) for each in self._stored())
        if name == "remote" and not newer:
            super()._look_at_mark(name, version)

    def _look_at_protection(self) -> None:
        """Who covers whom is not recorded."""

    def _attempt(self, f: Mapping[str, Any]) -> None:
        before, version = self.attempt, f["version"]
        chosen = (0, 0) if version is None else (version.step, version.attempt)
        if before and not self.ends:
            self._say("the healthy are left alone", f"attempt {f['number']} begins after {self.struck}")
        for name in TIERS if before else ():
            lost = self.costs_copies and name != "remote"
            mark = self.complete.get(name, (0, 0))
            if name != "local" and not lost and mark[0] > chosen[0]:
                self._say(
                    "committed is kept",
                    f"attempt {f['number']} goes back to {chosen}; {mark} was complete in {name}",
                )
        super()._attempt(f)
        self.complete = {name: mark for name, mark in self.complete.items() if mark[0] <= chosen[0]}

    def _started(self, f: Mapping[str, Any]) -> None:
        base = self.from_.get(f["attempt"])
        version = (
            base if base is not None and base[0] == f["begun"] else (f["begun"], -1) if f["begun"] else None
        )
        super()._started({**f, "version": _as_mark(version)})


@dataclass(frozen=True)
class Mark:
    step: int
    attempt: int


def _as_mark(version: Step | None) -> Mark | None:
    return None if version is None else Mark(*version)
