"""Estimates how long a job would be without training, from its own recoveries or by a guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tiercheck.protocol.directive import Tier
from tiercheck_cli.events.recoveries import PastRecovery

_IN_PLACE = {"TrainerCrash", "OOMKilled", "Hung", "Diverged", "RestoreFailed", "StatusOutdated"}
"""Causes after which pods stay, as a rule."""
_PLANNED = {"FirstStart", "Resumed", "Grown"}
"""Nothing failed: nobody had to notice it."""

# Medians of small jobs on a real cluster whose nodes had the images (docs/benchmarks): 18 s after a crash, 37
# s after the loss of a pod, 56 s after that of all.
_DETECT = 1.0
_RESTORE = {Tier.LOCAL: 2.0, Tier.PEER: 10.0, Tier.REMOTE: 25.0}
_SPARE = 3.0
"""From a peer, where a spare stands in."""
_START_IN_PLACE, _START_ANEW = 15.0, 26.0
"""From the state's being there to the first step. A new pod has to import torch first."""


@dataclass(frozen=True)
class Estimate:
    seconds: float
    measured: bool
    """The job has come back from such a loss before."""
    source: str
    """Where the seconds are from, as a clause."""


@dataclass(frozen=True)
class AssumedFailure:
    """What it would be like."""

    farthest: Tier | None
    """The tier that the worst-off rank needs; None: training would begin from scratch."""
    pods_lost: bool
    spare: bool = False
    """Spares wait for all that are lost."""
    carry_seconds: float = 0.0
    """For a worker's state on its way from that tier, by its size."""


def estimate(past: Sequence[PastRecovery], failure: AssumedFailure) -> Estimate:
    """`past`: newest first."""
    farthest, pods_lost = failure.farthest, failure.pods_lost
    failures = [entry for entry in past if entry.cause not in _PLANNED]
    kind = [entry for entry in failures if (entry.cause not in _IN_PLACE) is pods_lost]
    alike = [entry for entry in kind if entry.farthest is farthest]
    if alike:
        first = f"as after {alike[0].cause} in attempt {alike[0].attempt}"
        source = first if len(alike) == 1 else f"the median of its last {len(alike)} recoveries like that"
        return Estimate(median(entry.total for entry in alike), True, source)
    restored = [entry for entry in past if entry.farthest is farthest and farthest is not None]
    detect = _usual((entry.detect for entry in kind), _DETECT)
    restore = _usual((entry.restore for entry in restored), _guessed_restore(failure))
    start = _usual((entry.start for entry in past), _START_ANEW if pods_lost else _START_IN_PLACE)
    if past:
        those = (
            "its only recovery, which was not"
            if len(past) == 1
            else f"its last {len(past)} recoveries, none of which was"
        )
        source = f"an estimate from the parts of {those} like that"
    else:
        source = (
            "a guess: it has not come back from anything yet; small jobs took so long on a cluster with "
            "the images at hand"
        )
    return Estimate(detect + restore + start, False, source)


def _usual(measured: Iterable[float], otherwise: float) -> float:
    found = list(measured)
    return median(found) if found else otherwise


def _guessed_restore(failure: AssumedFailure) -> float:
    tier = failure.farthest or Tier.LOCAL
    if failure.spare and tier is not Tier.REMOTE:
        usual = _SPARE
    else:
        usual = max(
            _RESTORE[tier], _RESTORE[Tier.PEER] if failure.pods_lost else 0.0
        )  # new pods take their time
    return usual + failure.carry_seconds
