"""Tells which second saved buys most.

The same lives are simulated again, with one part of a recovery shorter or one kind of failure rarer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from tiercheck_cli.durations import short
from tiercheck_cli.simulate.lives import simulate_lives
from tiercheck_operator.planning.simulation.scenario import RecoveryTimes, Scenario
from tiercheck_operator.planning.simulation.simulation import Simulation

_PARTS = ("detect", "replace", "spare", "restart", "protect")
_TIERS = ("local", "peer", "remote")
_SECOND, _TENTH, _OTHER = "1 s less", "10 % less", "else"


@dataclass(frozen=True)
class Gain:
    """One row."""

    part: str
    by: str
    gain: float
    """ETTR more than without the change."""


def find_gains(
    base: Simulation, described: Scenario, *, seed: int, tick: Callable[[int], None] | None = None
) -> tuple[Gain, ...]:
    """What buys most first. `base`: the lives of `described`. Every change meets the same failures, but for
    those of the rates."""
    found = []
    for part, by, changed in changes(described):
        again = simulate_lives(changed, days=base.days, runs=len(base.runs), seed=seed, tick=tick)
        found.append(Gain(part, by, again.ettr - base.ettr))
    return tuple(sorted(found, key=lambda each: -each.gain))


def changes(described: Scenario) -> Iterator[tuple[str, str, Scenario]]:
    """(part, by how much, the scenario so changed). Parts that are 0 already are left out."""
    for part in (*_PARTS, *_TIERS):
        if any(_seconds(each, part) for each in (described.times, *described.times.kinds.values())):
            name = f"restore, {part}" if part in _TIERS else part
            yield name, _SECOND, _shorter(described, part, lambda seconds: max(0.0, seconds - 1.0))
            yield name, _TENTH, _shorter(described, part, lambda seconds: seconds * 0.9)
    saving, rates = described.saving, described.rates
    if saving.remote_every is not None and saving.remote_every > 1:
        rarer = replace(saving, remote_every=max(1, round(saving.remote_every * 0.9)))
        yield "remote interval", _TENTH, replace(described, saving=rarer)
    if not saving.deltas and saving.snapshot_every > 1:
        rarer = replace(saving, snapshot_every=max(1, round(saving.snapshot_every * 0.9)))
        yield "snapshot interval", _TENTH, replace(described, saving=rarer)
    if saving.peer_lag > 1:
        yield (
            "peer copy",
            "1 step sooner",
            replace(described, saving=replace(saving, peer_lag=saving.peer_lag - 1)),
        )
    yield "spares", "1 more", replace(described, spares=described.spares + 1)
    if rates.process:
        yield "crashes", _TENTH, replace(described, rates=replace(rates, process=rates.process * 0.9))
    for level, rate in rates.domains.items():
        if rate:
            rarer_still = {**rates.domains, level: rate * 0.9}
            yield (
                f"failures of a {level}",
                _TENTH,
                replace(described, rates=replace(rates, domains=rarer_still)),
            )


def _seconds(times: RecoveryTimes, part: str) -> float:
    return float(getattr(times.restore if part in _TIERS else times, part))


def _shorter(described: Scenario, part: str, how: Callable[[float], float]) -> Scenario:
    def change(times: RecoveryTimes) -> RecoveryTimes:
        value: dict[str, Any] = {part: how(_seconds(times, part))}
        if part in _TIERS:
            return replace(times, restore=replace(times.restore, **value))
        return replace(times, **value)

    return replace(described, times=described.times.changed(change))


def table(found: tuple[Gain, ...]) -> Table:
    """For the terminal: what each change is worth in a day, a line for each part."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("TRAINING GAINED PER DAY")
    ways = list(dict.fromkeys(each.by for each in found if each.by in (_SECOND, _TENTH))) or [_SECOND]
    for way in (*sorted(ways), _OTHER):
        shown.add_column(way.upper(), justify="right")
    for part in dict.fromkeys(each.part for each in found):
        gains = {each.by if each.by in ways else _OTHER: each for each in found if each.part == part}
        told = [gains.get(way) for way in (*sorted(ways), _OTHER)]
        shown.add_row(Text(part), *(Text("" if each is None else _told(each, ways)) for each in told))
    return shown


def _told(change: Gain, ways: list[str]) -> str:
    seconds = change.gain * 86_400
    worth = "-" if abs(seconds) < 0.05 else f"{'-' if seconds < 0 else ''}{short(abs(seconds))}"
    return worth if change.by in ways else f"{change.by}: {worth}"
