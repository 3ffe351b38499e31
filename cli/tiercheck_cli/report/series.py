"""Works out of a record what the pictures draw: curves, steps trained again, places of faults."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_cli.report.record import RunRecord

MOST_POINTS = 2000


@dataclass(frozen=True)
class FaultMark:
    """Where a fault sits in the pictures. Steps are optimizer steps, times are seconds since the run
    began."""

    number: int
    name: str
    last_step: int
    """The newest step before the fault."""
    restored_step: int
    injected: float
    resumed: float


def parse_loss(text: str) -> float:
    """The loss behind a `float.hex`. Raises ValueError."""
    return float.fromhex(text)


def reference_curve(record: RunRecord) -> list[tuple[float, float]]:
    """(step, loss) of the uninterrupted run."""
    return thin([(float(step), parse_loss(loss)) for step, loss in sorted(record.reference_losses.items())])


def attempt_curves(record: RunRecord) -> list[list[tuple[float, float]]]:
    """(step, loss) of each attempt in turn, so that a rollback does not draw a line backwards."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for step in record.steps:
        curves.setdefault(step.attempt, []).append((float(step.step), step.loss))
    return [thin(sorted(curve)) for _, curve in sorted(curves.items())]


def progress_curves(record: RunRecord) -> list[list[tuple[float, float]]]:
    """(seconds since the start, step) of each attempt in turn."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for step in record.steps:
        curves.setdefault(step.attempt, []).append((step.time - record.started, float(step.step)))
    return [thin(sorted(curve)) for _, curve in sorted(curves.items())]


def watermark_curve(record: RunRecord, tier: str) -> list[tuple[float, float]]:
    """(seconds since the start, newest complete step) of a tier, as stairs."""
    stairs: list[tuple[float, float]] = []
    for sample in sorted(
        (sample for sample in record.samples if sample.tier == tier), key=lambda sample: sample.time
    ):
        time = sample.time - record.started
        if stairs:
            stairs.append((time, stairs[-1][1]))
        stairs.append((time, float(sample.step)))
    return stairs


def fault_marks(record: RunRecord) -> list[FaultMark]:
    """One mark per fault, in order."""
    return [
        FaultMark(
            number=number,
            name=fault.name,
            last_step=fault.restored_step + fault.lost_steps,
            restored_step=fault.restored_step,
            injected=fault.injected_at - record.started,
            resumed=fault.resumed_at - record.started,
        )
        for number, fault in enumerate(record.faults, start=1)
    ]


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MOST_POINTS of the points, first and last among them: a page must stay light."""
    stride = -(-len(points) // MOST_POINTS) if points else 1
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
