"""Simulates a job's life for days, many times over, with the planner's own decisions.

The result is the share of time spent training. Failures of each kind arrive independently (Poisson); `place`
and `decide_recovery` determine what each costs. A replacement is assumed to run where the lost worker ran.
The same seed gives the same lives. Tests compare the results with published formulas.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, expm1

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.version import Branch, History, Share, Version
from tiercheck_cli.simulate.scenario import POD, PROCESS, RecoveryTimes, Scenario
from tiercheck_operator.model.saved_placement import CodeGroup
from tiercheck_operator.planning.placement.placement import Holders, Placement
from tiercheck_operator.planning.recovery.availability import (
    Artifacts,
    Availability,
    JobInventory,
    RemoteInventory,
)
from tiercheck_operator.planning.recovery.recovery import (
    Recover,
    RecoveryProblem,
    RestoreSeconds,
    StartFresh,
    decide_recovery,
)

_HISTORY = History((Branch(1, 0),))
_SOME = Version(1, 1)
_KEPT = Artifacts(snapshots=frozenset({_SOME}))
_NO_REMOTE = RemoteInventory(configured=False)


class Survival:
    """Decides for one placement whether the state of lost workers is elsewhere in memory.

    The planner's `Availability` is asked once per shape of a loss, fast enough for a hundred thousand losses.
    """

    def __init__(self, placement: Placement) -> None:
        self._holders = placement.holders
        self._group: dict[int, CodeGroup] = {
            member: group for group in placement.groups for member in group.members
        }

    def in_memory(self, lost: Collection[int], empty: Collection[int]) -> bool:
        """Returns whether peers hold every lost worker's state. `empty`: workers that hold nothing yet."""
        seen: set[tuple[int, ...]] = set()
        for worker in lost:
            group = self._group.get(worker)
            if group is None:
                if not any(holder not in lost and holder not in empty for holder in self._holders[worker]):
                    return False
            elif group.members not in seen:
                seen.add(group.members)
                gone = tuple(index for index, member in enumerate(group.members) if member in lost)
                blocks = tuple(
                    index
                    for index, keeper in enumerate(group.holders)
                    if keeper not in lost and keeper not in empty
                )
                if not _decodable(len(group.members), gone, blocks):
                    return False
        return True


@lru_cache(maxsize=4096)
def _decodable(members: int, gone: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    """Returns whether a group of `members` can be rebuilt from `blocks` if members `gone` are lost."""
    share = tuple(range(members))
    inventories = [JobInventory(worker, {worker: _KEPT}) for worker in share if worker not in gone]
    inventories += [JobInventory(members + index, blocks={Share(index, share): _KEPT}) for index in blocks]
    return not Availability(members, 1, _HISTORY, inventories, _NO_REMOTE).lacking(_SOME)


@dataclass(frozen=True)
class HeldSteps:
    """The steps that a job's tiers hold when something fails."""

    newest: int
    held: Mapping[Tier, int]
    """The newest step that is complete in each tier; 0: none is. A tier that the job lacks is not in it."""
    step_seconds: float
    planned: bool = False
    """True if the job is only a plan, so that its steps are invented, from the middle of its life."""


@dataclass(frozen=True)
class ResumePoint:
    """The step that training resumes from, and the tiers needed for it."""

    step: int
    """The step; 0: from scratch."""
    workers: Mapping[Tier, tuple[int, ...]]
    """The workers by the farthest tier that each needs; empty if training begins from scratch."""

    @property
    def farthest(self) -> Tier | None:
        """Returns the farthest tier that any rank needs; None: training begins from scratch."""
        return list(self.workers)[-1] if self.workers else None


def find_resume_point(placement: Placement, state: HeldSteps, lost: Collection[int]) -> ResumePoint:
    """Finds the comeback if the workers `lost` vanish with their memory; none: the training crashes."""
    problem = _problem(placement.holders, placement.groups, state, lost)
    decision = decide_recovery(problem)
    if isinstance(decision, StartFresh):
        return ResumePoint(0, {})
    assert isinstance(decision, Recover)
    workers, stock = range(problem.ranks), problem.stock
    needed = {worker: stock.of(decision.version).tier_of(worker, decision.version) for worker in workers}
    by_tier = {tier: tuple(w for w in workers if needed[w] is tier) for tier in Tier}
    return ResumePoint(decision.version.step, {tier: those for tier, those in by_tier.items() if those})


@lru_cache(maxsize=65536)
def find_fallback(
    *,
    lost: bool,
    survives: bool,
    behind: tuple[tuple[Tier, int], ...],
    step_seconds: float,
    restore: RestoreSeconds,
) -> tuple[Tier, int] | None:
    """Returns the tier and the lost steps that a recovery decides on; None: from scratch.

    `behind`: how many steps each tier is behind the newest; one that has nothing is left out. One worker
    represents all that survive and one all that are lost, because the decision depends only on what each rank
    can rebuild.
    """  # fmt: skip
    newest = 1 + max(steps for _, steps in behind)
    state = HeldSteps(newest, {tier: newest - steps for tier, steps in behind}, step_seconds)
    problem = _problem(((), (0,) if survives else ()), (), state, {1} if lost else ())
    decision = decide_recovery(replace(problem, restore_seconds=restore))
    if not isinstance(decision, Recover):
        return None
    return [tier for tier in Tier if tier in decision.tier_counts][-1], decision.lost_steps


def _problem(
    holders: Holders, groups: Sequence[CodeGroup], state: HeldSteps, lost: Collection[int]
) -> RecoveryProblem:
    copy = _artifacts(state.held.get(Tier.PEER, 0))
    own = _artifacts(state.held[Tier.LOCAL], state.held.get(Tier.PEER, 0))
    hosted: dict[int, dict[int, Artifacts]] = {}
    for worker, keepers in enumerate(holders):
        for keeper in keepers:
            hosted.setdefault(keeper, {})[worker] = copy
    blocks: dict[int, dict[Share, Artifacts]] = {}
    for group in groups:
        for index, keeper in enumerate(group.holders):
            blocks.setdefault(keeper, {})[Share(index, group.members)] = copy
    stored = state.held.get(Tier.REMOTE)
    return RecoveryProblem(
        ranks=len(holders),
        ranks_per_worker=1,  # the ranks of a worker share its fate and its holders
        history=_HISTORY,
        inventories=[
            JobInventory(worker, {worker: own}, hosted.get(worker, {}), blocks.get(worker, {}))
            for worker in range(len(holders))
            if worker not in lost
        ],
        remote=RemoteInventory(
            configured=stored is not None,
            reachable=True,
            versions=frozenset({Version(stored, 1)} if stored else ()),
        ),
        step_seconds=state.step_seconds,
        last_step=state.newest,
        groups=groups,
    )


def _artifacts(*steps: int) -> Artifacts:
    """Returns each step as a snapshot, even if a chain leads to it: the decision depends on nothing else."""
    return Artifacts(snapshots=frozenset(Version(step, 1) for step in steps if step))


SCRATCH = "scratch"
"""The entry in place of a tier if nothing was left and training began from scratch."""


@dataclass(frozen=True)
class Run:
    """One life of the job."""

    ettr: float
    """Effective training time ratio: seconds of training that counted, over seconds of the run."""
    failures: Mapping[str, int]
    """The number of failures by kind: "process", "pod", or the topology level of the lost domain."""
    recoveries: Mapping[str, int]
    """The number of recoveries by the farthest tier needed ("local", "peer", "remote"), or "scratch"."""
    lost_steps: int
    down_seconds: float
    """Seconds between failures and the first steps after them."""


@dataclass(frozen=True)
class Simulation:
    days: float
    runs: Sequence[Run] = field(repr=False)

    @property
    def ettr(self) -> float:
        """Returns the mean over the runs."""
        return statistics.fmean(run.ettr for run in self.runs)

    def ettr_quantile(self, part: float) -> float:
        """Returns the ETTR that `part` (0 to 1) of the runs does not exceed, interpolated linearly."""
        import numpy  # here, as most commands simulate nothing

        return float(numpy.quantile([run.ettr for run in self.runs], part))

    @property
    def recoveries(self) -> Mapping[str, float]:
        """Returns the mean number per run, by tier or "scratch"."""
        return self._mean(run.recoveries for run in self.runs)

    @property
    def failures(self) -> Mapping[str, float]:
        """Returns the mean number per run, by kind."""
        return self._mean(run.failures for run in self.runs)

    @property
    def lost_steps(self) -> float:
        """Returns the mean per run."""
        return statistics.fmean(run.lost_steps for run in self.runs)

    @property
    def down_seconds(self) -> float:
        """Returns the mean per run."""
        return statistics.fmean(run.down_seconds for run in self.runs)

    def _mean(self, counts: Iterable[Mapping[str, int]]) -> Mapping[str, float]:
        total: Counter[str] = Counter()
        for each in counts:
            total.update(each)
        return {name: count / len(self.runs) for name, count in sorted(total.items())}


def play(
    scenario: Scenario, *, days: float, runs: int, seed: int = 0, tick: Callable[[], object] = lambda: None
) -> Simulation:
    """Simulates `runs` lives of `days` each, and calls `tick` after each.

    Each life has its own random generator, so that scenarios with the same rates meet the same failures."""
    sources, survival = _sources(scenario), Survival(scenario.placement)
    played = []
    for run in range(runs):
        chance = random.Random(f"{seed}/{run}")
        played.append(_live(JobLife(scenario, survival), sources, chance, days * 86400.0))
        tick()
    return Simulation(days, tuple(played))


@dataclass(frozen=True)
class _Source:
    """One kind of failure: its rate per second over all domains, and the workers that each domain loses."""

    kind: str
    rate: float
    victims: Sequence[tuple[int, ...]]


def _sources(scenario: Scenario) -> tuple[_Source, ...]:
    workers = len(scenario.sites)
    found = [
        _Source(PROCESS, scenario.rates.process * workers / 3600.0, ((),)),
        _Source(POD, scenario.rates.pod * workers / 3600.0, tuple((site.worker,) for site in scenario.sites)),
    ]
    for level in scenario.topology.level_names:
        victims = tuple(scenario.domains(level).values())
        found.append(_Source(level, scenario.rates.domains.get(level, 0.0) * len(victims) / 3600.0, victims))
    return tuple(source for source in found if source.rate > 0)


def _live(life: JobLife, sources: Sequence[_Source], chance: random.Random, end: float) -> Run:
    weights = [source.rate for source in sources]
    rate = sum(weights)
    at = chance.expovariate(rate) if rate else end
    while at < end:
        source = chance.choices(sources, weights)[0]
        life.fail(at, source.kind, chance.choice(source.victims))
        at += chance.expovariate(rate)
    return life.ended(end)


class JobLife:
    """Simulates a run: every failure in order of time, then the end. Times are seconds since its start."""

    def __init__(self, scenario: Scenario, survival: Survival | None = None) -> None:
        self._scenario, self._survival = scenario, survival or Survival(scenario.placement)
        self._base = 0
        """The step that training last resumed from."""
        self._copied = 0
        """The step that the holders have until their copies are complete again."""
        self._resumes = 0.0
        """The time at which training resumed, or will."""
        self._complete = 0.0
        """The time at which all lost workers had a successor, or will have."""
        self._empty: frozenset[int] = frozenset()
        """Replaced workers that hold nothing for others yet."""
        self._bare: frozenset[int] = frozenset()
        """Replaced workers that have not restored their own state yet."""
        self._repairs: list[float] = []
        """The times at which used spares have successors."""
        self._failures: Counter[str] = Counter()
        self._recoveries: Counter[str] = Counter()
        self._lost_steps, self._down = 0, 0.0

    def ended(self, end: float) -> Run:
        down = self._down - max(0.0, self._resumes - end)
        return Run(
            ettr=self._step(end) * self._scenario.step_seconds / end,
            failures=dict(self._failures),
            recoveries=dict(self._recoveries),
            lost_steps=self._lost_steps,
            down_seconds=down,
        )

    def _step(self, at: float) -> int:
        return self._base + int(max(0.0, at - self._resumes) / self._scenario.step_seconds)

    def fail(self, at: float, kind: str, victims: tuple[int, ...] = ()) -> None:
        """Applies a failure. `kind`: as in `Run.failures`; `victims`: the workers that lose memory."""
        scenario, saving = self._scenario, self._scenario.saving
        times = scenario.times.of(kind)
        self._failures[kind] += 1
        step = self._step(at)
        waiting = at < self._resumes
        if not waiting:
            self._bare = frozenset()
        protected = at >= self._resumes + times.protect
        if protected:
            self._empty = frozenset()
        lost = self._bare.union(victims)
        peer = max(self._base, saving.peer(step)) if protected else self._copied
        held = {
            Tier.LOCAL: max(self._base, saving.local(step)), Tier.PEER: peer, Tier.REMOTE: saving.remote(step)
        }  # fmt: skip
        outcome = find_fallback(
            lost=bool(lost),
            survives=self._survival.in_memory(lost, self._empty),
            behind=tuple((tier, step - at) for tier, at in held.items() if at or tier is Tier.LOCAL),
            step_seconds=scenario.step_seconds,
            restore=times.restore,
        )
        tier, behind = outcome if outcome is not None else (None, step)
        self._recoveries[SCRATCH if tier is None else tier.value] += 1
        self._lost_steps += behind
        acted = at + times.detect
        # A successor that is still on its way is needed whatever fails meanwhile.
        self._complete = max(self._complete, acted + self._replaced(at, times, len(victims)))
        resumes = max(acted, self._complete) + times.restart
        if tier is not None:
            resumes += float(getattr(times.restore, tier.value))
        if waiting:
            resumes = max(resumes, self._resumes)
        self._down += resumes - max(at, min(self._resumes, resumes))
        self._base, self._resumes = step - behind, resumes
        self._copied = peer if tier in (Tier.LOCAL, Tier.PEER) else 0
        self._bare = lost
        self._empty = self._empty.union(victims)

    def _replaced(self, at: float, times: RecoveryTimes, workers: int) -> float:
        """Returns the seconds until all victims have a successor."""
        if not workers:
            return 0.0
        self._repairs = [ready for ready in self._repairs if ready > at]
        free = self._scenario.spares - len(self._repairs)
        self._repairs += [at + times.repair] * min(free, workers)
        return times.spare if workers <= free else times.replace


def exact_ettr(failures_per_second: float, interval: float, overhead: float) -> float:
    """Returns the expected effective training time ratio of a long run.

    It is exact for exponentially distributed failures that may hit the recovery as well. Training of one
    interval takes M e^(R/M) (e^(t/M) - 1) on average, with M the mean time between failures, t the interval
    and R the overhead: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22(3), 2006, with nothing spent on saving. Seconds throughout.
    """
    if failures_per_second <= 0:
        return 1.0
    mean = 1.0 / failures_per_second
    return interval / (mean * exp(overhead / mean) * expm1(interval / mean))
