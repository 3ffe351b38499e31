"""Whether the job has as many workers as its spec asks for, as people read it: a smaller job trains as usual, and nobody should miss that."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_operator.controller.spares import find_spares
from tiercheck_operator.model import conditions
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, rfc3339


@dataclass(frozen=True)
class SizeStanding:
    """For the condition FullSize."""

    full: bool
    reason: str
    message: str


def size_standing(obs: Observation, record: JobRecord) -> SizeStanding | None:
    """By the status that is about to be written. None: the job may not shrink, and never did."""
    spec = obs.job.spec
    wanted = spec.full_size
    if record.size is None:
        known = spec.min_workers is not None or record.condition(conditions.FULL_SIZE) is not None
        text = f"the job has all {wanted} workers"
        return SizeStanding(True, conditions.ALL_WORKERS, text) if known else None
    text = f"{record.size.workers} of {wanted} workers"
    if record.size.room_since is not None:
        since = rfc3339(record.size.room_since)
        text = f"{text}. Pods for the others have been ready since {since}: the job grows soon, when few steps would be made twice"
        return SizeStanding(False, conditions.GROWING, text)
    homeless = next((pod for pod in obs.all_pods if pod.homeless and not pod.deleting), None)
    if homeless is not None:
        text = (
            f"{text}: no node takes {homeless.name}. {homeless.message.rstrip('.')}. It grows back when nodes are added"
        )
    else:
        missing = wanted - record.size.workers
        ready = min(missing, len(find_spares(obs).ready))
        text = f"{text}: of the pods with which it grows back {ready} of {missing} are ready"
    return SizeStanding(False, conditions.SHRUNK, text)
