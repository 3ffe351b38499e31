"""What the sidecars can prove of the tiers, put together for the job: a chain is as old as its oldest link. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Report
from tiercheck_operator.model.observed import Observation
from tiercheck_operator.model.status import JobRecord, ProofRecord, rfc3339


def newest_proofs(obs: Observation, record: JobRecord, reports: Mapping[int, Report]) -> Mapping[str, ProofRecord]:
    """By tier: the proof of the rank whose newest one is the oldest. A tier that some worker cannot show one for, as after a restart of its
    sidecar, keeps the one that it had; one that holds nothing any more has none.
    """
    if obs.job.spec.rehearse_every is None:
        return {}
    found = {name: proof for name, proof in record.proofs.items() if name in record.tiers}
    for tier in Tier:
        shown = [proof for report in reports.values() for proof in report.proofs if proof.tier is tier]
        if tier.value in record.tiers and len(shown) == len(reports) == obs.job.spec.workers:
            step = min(proof.version.step for proof in shown)
            found[tier.value] = ProofRecord(step, rfc3339(min(proof.at for proof in shown)))
    return found
