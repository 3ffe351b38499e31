"""`python -m tests.simulation`: many schedules, one seed's history, or the deliberate bugs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter


def main() -> int:
    """0 if every promise was kept, or every bug found."""
    from tests.simulation import runs
    from tests.simulation.plan import FIRST_BRISK

    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=FIRST_BRISK, help="of the first schedule; most are small from this one on"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--tell", type=int, metavar="SEED", help="print what happens in this one")
    parser.add_argument("--mutations", action="store_true", help="find every deliberate bug")
    parser.add_argument("--only", default="", help="the one of them with this name")
    options = parser.parse_args()
    if options.tell is not None:
        print(runs.tell(options.tell, last=1_000_000))
        return 0
    if options.mutations:
        runs.use_process()
        return _mutations(options.schedules, options.seed, options.only)
    began, simulated, broken, sizes = time.monotonic(), 0.0, 0, Counter[str]()
    outcomes = runs.run_many(range(options.seed, options.seed + options.schedules), options.jobs)
    for done, outcome in enumerate(outcomes, 1):
        simulated += outcome.simulated
        sizes[outcome.size] += 1
        if outcome.broken:
            broken += 1
            print(outcome.plan, *outcome.broken, sep="\n    ", flush=True)
            print(f"    again: {sys.executable} -m tests.simulation --tell {outcome.seed}", flush=True)
        if done % 100 == 0:
            rate = done / (time.monotonic() - began)
            print(
                f"{done} schedules, {broken} broken, {rate:.1f} a second; next seed {outcome.seed + 1}",
                flush=True,
            )
    seconds, of_cores = time.monotonic() - began, sum(os.times()[:4])
    told = ", ".join(f"{count} {size}" for size, count in sorted(sizes.items()))
    print(
        f"{options.schedules} schedules ({told}) from seed {options.seed}, {broken} broken; "
        f"{simulated / 3600:.1f} "
        "simulated hours in "
        f"{seconds:.0f} s, {options.schedules / seconds:.1f} schedules a second, "
        f"{options.schedules / of_cores:.1f} per second of a core"
    )
    return 1 if broken else 0


def _mutations(most: int, first: int, only: str) -> int:
    from tests.simulation import runs
    from tests.simulation.mutations import MUTATIONS

    missed = 0
    print(
        "| bug | what it does | found after | promise that it broke | seed |\n| --- | --- | --- | --- | --- |"
    )
    for mutation in MUTATIONS:
        if only and mutation.name != only:
            continue
        found = runs.find(mutation, most, first)
        missed += found.seed is None
        after = f"{found.tried} schedules" if found.seed is not None else f"**not in {found.tried}**"
        print(
            f"| {mutation.name} | {mutation.breaks} | {after} | {found.promise} | {found.seed} |", flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
