"""Refuses tier reports that are of another worker, or larger than a worker can have.

A peer has proved that it knows the job's token, which says nothing of its sanity: its memory may be bad, or
somebody else may have got in there.
"""

from __future__ import annotations

from typing import Any

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.version import Version
from tiercheck_sidecar.model.span import Span
from tiercheck_sidecar.versions.tally import HeldCopies, RankHoldings, Shared, WorkerWord

_MOST_VERSIONS = 20_000
"""Versions in all spans of a report, for each rank of a worker. There are some hundreds."""
_MOST_NAMED = 256
"""Versions that are named one by one, of one rank: as many as slots. Everybody may be told of them."""
_MOST_RANKS = 2**24
_MOST = 2**53
"""Of steps, attempts and bytes."""
_NO_VERSIONS = "it names versions that cannot be"


def find_objection(word: WorkerWord, directive: Directive, base: WorkerWord | None = None) -> str:
    """Why the word cannot be true, as a clause; empty if it can. To `base`, in the same attempt, there was
    none."""
    procs, head = directive.procs_per_worker, word.head
    if not 0 <= head.worker < directive.workers:
        return f"the job has {directive.workers} workers"
    if base is None or base.own is not word.own:
        wrong = _senseless(word, range(head.worker * procs, (head.worker + 1) * procs), base)
        if wrong:
            return wrong
    shared: list[Shared[Any]] = [shape.held for shape in word.shapes.values()]
    # Not of this job's ranks alone: one that became smaller goes on from what its former ranks have left.
    copies = word.copies if base is None or base.copies is not word.copies else ()
    if any(not 0 <= rank < _MOST_RANKS for of, _ in copies for ranks in of for rank in ranks):
        return "it keeps copies of ranks that there cannot be"
    for of, kept in word.copies:
        shared += [kept] * len(of)
    many = 0
    for each in shared:
        if each.wrong:
            return each.wrong
        many += each.many
    return f"it has {many} versions" if many > _MOST_VERSIONS * procs else ""


def _senseless(word: WorkerWord, own: range, base: WorkerWord | None) -> str:
    for rank, each in word.own.items():
        if base is not None and base.own.get(rank) is each:
            continue
        if rank not in own:
            return f"it speaks for rank {rank}, which is another worker's"
        needs = each.needs
        if needs is not None and not (0 < needs.snapshot < _MOST and 0 <= needs.delta < _MOST):
            return f"rank {rank} has senseless sizes"
        for artifact in each.uploaded:
            if artifact.rank != rank or not 0 <= artifact.bytes < _MOST:
                return f"the upload that it names for rank {rank} is none of that rank"
            if not _is_sound(artifact.version):
                return _NO_VERSIONS
    return ""


def objection_to_holdings(held: RankHoldings | HeldCopies) -> str:
    """Why these cannot be anybody's, as a clause; empty if they can."""
    named = _named(held)
    if len(named) > _MOST_NAMED:
        return f"it names {len(named)} versions"
    if not all(map(_is_sound, named)):
        return _NO_VERSIONS
    # Spans are short words for many versions, each of which costs room where they are compared.
    ends = any(not 0 <= span.first <= span.last < _MOST for span in _spans(held))
    return "it has spans that end before they begin" if ends else ""


def many_versions(held: RankHoldings | HeldCopies) -> int:
    """Versions in all spans."""
    return sum(span.last - span.first + 1 for span in _spans(held))


def _spans(held: RankHoldings | HeldCopies) -> tuple[Span, ...]:
    return held.versions if isinstance(held, HeldCopies) else (*held.local, *held.copied)


def _named(held: RankHoldings | HeldCopies) -> tuple[Version, ...]:
    if isinstance(held, HeldCopies):
        return held.snapshots
    reached = () if held.reached is None else (held.reached,)
    return (
        *held.snapshots,
        *held.leaving,
        *held.unfinished,
        *held.unfinished_deltas,
        *held.copied_snapshots,
        *reached,
    )


def _is_sound(version: Version) -> bool:
    return 0 <= version.step < _MOST and 0 <= version.attempt < _MOST
