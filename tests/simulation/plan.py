"""What a seed stands for: the job, the cluster's habits, and which faults strike when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.operator.world_in_memory import make_spec
from tiercheck.protocol.directive import DeltaMode
from tiercheck_operator.model.spec import Attach, JobSpec

FAULTS = {
    "crash": 3, "evict": 2, "vanish": 2, "node": 2, "rack": 1, "sidecar": 3, "all sidecars": 1, "hang": 1,
    "cut": 2,
    "deaf": 1, "kubelet": 1, "flip": 3, "full": 1, "store down": 1, "store trouble": 2, "store slow": 1,
    "store behind": 1,
    "store cut": 1, "clock": 1, "mend": 2, "cordon": 1, "delete": 1,
}  # fmt: skip
"""Names, and how often each comes."""

LATER_FAULTS = {"neighbour": 2}
"""That long schedules of the first seeds do not know."""
LAST_FAULTS = {"rot": 2}
"""That only the newest seeds know: what is about to be uploaded, copied or restored is hit while that is
still to come."""

CLUSTER_FAULTS = {"bad node": 2, "quota": 2, "jump": 2, "secret": 1}
"""That brisk schedules know as well: a node that refuses pods at admission, an API server that refuses, a
step of the clock of the operator's node, a Secret that is lost."""
HOLDER_FAULTS = {"wipe": 1, "swap": 3, "forge": 2}
"""The same, of who keeps copies: a holder gives up all of them, all workers get others at once, a worker
offers a copy in another's name."""
OWNED = 0.06
"""How many brisk ones have a job that is attached; half of their owners scale."""
_OWNER = Attach("batch/v1", "Job", "train", "job-uid", "trainer")
PODS_END = ("evict", "delete", "vanish", "node")
"""Faults after which a pod is made anew."""
PARTNERS = {"bad node": PODS_END, "quota": PODS_END, "forge": PODS_END, "secret": PODS_END,
    "wipe": ("rot", "crash")}  # fmt: skip
"""What strikes after such a fault, which shows nothing alone."""

FIRST_SHORT = 20_000
"""Seeds below this one stand for long schedules, drawn as they were when some of them were kept. From it on
most are short."""
FIRST_OF_ALL_FAULTS = 30_000
"""Seeds before this one do not know the last of the faults."""
FIRST_WITH_SPARES = 1_000_000
"""From this seed on jobs may keep spare pods."""
FIRST_SMALL = 10_000_000
"""From this seed on most are small: few workers, one or two faults, each at a chosen moment, and no more
time than it takes to go on. What comes before keeps its meaning."""
FIRST_BRISK = 20_000_000
"""From this seed on small ones do nothing twice: a process looks again when something has changed or a second
has passed, and once all is healed nothing takes its time any more."""
FIRST_STAYING = 30_000_000
"""From this seed on they are small and brisk, and processes outlive their attempt."""
_ENDS_TRAINING = 0.8
_LONG = 0.15
"""How many of those that are not small are long."""
_LEAST_LONG = 25.0
"""Seconds until all is healed in a long one."""
_SMALL = 0.99
"""How many are small."""
MOMENTS = {
    "pod": 1, "inventory": 1, "attempt": 1, "started": 2, "step": 2, "sealed local": 4, "sealed peer": 5,
    "verdict": 5, "freed": 4, "put": 4, "removed": 3, "told": 1,
}  # fmt: skip
"""Entries of the history right after which a small schedule's first fault may strike, and how often."""
LATER_MOMENTS = {
    "pod": 1, "inventory": 2, "ended": 2, "attempt": 4, "started": 4, "sealed local": 2, "sealed peer": 2,
    "verdict": 2, "freed": 1, "told": 2, "put": 1,
}  # fmt: skip
"""The same of the second, while the first is being recovered from."""


@dataclass(frozen=True)
class Fault:
    at: float
    """Seconds from the beginning."""
    name: str
    target: int
    """Of whatever it strikes, modulo how many there are."""
    amount: float
    """From 0 to 1."""
    moment: str = ""
    """What it waits for, `at` seconds after the fault before it; empty: for nothing."""
    count: int = 1
    """How many of those."""

    def __str__(self) -> str:
        when = f"{self.moment} {self.count}" if self.moment else f"{self.at:.0f} s"
        return f"{when} {self.name} {self.target}"


@dataclass(frozen=True)
class Plan:
    seed: int
    spec: JobSpec
    nodes_per_rack: int
    seconds: float
    """Until everything is healed."""
    memory: int
    """Bytes of each pod's memory volume."""
    fabric: bool
    """Trainers have a network of their own."""
    start_seconds: float
    """From the start of a sidecar's container until it listens."""
    delay: float
    """Seconds that a verdict may be under way."""
    loss: float
    """Of calls."""
    noise: float
    """Of chunks that come damaged."""
    echo: float
    """Of directives that arrive once more, later."""
    lazy: float
    """How often a loop comes too late for a change."""
    faults: tuple[Fault, ...] = ()
    operator_kills: dict[int, int] = field(default_factory=dict)
    """After how many actions the operator dies, by the second."""
    lull: float | None = None
    """Of a small one: seconds from the last strike until all is healed. At `seconds` what still waits for its
    moment strikes without it."""

    notices: float | None = None
    """How much of what ranks and their sidecar say to each other about attempts comes late, and how much
    twice or never; None: processes do not outlive their attempt."""

    @property
    def size(self) -> str:
        """small, short or long."""
        return "small" if self.lull is not None else "short" if self.seconds < _LEAST_LONG else "long"

    @property
    def brisk(self) -> bool:
        return self.lull is not None and self.seed >= FIRST_BRISK

    def __str__(self) -> str:
        spec = self.spec
        job = (
            f"{spec.workers} workers, {spec.copies} copies, deltas {spec.delta.value}, remote "
            f"{bool(spec.remote)}"
        )
        return f"seed {self.seed}: {job}; " + "; ".join(map(str, self.faults))


def plan_of(seed: int) -> Plan:
    """The plan that the seed stands for."""
    rng = random.Random(seed)
    if seed >= FIRST_STAYING:
        return _staying(_small(seed, rng), rng)
    if seed >= FIRST_SMALL and rng.random() < _SMALL:
        return _small(seed, rng)
    workers = rng.choice((2, 3, 3, 4))
    deltas = rng.random() < 0.6
    every = rng.choice((2, 3, 4))
    remote = {"directory": {}, "everySteps": rng.choice((2, 4, 6)), "keep": rng.choice((1, 2, 3))}
    spec = make_spec(
        workers=workers,
        snapshot_every=every,
        delta=DeltaMode.AUTO if deltas else DeltaMode.NONE,
        copies=rng.choice((0, 1, 1, 1, 2)) if workers > 2 else rng.choice((0, 1, 1)),
        remote=remote if rng.random() < 0.6 else None,
        max_restarts=1000,
        hang=None,
        rehearse_every=None,
    )
    known = FAULTS if seed < FIRST_SHORT else FAULTS | LATER_FAULTS
    known = known if seed < FIRST_OF_ALL_FAULTS else known | LAST_FAULTS
    names, weights = list(known), list(known.values())
    if seed < FIRST_SHORT or rng.random() < _LONG:
        seconds, count = rng.choice((25.0, 35.0, 50.0)), rng.choice((0, 1, 2, 3, 4, 6))
    else:
        # Few kinds of faults in one schedule, and several of a kind, come together in ways that all kinds at
        # once hardly do.
        seconds, count = rng.choice((9.0, 12.0, 16.0)), rng.choice((1, 2, 2, 3, 4))
        names = rng.choices(names, weights, k=rng.choice((1, 2, 3)))
        weights = [1] * len(names)
    faults = [
        Fault(round(rng.uniform(4.0, seconds - 1), 2), name, rng.randrange(8), rng.random())
        for name in rng.choices(names, weights, k=count)
    ]
    plan = Plan(
        seed=seed,
        spec=spec,
        nodes_per_rack=2 if workers < 4 else 3,
        seconds=seconds,
        memory=rng.choice((1 << 20, 1 << 20, 160 * 1024)),
        fabric=rng.random() < 0.3,
        start_seconds=rng.choice((0.0, 1.0, 4.0)),
        delay=rng.choice((0.05, 0.5, 2.0)),
        loss=rng.choice((0.0, 0.0, 0.02, 0.1)),
        noise=rng.choice((0.0, 0.0, 0.05)),
        echo=rng.choice((0.0, 0.0, 0.3)),
        lazy=rng.choice((0.0, 0.1, 0.4)),
        faults=tuple(sorted(faults, key=lambda each: each.at)),
        operator_kills={rng.randrange(int(seconds)): rng.randrange(6) for _ in range(rng.choice((0, 0, 2)))},
    )
    if seed < FIRST_WITH_SPARES:
        return plan
    return replace(
        plan, spec=replace(plan.spec, spares=rng.choice((0, 1, 1, 2))), nodes_per_rack=plan.nodes_per_rack + 1
    )


def _small(seed: int, rng: random.Random) -> Plan:
    workers = rng.choice((2, 2, 2, 3))
    every = rng.choice((1, 1, 2))
    remote = {"directory": {}, "everySteps": every, "keep": rng.choice((1, 2))}
    spec = make_spec(
        workers=workers,
        snapshot_every=every,
        delta=DeltaMode.AUTO if rng.random() < 0.35 else DeltaMode.NONE,
        copies=rng.choice((0, 1, 1, 1, 1)),
        remote=remote if rng.random() < 0.4 else None,
        max_restarts=1000,
        hang=None,
        rehearse_every=None,
        spares=rng.choice((0, 0, 0, 0, 0, 0, 0, 1)),
    )
    known = FAULTS | LATER_FAULTS | LAST_FAULTS
    known |= CLUSTER_FAULTS | HOLDER_FAULTS if seed >= FIRST_BRISK else {}
    known = {name: n for name, n in known.items() if name != "mend" and (spec.remote or "store" not in name)}
    faults, moments = [], MOMENTS
    names = rng.choices(*_weighted(known), k=rng.choice((1, 1, 2)))
    if names[0] in PARTNERS:
        names = [names[0], rng.choice(PARTNERS[names[0]])]
    elif names[0] == "jump":  # while somebody is silent
        names = [rng.choice(("deaf", "cut", "sidecar", "hang")), "jump"]
    if names[0] in HOLDER_FAULTS:
        spec = replace(spec, workers=3, copies=1)
    if seed >= FIRST_BRISK:
        spec = replace(spec, prove_steps=seed % 3 // 2)
    if seed >= FIRST_BRISK and rng.random() < OWNED:
        spec = replace(spec, attach=_OWNER, template={}, spares=0)
        names = ["scale", *names[:1]] if rng.random() < 0.5 else names
    for name in names:
        moment = rng.choices(*_weighted({each: n for each, n in moments.items() if _comes(spec, each)}))[0]
        count = rng.randrange(1, 9) if moment == "step" else rng.choice((1, 1, 2, 3))
        after = rng.choice((0.0, 0.0, 0.3))
        faults.append(Fault(after, name, rng.randrange(8), rng.random(), moment, count))
        moments = LATER_MOMENTS
    return Plan(
        seed=seed,
        spec=spec,
        nodes_per_rack=2,
        seconds=9.0,
        memory=rng.choice((1 << 20, 1 << 20, 160 * 1024)),
        fabric=rng.random() < 0.2,
        start_seconds=rng.choice((0.0, 0.0, 1.0)),
        delay=rng.choice((0.05, 0.05, 0.5, 2.0)),
        loss=rng.choice((0.0, 0.0, 0.0, 0.1)),
        noise=rng.choice((0.0, 0.0, 0.0, 0.1)),
        echo=rng.choice((0.0, 0.0, 0.0, 0.3)),
        lazy=rng.choice((0.0, 0.0, 0.3)),
        faults=tuple(faults),
        operator_kills={rng.randrange(1, 12): rng.randrange(6)} if rng.random() < 0.15 else {},
        lull=rng.choice((0.0, 0.5, 2.0, 5.0)),
    )


def _staying(plan: Plan, rng: random.Random) -> Plan:
    """Most faults end an attempt that trains, and one more comes when a process has outlived that."""
    ends = ("crash", "crash", *PODS_END)
    faults = [
        replace(each, name=rng.choice(ends), moment="step", count=rng.randrange(6, 15))
        if rng.random() < _ENDS_TRAINING
        else each
        for each in plan.faults
    ]
    faults.append(Fault(rng.choice((0.0, 6.0, 6.0, 10.0)), rng.choice(ends), rng.randrange(8), 0.5, "joined"))
    notices = rng.choice((0.0, 0.1, 0.3, 0.6))
    return replace(plan, faults=tuple(faults), notices=notices, seconds=30.0)


def _comes(spec: JobSpec, moment: str) -> bool:
    """Whether a job of that spec ever gets there."""
    stored, copied = moment in ("put", "removed"), moment == "sealed peer"
    return (spec.remote is not None or not stored) and (spec.copies > 0 or not copied)


def _weighted(names: dict[str, int]) -> tuple[list[str], list[int]]:
    return list(names), list(names.values())
