"""Says in a sentence why a spread cannot be had: which domain is too full, or what is not known."""

from __future__ import annotations

from collections import Counter

from tiercheck_operator.planning.ground import Ground
from tiercheck_operator.planning.topology import short_name


def bound(ground: Ground, level: int) -> str:
    """The first bound that forbids every worker to have all its copies in other domains of that level."""
    name = ground.levels[level]
    total = ground.workers
    if total == 1:
        return "a single worker has no other worker to keep its copies"
    able = [worker for worker in range(total) if ground.can_hold[worker]]
    if not able:
        return "no worker can hold copies: all are on suspect nodes or short of memory"
    nameless = ground.unlabelled[level]
    if nameless:
        more = f" and {len(nameless) - 3} more" if len(nameless) > 3 else ""
        plural = "node" if len(nameless) == 1 else "nodes"
        return f"the {name} of {plural} {', '.join(nameless[:3])}{more} is not known from labels"
    domain = ground.domain[level]
    owners = Counter(domain)
    holders = Counter(domain[worker] for worker in able)
    # Demand inside a domain against room outside it: where the difference is largest, Hall's condition fails first.
    pressure = {place: ground.copies * owners[place] + ground.load_limit * holders[place] for place in owners}
    worst = min(pressure, key=lambda place: (-pressure[place], place))
    count = owners[worst]
    outside = len(able) - holders[worst]
    place = f"{name} {short_name(ground.domain_name[level][worst])}"
    if count == total:
        return f"all {total} workers are in {place}"
    if outside < ground.copies:
        return f"{place} holds {count} of {total} workers; {ground.copies} copies of each need {ground.copies} holders outside, and there are {outside}"
    if ground.copies * count > ground.load_limit * outside:
        if len(able) == total:
            return f"{place} holds {count} of {total} workers; no more than half can be matched across {name}s"
        return (
            f"{place} holds {count} of {total} workers, and only {outside} workers outside it can hold copies; "
            f"{total - len(able)} are on suspect nodes or short of memory"
        )
    return f"the workers that can hold copies are spread too unevenly over the {name}s"
