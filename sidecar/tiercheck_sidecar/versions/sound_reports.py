"""Refuses tier reports that are of another worker, or larger than a worker can have.

A peer has proved that it knows the job's token, which says nothing of its sanity: its memory may be bad, or
somebody else may have got in there.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.protocol import names
from tiercheck.protocol.directive import Directive
from tiercheck.protocol.names import endpoint
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.span import Span
from tiercheck_sidecar.versions.watermark import TierReport

_MOST_VERSIONS = 20_000
"""Versions in all spans of a report, for each rank of a worker. There are some hundreds."""
_MOST_RANKS = 2**24
_MOST = 2**53
"""Of steps, attempts and bytes."""


def find_objection(report: TierReport, directive: Directive) -> str:
    """Why the report cannot be true, as a clause; empty if it can."""
    procs = directive.procs_per_worker
    if not 0 <= report.worker < directive.workers:
        return f"the job has {directive.workers} workers"
    own = range(report.worker * procs, (report.worker + 1) * procs)
    for tiers in report.ranks:
        if tiers.rank not in own:
            return f"it speaks for rank {tiers.rank}, which is another worker's"
        needs = tiers.needs
        if needs is not None and not (0 < needs.snapshot < _MOST and 0 <= needs.delta < _MOST):
            return f"rank {tiers.rank} has senseless sizes"
        for artifact in tiers.uploaded:
            if artifact.rank != tiers.rank or not 0 <= artifact.bytes < _MOST:
                return f"the upload that it names for rank {tiers.rank} is none of that rank"
    # Not of this job's ranks alone: one that became smaller goes on from what its former ranks have left.
    if any(not 0 <= rank < _MOST_RANKS for copy in report.copies for rank in copy.ranks):
        return "it keeps copies of ranks that there cannot be"
    if not all(_is_sound(version) for version in _named(report)):
        return "it names versions that cannot be"
    return _too_much(report, procs) or _unreachable(report.host)


def _named(report: TierReport) -> Iterable[Version]:
    for tiers in report.ranks:
        yield from (*tiers.snapshots, *tiers.unfinished, *tiers.unfinished_deltas, *tiers.copied_snapshots)
        yield from (artifact.version for artifact in tiers.uploaded)
        yield from () if tiers.reached is None else (tiers.reached,)
    for copy in report.copies:
        yield from copy.snapshots


def _is_sound(version: Version) -> bool:
    return 0 <= version.step < _MOST and 0 <= version.attempt < _MOST


def _too_much(report: TierReport, procs: int) -> str:
    """Spans are short words for many versions, each of which costs room where they are compared."""
    every: list[Span] = [span for tiers in report.ranks for span in (*tiers.local, *tiers.copied)]
    every += [span for copy in report.copies for span in copy.versions]
    if any(not 0 <= span.first <= span.last < _MOST for span in every):
        return "it has spans that end before they begin"
    many = sum(span.last - span.first + 1 for span in every)
    return f"it has {many} versions" if many > _MOST_VERSIONS * procs else ""


def _unreachable(host: str) -> str:
    try:
        name, port = endpoint(host, names.CONTROL_PORT)
        name.encode("idna")
    except ValueError:
        return "its address is none"
    return "" if 0 < port < 65536 else "its address is none"
