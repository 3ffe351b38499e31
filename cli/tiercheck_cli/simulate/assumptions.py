"""Lists what a simulation assumes unless told otherwise: failure rates, with sources, and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_operator.planning.placement.problem import WorkerSite
from tiercheck_operator.planning.simulation.scenario import FailureRates, RecoveryTimes
from tiercheck_operator.planning.topology import Topology
from tiercheck_operator.planning.wanted import Wanted


@dataclass(frozen=True)
class CountedFailures:
    """Failures as somebody counted them, per 1,000 days of one node."""

    node: float
    process: float
    domain_share: float
    """Of all failures, the part that takes a whole domain of the spread level along."""
    source: str


RECORDS: Mapping[str, CountedFailures] = {
    "rsc-1": CountedFailures(
        6.50, 19.5, 0.03,
        "nodes: 6.50 per 1,000 node-days, Meta's RSC-1 (Kokolis et al. 2024, arXiv:2410.21680); processes: "
        "three times as many "
        "(DLRover: three in four faults are cured by restarting processes); domains: 3 in 100 of all, an "
        "assumption",
    ),
    "rsc-2": CountedFailures(
        2.34, 7.02, 0.03,
        "nodes: 2.34 per 1,000 node-days, Meta's RSC-2 (Kokolis et al. 2024, arXiv:2410.21680); processes "
        "and domains as for rsc-1",
    ),
    "llama-3": CountedFailures(
        2.92, 0.55, 0.084,
        "419 unexpected interruptions in 54 days on 2,048 nodes (Llama 3, arXiv:2407.21783, table 5): 61 of "
        "them software, 35 network "
        "switches and cables, each taken to hit a whole domain, and the rest nodes",
    ),
    "byterobust": CountedFailures(
        1.32, 0.30, 0.0,
        "175 incidents in three months on 1,200 nodes (ByteRobust, arXiv:2509.16293, table 4): 143 ended "
        "with nodes evicted, 32 with code rolled back or updated; domains are not counted there",
    ),
    "ft-hsdp": CountedFailures(
        1.81, 0.37, 0.053,
        "2.3 interruptions per 1,000 server-days at 32,000 GPUs (FT-HSDP, arXiv:2602.00277): 16 in 100 "
        "software and collective timeouts, 5.3 network, taken to hit a whole domain, and the rest nodes",
    ),
    "ft-hsdp-100k": CountedFailures(
        5.12, 1.04, 0.053,
        "a failure every 18 minutes on 98,304 GPUs (FT-HSDP, arXiv:2602.00277), which is 6.5 per 1,000 "
        "server-days; shares as for ft-hsdp",
    ),
}  # fmt: skip
"""By name. llama-3: 419 / (54 x 2,048) = 3.79 per 1,000 node-days; software bugs and watchdog
timeouts are 61 of 419."""

PEER_BANDWIDTH = 2 * 2**30
"""Bytes per second and worker, where the job does not limit it."""
REMOTE_BANDWIDTH = 200 * 2**20
STEP_SECONDS = 5.0


@dataclass(frozen=True)
class Assumptions:
    """Of one simulation. Rates are per 1,000 days of a node, or of a domain."""

    node: float
    process: float
    domains: Mapping[str, float]
    times: RecoveryTimes
    step_seconds: float
    sources: tuple[str, ...]
    """Where all this is from, as sentences."""
    moves: float = 0.0
    """Pods of the job that are moved or evicted in a day."""
    measured: tuple[str, ...] = ()
    """The same of what recoveries have told."""

    def rates(self, sites: Sequence[WorkerSite], topology: Topology) -> FailureRates:
        """Per hour, as planning counts; those of processes per worker."""
        nodes = len({site.node for site in sites})
        host = topology.level_names[-1]
        return FailureRates(
            process=self.process * nodes / len(sites) / 24_000.0,
            pod=self.moves / 24.0 / len(sites),
            domains={host: self.node / 24_000.0}
            | {level: rate / 24_000.0 for level, rate in self.domains.items()},
        )

    def failures_per_day(self, sites: Sequence[WorkerSite], topology: Topology) -> float:
        """Of the whole job."""
        rates = self.rates(sites, topology)
        total = (rates.process + rates.pod) * len(sites)
        for level, rate in rates.domains.items():
            total += rate * len({topology.domain(site.node, level) for site in sites} - {None})
        return total * 24.0


def record(name: str) -> CountedFailures:
    """Raises CannotDo."""
    if name not in RECORDS:
        raise CannotDo(f'no failures are on record as "{name}"; known are {", ".join(RECORDS)}', USAGE)
    return RECORDS[name]


def domain_rates(told: Sequence[str], topology: Topology) -> dict[str, float]:
    """Of `--domain-failures rack=2`. Raises CannotDo."""
    found: dict[str, float] = {}
    for entry in told:
        level, equals, text = entry.partition("=")
        if not equals or level not in topology.level_names[:-1]:
            known = ", ".join(topology.level_names[:-1])
            raise CannotDo(f'"{entry}" must be LEVEL=RATE, with a level of the job: {known}', USAGE)
        try:
            found[level] = float(text)
        except ValueError as error:
            raise CannotDo(
                f'"{entry}" must be LEVEL=RATE, with a number of failures per 1,000 days', USAGE
            ) from error
        if not 0 <= found[level] < float("inf"):
            raise CannotDo(f'"{entry}": a rate must not be negative', USAGE)
    return found


def shared_domain_rate(
    counted: CountedFailures,
    *,
    node: float,
    process: float,
    sites: Sequence[WorkerSite],
    topology: Topology,
    level: str,
) -> float:
    """Per 1,000 days of one domain, such that they are the record's share of all failures."""
    domains = {topology.domain(site.node, level) for site in sites} - {None}
    if len(domains) < 2 or level == topology.level_names[-1]:
        return 0.0
    others = (node + process) * len({site.node for site in sites})
    return others * counted.domain_share / (1.0 - counted.domain_share) / len(domains)


def times(wanted: Wanted, *, peer_bandwidth: float, remote_bandwidth: float) -> RecoveryTimes:
    """By the size of the state, where the job says it."""
    if wanted.state_size is None:
        return RecoveryTimes()
    size = wanted.state_size * wanted.procs_per_worker
    return RecoveryTimes.of_sizes(size, peer_bandwidth, remote_bandwidth)


def times_told(times: RecoveryTimes, *, guessed: bool) -> tuple[str, ...]:
    """Of times that nothing has measured, as sentences."""
    restore = times.restore
    return (
        f"a failure is acted on after {times.detect:g} s, a pod is elsewhere after {times.replace:g} s "
        f"({times.spare:g} s with a spare), the first step comes {times.restart:g} s after the state",
        f"restores take {restore.local:.3g} s from own memory, {restore.peer:.3g} s from a peer, "
        f"{restore.remote:.3g} s from the remote tier"
        f"{' (guesses: checkpoint.stateSize is not given)' if guessed else ''}",
    )
