"""Runs schedules: one seed, many, or many with a bug in the product.

A failing seed's history is printed for people.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.checker import Broken, check
from tests.simulation.mutations import Mutation
from tests.simulation.plan import plan_of
from tests.simulation.quick_values import make_values_quick
from tests.simulation.whole import Entry, Simulation

RAISES = "nothing raises"
KEPT = Path(__file__).with_name("seeds.txt")
"""Every seed that ever failed, with a line why."""
_COLLECT_EVERY = 32
_PLAYED = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    seed: int
    plan: str
    broken: tuple[Broken, ...]
    simulated: float
    """Seconds."""
    entries: int
    size: str
    """small, short or long."""


def history_of(seed: int) -> list[Entry]:
    """What happens in the schedule that the seed stands for."""
    with _undisturbed():
        return Simulation(plan_of(seed)).play()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without logs, and without looks for garbage but every few schedules: each leaves little."""
    quiet, collecting = logging.root.manager.disable, gc.isenabled()
    if quiet < logging.CRITICAL:  # each change makes every logger forget what it is to write
        logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        if next(_PLAYED) % _COLLECT_EVERY == 0:
            gc.collect()
            gc.freeze()  # what is left stays, and is not looked through again
        if collecting:
            gc.enable()
        if quiet < logging.CRITICAL:
            logging.disable(quiet)


def digest_of(history: Iterable[Entry]) -> str:
    """The same for the same history, in every process."""
    found = hashlib.blake2b(digest_size=16)
    for at, what, fields in history:
        found.update(f"{at} {what} {sorted((name, str(value)) for name, value in fields.items())}\n".encode())
    return found.hexdigest()


def run(seed: int) -> Outcome:
    """An exception in the product breaks a promise too."""
    plan = plan_of(seed)
    try:
        history = history_of(seed)
        broken = tuple(check(history))
    except Exception as error:
        crash = Broken(RAISES, f"{type(error).__name__}: {error}", 0.0)
        return Outcome(seed, str(plan), (crash,), 0.0, 0, plan.size)
    return Outcome(seed, str(plan), broken, history[-1][0], len(history), plan.size)


def run_many(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """In a process that does nothing else, as all that it starts: see `use_process`."""
    use_process()
    if jobs < 2:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=use_process) as pool:
        yield from pool.map(run, seeds, chunksize=8)


def use_process() -> None:
    """This process plays schedules from now on, and nothing else."""
    logging.disable(logging.CRITICAL)
    make_values_quick()


def kept_seeds() -> dict[int, str]:
    """By seed, why it is kept."""
    lines = (
        line.partition(" ") for line in KEPT.read_text().splitlines() if line and not line.startswith("#")
    )
    return {int(seed): why.strip() for seed, _, why in lines}


def tell(seed: int, last: int = 400) -> str:
    """The history of a seed as a person reads it, the broken promises at their place."""
    history = history_of(seed)
    broken = check(history)
    lines = [f"{at:9.3f}  {what:10} {_told(fields)}" for at, what, fields in history]
    for each in sorted(broken, key=lambda one: -one.at):
        place = next((i for i, entry in enumerate(history) if entry[0] > each.at), len(history))
        lines.insert(place, f"********** {each}")
    head = [str(plan_of(seed)), *(f"  {each}" for each in broken)]
    return "\n".join([*head, "", *lines[-last:]])


def _told(fields: dict[str, object]) -> str:
    shown = []
    for name, value in fields.items():
        if name == "body":
            continue
        text = (
            value.hex()
            if isinstance(value, bytes)
            else _artifacts(value)
            if name in ("what", "held")
            else str(value)
        )
        shown.append(f"{name}={text}")
    return " ".join(shown)


def _artifacts(value: object) -> str:
    several = value if isinstance(value, tuple) and value and isinstance(value[0], tuple) else (value,)
    return ", ".join(f"{t.value} {k.value} {r}@{v.step}/{v.attempt}" for t, r, k, v in filter(None, several))


@dataclass(frozen=True)
class Found:
    mutation: Mutation
    seed: int | None
    """The first in which it shows; None: in none."""
    tried: int
    promise: str
    seconds: float


def find(mutation: Mutation, most: int, first: int = 0) -> Found:
    """Schedules until the bug shows, at most so many. A seed that breaks a promise without the bug shows
    nothing, and nor does an exception: that may be of the patch, which no longer fits what it patches.
    """
    began, tried, seed = time.process_time(), 0, max(first, mutation.first)
    while tried < most:
        if mutation.focus(plan_of(seed)):
            tried += 1
            with mutation.made():
                outcome = run(seed)
            promise = next((each.promise for each in outcome.broken), RAISES)
            if promise != RAISES and not run(seed).broken:
                return Found(mutation, seed, tried, promise, time.process_time() - began)
        seed += 1
    return Found(mutation, None, tried, "", time.process_time() - began)
