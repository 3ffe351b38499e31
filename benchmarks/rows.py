"""Rows of the table for benchmarks that can also be run by themselves and answer with plain numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.figure import Figure, Outcome, Sense
from benchmarks.scale import Scale


def parity(scale: Scale) -> Outcome:
    """Coding against memory is promised; the whole way over sockets stands beside it."""
    from benchmarks import parity as measured

    found = measured.run(16, 2) if scale.quick else measured.run()
    rows: list[Figure] = []
    for code in ("XOR 4+1", "RS 4+2"):
        figures: dict[str, float] = found[code]
        rows += [
            Figure(
                f"rebuild from parity, {code}, in memory",
                _rate(figures["rebuild in memory"]),
                f"memory: {_rate(figures['memory limit of a rebuild'])}",
                figures["rebuild in memory / memory"],
                0.7,
                Sense.AT_LEAST,
                unit="%",
                note="memory: read and written at the rate of memcpy",
            ),
            Figure(
                f"rebuild from parity, {code}, over loopback, verified",
                _rate(figures["rebuild over loopback"]),
                f"sockets alone: {_rate(figures['socket limit of a rebuild'])}",
                figures["rebuild over loopback / sockets"],
                unit="%",
                note="sockets: neither coded nor verified",
            ),
            Figure(
                f"members folded into blocks, {code}, over loopback, verified",
                _rate(figures["fold over loopback"]),
                "sockets alone",
                figures["fold over loopback / sockets"],
                unit="%",
            ),
        ]
    return Outcome(rows, found)


def exchange(scale: Scale) -> Outcome:
    """Whole artifacts, verified and sealed, against sockets that carry bytes that nobody looks at."""
    from benchmarks import exchange as measured

    found = measured.run(64, 2, 5) if scale.quick else measured.run()
    limit = f"{found['limit is']}: {_rate(found['limit, GB/s'])}"
    rows = [
        Figure(
            name,
            _rate(found[f"{key}, GB/s"]),
            limit,
            found[f"{key} / limit"],
            bound,
            Sense.AT_LEAST,
            unit="%",
            note=f"{found['mebibytes']} MiB, {found['streams']} streams",
        )
        for name, key, bound in (
            ("peer copy throughput, sent to a holder", "push", 0.85),
            ("peer copy throughput, fetched from a holder", "fetch", 0.85),
            ("peer copy throughput, fetched from two holders", "fetch from two", None),
        )
    ]
    rows += [
        Figure(
            f"peer copy {way}, {name}, for each second of a core",
            _rate(found[f"{key}, GB for a core-second"]),
            f"without tags: {_rate(found[f'plain {key.split()[-1]}, GB for a core-second'])}",
            found[f"{key} / plain, for a core-second"],
            bound,
            Sense.AT_LEAST,
            unit="%",
            note="processor time of both ends",
        )
        for way, name, key, bound in (
            ("authenticated", "sent to a holder", "push", 0.9),
            ("authenticated", "fetched from a holder", "fetch", 0.9),
            ("encrypted", "sent to a holder", "encrypted push", None),
            ("encrypted", "fetched from a holder", "encrypted fetch", None),
        )
    ]
    rows.append(
        Figure(
            "delta of 1 MiB at its holder, verified",
            f"{found['delta of 1 MiB, median ms']:.1f} ms",
            note=f"median; best {found['delta of 1 MiB, best ms']:.1f} ms",
        )
    )
    return Outcome(rows, found)


def remote(scale: Scale) -> Outcome:
    """CPU seconds and wall beside obstore alone and boto3, over http and https."""
    from benchmarks import remote as measured

    found = measured.run(64, 2) if scale.quick else measured.run()
    rows: list[Figure] = []
    for scheme in ("http", "https"):
        for direction in measured.DIRECTIONS:
            figures = found[scheme][direction]
            cpu: dict[str, float] = figures["cpu s/GB"]
            wall: dict[str, float] = figures["wall s/GB"]
            name = f"S3 {direction} over {scheme}"
            rows += [
                Figure(
                    f"{name}, bytes per CPU second, against boto3",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['boto3']:.2f} s/GB",
                    figures["per CPU second, ours / boto3"],
                ),
                Figure(
                    f"{name}, bytes per CPU second, against obstore alone",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['obstore']:.2f} s/GB",
                    figures["per CPU second, ours / obstore"],
                    0.95,
                    Sense.AT_LEAST,
                    unit="%",
                    note="median of paired ratios; obstore verifies no digests",
                ),
                Figure(
                    f"{name}, throughput, against obstore alone",
                    f"{1 / wall['ours']:.2f} GB/s",
                    f"{1 / wall['obstore']:.2f} GB/s",
                    figures["throughput, ours / obstore"],
                    0.95,
                    Sense.AT_LEAST,
                    unit="%",
                ),
            ]
    return Outcome(rows, found)


def reconcile(scale: Scale) -> Outcome:
    """Calls to the API server must not grow with workers; processor time only as the workers themselves, and
    not with other jobs."""
    from benchmarks import reconcile as measured

    found = measured.run((4, 64), (1, 20)) if scale.quick else measured.run()
    workers, jobs = found["workers"], found["jobs"]
    few, middle, many = next(iter(workers)), list(workers)[len(workers) // 2], list(workers)[-1]
    one, most = next(iter(jobs)), list(jobs)[-1]
    rows = [
        Figure(
            f"calls to the API server for a {event}, {many} workers against {few}",
            f"{workers[many][f'{event}, API calls']:.0f}",
            f"{workers[few][f'{event}, API calls']:.0f}",
            workers[many][f"{event}, API calls"] / max(1, workers[few][f"{event}, API calls"]),
            1.0,
        )
        for event in ("heartbeat", "pod event", "recovery")
    ]
    per_worker = {count: workers[count]["heartbeat, CPU ms"] / int(count) for count in workers}
    rows += [
        Figure(
            f"processor time of a heartbeat per worker, {many} workers against {middle}",
            f"{workers[many]['heartbeat, CPU ms']:.1f} ms in all",
            f"{workers[middle]['heartbeat, CPU ms']:.1f} ms in all",
            per_worker[many] / per_worker[middle],
            1.5,
        ),
        Figure(
            f"processor time of an event of one job, {most} jobs against {one}",
            f"{jobs[most]['event, CPU ms']:.2f} ms",
            f"{jobs[one]['event, CPU ms']:.2f} ms",
            jobs[most]["event, CPU ms"] / jobs[one]["event, CPU ms"],
            1.5,
            note=f"jobs of {measured.WORKERS_OF_MANY} workers",
        ),
        Figure(
            f"object of a job of {many} workers, without its spec",
            f"{workers[many]['object, bytes']} bytes",
            f"{measured.LIMIT} bytes",
            workers[many]["object, bytes"] / measured.LIMIT,
            1.0,
        ),
    ]
    return Outcome(rows, found)


def _rate(gigabytes_per_second: float) -> str:
    return f"{gigabytes_per_second:.2f} GB/s"


def planning(scale: Scale) -> Outcome:
    """Seconds of each decision for the largest job, against what was promised."""
    from benchmarks import planning as measured

    sizes = (100, 1_000) if scale.quick else (100, 1_000, 10_000)
    found: dict[int, dict[str, float]] = {workers: measured.measure(workers) for workers in sizes}
    largest = found[sizes[-1]]
    slowest = max(largest, key=lambda name: largest[name])
    rows = [
        Figure(
            f"planner, {sizes[-1]:,} workers, its slowest decision",
            f"{largest[slowest]:.2f} s",
            f"promised: {measured.LIMIT:.0f} s",
            largest[slowest] / measured.LIMIT,
            1.0,
            note=f"{slowest}; one core",
        )
    ]
    data: dict[str, Any] = {"seconds": {str(workers): figures for workers, figures in found.items()}}
    return Outcome(rows, data)
