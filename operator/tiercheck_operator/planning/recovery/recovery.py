"""Decides what a job restores after a failure: which version, from where for each rank, and why.

A version counts if *every* rank can rebuild it, from a snapshot and the deltas after it, wherever these lie.
The minimum of each rank's newest would be wrong: of snapshots {8, 10} and {8, 9} it names 9, which the first
rank cannot rebuild. Training does not start from scratch while a committed version may still turn up: the
decision is then to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Artifact, History, Version
from tiercheck_operator.model.conditions import numbered
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.recovery.availability import (
    Distance,
    JobInventory,
    Missing,
    RemoteInventory,
    Sources,
)
from tiercheck_operator.planning.recovery.resharded import ResizedStock


@dataclass(frozen=True)
class RestoreSeconds:
    """Estimated seconds of a restore, by the farthest tier that any rank needs."""

    local: float = 2.0
    peer: float = 10.0
    remote: float = 120.0


@dataclass(frozen=True)
class RecoveryProblem:
    """The inputs of a recovery decision."""

    ranks: int
    ranks_per_worker: int
    history: History
    inventories: Sequence[JobInventory]
    """The inventories of all sidecars; nothing is decided before each has answered."""
    remote: RemoteInventory
    distance: Distance | None = None
    step_seconds: float | None = None
    last_step: int | None = None
    """The newest step trained, if known."""
    restore_seconds: RestoreSeconds = field(default_factory=RestoreSeconds)
    target_step: int | None = None
    """`spec.restore.from.step`: the exact step to restore."""
    prove_steps: int = 0
    """`spec.restore.proveSteps`: the steps to give up if the newest version leaves none to train again."""
    bad: Collection[Artifact] = ()
    """The artifacts of which every copy is useless."""
    groups: Sequence[CodeGroup] = ()

    @property
    def stock(self) -> ResizedStock:
        """Returns the artifacts to rebuild from, by number of ranks."""
        return ResizedStock(
            self.ranks,
            self.ranks_per_worker,
            self.history,
            self.inventories,
            self.remote,
            bad=self.bad,
            groups=self.groups,
        )


@dataclass(frozen=True)
class Recover:
    """The decision to restore `version`."""

    version: Version
    sources: Sources
    tier_counts: Mapping[Tier, int]
    """The number of ranks by the farthest tier of their nearest chain; tiers without ranks are left out."""
    lost_steps: int
    reason: str
    base: Version | None = None
    """The snapshot that all ranks begin from; None: the version is resized, or they have none in common."""


@dataclass(frozen=True)
class StartFresh:
    """The decision to train from scratch, because no version can be rebuilt from anything."""

    reason: str


@dataclass(frozen=True)
class Wait:
    """The decision to wait for the remote tier, because no version can be rebuilt without it."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """The decision to refuse, because the step that the user asked for cannot be rebuilt from anything."""

    reason: str


Decision = Recover | StartFresh | Wait | Refuse


def decide_recovery(problem: RecoveryProblem) -> Decision:
    """Returns the version with the least expected loss of those that every rank can rebuild.

    If there is none, returns what to do instead. Raises ValueError if `ranks` is not a multiple of
    `ranks_per_worker`.
    """
    if problem.ranks < 1 or problem.ranks_per_worker < 1 or problem.ranks % problem.ranks_per_worker:
        raise ValueError("ranks must be a positive multiple of ranks_per_worker")
    stock = problem.stock
    rebuildable = [
        version for version in stock.versions if stock.of(version).farthest_tier(version) is not None
    ]
    if problem.target_step is not None:
        rebuildable = [version for version in rebuildable if version.step == problem.target_step]
    if not rebuildable:
        return _without_version(problem, stock)
    newest_step = max(problem.last_step or 0, stock.versions[-1].step)
    # Newest first, so that the newer of two versions with equal loss is taken.
    best = min(
        reversed(rebuildable), key=lambda version: _expected_loss(version, newest_step, stock, problem)
    )
    chosen = _leave_steps_to_prove(best, rebuildable, newest_step, stock, problem)
    sources = stock.sources(chosen, problem.distance)
    assert not isinstance(sources, Missing)
    counts = {tier: 0 for tier in Tier}
    for rank in range(stock.ranks_of(chosen)):
        tier = stock.of(chosen).tier_of(rank, chosen)
        assert tier is not None
        counts[tier] += 1
    tier_counts = {tier: count for tier, count in counts.items() if count}
    return Recover(
        version=chosen,
        sources=sources,
        tier_counts=tier_counts,
        lost_steps=newest_step - chosen.step,
        base=None if stock.is_resized(chosen) else stock.of(chosen).base_of(chosen),
        reason="; ".join(
            [
                *_why(chosen, best, rebuildable, tier_counts, problem),
                *_resized(chosen, stock, problem),
                *_incomplete([version for version in stock.versions if version > chosen], stock),
            ]
        ),
    )


def _expected_loss(
    version: Version, newest_step: int, stock: ResizedStock, problem: RecoveryProblem
) -> float:
    """Returns seconds until training is where it was; without a step time, a step outweighs any restore."""
    tier = stock.of(version).farthest_tier(version)
    estimate = problem.restore_seconds
    restore = {Tier.LOCAL: estimate.local, Tier.PEER: estimate.peer, Tier.REMOTE: estimate.remote}
    assert tier is not None
    lost = newest_step - version.step
    if not problem.step_seconds:
        return float(lost) * (1.0 + sum(restore.values()))
    return lost * problem.step_seconds + restore[tier]


def _leave_steps_to_prove(
    best: Version,
    rebuildable: Sequence[Version],
    newest_step: int,
    stock: ResizedStock,
    problem: RecoveryProblem,
) -> Version:
    """Goes back `prove_steps` if `best` leaves no step to train again and no farther tier is needed."""
    farthest = stock.of(best).farthest_tier(best)
    if farthest is None or best.step != newest_step:
        return best
    tiers = list(Tier)[: list(Tier).index(farthest) + 1]
    for version in rebuildable:
        # Ranks that did not make a version themselves have nothing to compare with.
        own = not (stock.is_resized(version) or stock.is_resized(best))
        if (
            version.step == newest_step - problem.prove_steps
            and own
            and stock.of(version).farthest_tier(version) in tiers
        ):
            return version
    return best


def _without_version(problem: RecoveryProblem, stock: ResizedStock) -> Decision:
    asked = problem.target_step
    what = "no version" if asked is None else f"step {asked}"
    if not problem.history.branches and asked is None:
        return StartFresh("the job has not trained before, so there is nothing to come back to")
    incomplete = _incomplete(stock.versions, stock)
    detail = f"; {'; '.join(incomplete)}" if incomplete else ""
    if problem.remote.undecided:
        state = "has not been tried yet" if problem.remote.reachable is None else "is unreachable"
        return Wait(
            f"{what} can be rebuilt from memory, and the remote tier {state}: it may hold one{detail}"
        )
    remote = "the remote tier holds none" if problem.remote.configured else "no remote tier is configured"
    if asked is not None:
        return Refuse(
            f"step {asked} was asked for, but no source holds it for every rank, and {remote}{detail}"
        )
    return StartFresh(
        "no version can be rebuilt, so training begins from scratch: every sidecar answered and "
        f"{remote}{detail}"
    )


def _why(
    chosen: Version,
    best: Version,
    rebuildable: Sequence[Version],
    tier_counts: Mapping[Tier, int],
    problem: RecoveryProblem,
) -> list[str]:
    if problem.target_step is not None:
        head = f"step {chosen.step}: asked for by spec.restore"
    elif chosen == rebuildable[-1]:
        head = f"step {chosen.step}: newest version that every rank can rebuild"
    elif chosen != best:
        head = (
            f"step {chosen.step}: older than step {best.step}, as restore.proveSteps needs steps to compare"
        )
    else:
        head = (
            f"step {chosen.step}: back sooner than from step {rebuildable[-1].step}, whose restore "
            "takes longer"
        )
    places = {Tier.LOCAL: "from own memory", Tier.PEER: "from a peer", Tier.REMOTE: "from the remote tier"}
    parts = []
    for position, (tier, count) in enumerate(tier_counts.items()):
        unit = ("rank " if count == 1 else "ranks ") if position == 0 else ""
        parts.append(f"{count} {unit}{places[tier]}")
    return [head, ", ".join(parts)]


def _resized(chosen: Version, stock: ResizedStock, problem: RecoveryProblem) -> list[str]:
    if not stock.is_resized(chosen):
        return []
    return [f"made by {stock.ranks_of(chosen)} ranks, from which {problem.ranks} read their parts"]


def _incomplete(versions: Sequence[Version], stock: ResizedStock) -> list[str]:
    """Returns why the newest two incomplete `versions` cannot be rebuilt, a clause for each, newest first."""
    clauses = []
    for version in reversed(versions):
        lacking = stock.of(version).lacking(version)
        if not lacking:
            continue
        gaps: dict[str, list[int]] = {}
        for rank in lacking:
            gaps.setdefault(stock.of(version).gap(rank, version), []).append(rank)
        gap, ranks = max(gaps.items(), key=lambda item: (len(item[1]), -item[1][0]))
        verb = gap if len(ranks) == 1 else gap.replace("has ", "have ").replace("lacks ", "lack ")
        clauses.append(f"step {version.step} is incomplete: {numbered(ranks, 3, 'rank')} {verb}")
        if len(clauses) == 2:
            break
    return clauses
