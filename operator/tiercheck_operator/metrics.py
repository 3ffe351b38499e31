"""What Prometheus can ask the operator. A job's series go when the job goes."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tiercheck.about import __version__
from tiercheck.protocol.directive import Tier
from tiercheck_operator.model import conditions
from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.status import JobRecord, parse_time

_JOB = ["namespace", "job"]
_PHASES = ("detect", "restore", "total")
_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """One registry per operator, so that tests can run several in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._begun: set[tuple[str, str]] = set()

        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(f"tiercheck_{name}", text, labels, registry=self.registry)

        self._step = gauge("training_step", "Newest step that every worker has reported.", _JOB)
        self._last_step = gauge(
            "checkpoint_last_step", "Step of the newest complete version.", [*_JOB, "tier"]
        )
        self._lag = gauge(
            "checkpoint_lag_steps", "Steps that training is ahead of that version.", [*_JOB, "tier"]
        )
        self._success = gauge(
            "checkpoint_last_success_timestamp_seconds",
            "When that version was seen complete.",
            [*_JOB, "tier"],
        )
        self._proof_age = gauge(
            "restore_proof_age_seconds",
            "Since some rank last proved that it would come back from the tier; without any proof since "
            "the job started.",
            [*_JOB, "tier"],
        )
        self._unprotected = gauge("placement_unprotected_workers", "Workers without a copy elsewhere.", _JOB)
        self._attempt = gauge("attempt", "The current attempt.", _JOB)
        self._spares = gauge(
            "spares", "Spare pods of the job: wanted, and ready to take over.", [*_JOB, "state"]
        )
        self._workers = gauge(
            "workers", "Workers of the job: wanted by its spec, and those that it has now.", [*_JOB, "state"]
        )
        self._away = gauge(
            "sidecars_away", "Workers whose sidecar does not answer now; nothing new of them is kept.", _JOB
        )
        self._condition = gauge("job_condition", "1 if the condition is true.", [*_JOB, "type"])
        self._watch = gauge("watch_last_event_timestamp_seconds", "Newest watch event.", ["kind"])
        self._leader = gauge("leader", "1 if this replica leads.", [])
        gauge("build_info", "The operator's version.", ["version"]).labels(__version__).set(1)
        self._restores = Counter(
            "tiercheck_restores", "Recoveries that ended, by cause.", [*_JOB, "cause"], registry=self.registry
        )
        self._ranks = Counter(
            "tiercheck_restored_ranks", "Ranks restored, by tier.", [*_JOB, "tier"], registry=self.registry
        )
        self._lost = Counter("tiercheck_lost_steps", "Steps trained again.", _JOB, registry=self.registry)
        self._lost_seconds = Counter(
            "tiercheck_lost_seconds",
            "Time that training those steps again takes.",
            _JOB,
            registry=self.registry,
        )
        self._moves = Counter(
            "tiercheck_placement_changes",
            "Placements that differ from the one before.",
            _JOB,
            registry=self.registry,
        )
        self._plan = Histogram(
            "tiercheck_plan_duration_seconds", "Deciding, within one reconcile.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10), registry=self.registry,
        )  # fmt: skip
        self._duration = Histogram(
            "tiercheck_recovery_duration_seconds", "Parts of a recovery.", [*_JOB, "phase"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._reconcile = Histogram(
            "tiercheck_reconcile_duration_seconds", "One reconcile of one job.", registry=self.registry
        )
        self._errors = Counter(
            "tiercheck_reconcile_errors", "Reconciles that failed.", ["reason"], registry=self.registry
        )
        self._calls = Histogram(
            "tiercheck_api_request_duration_seconds", "Calls to the API server; status 0: no answer.",
            ["verb", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._per_job: tuple[Any, ...] = (
            self._step, self._last_step, self._lag, self._success, self._unprotected, self._attempt,
            self._spares, self._workers,
            self._away, self._proof_age, self._condition, self._restores, self._ranks, self._lost,
            self._lost_seconds, self._moves, self._duration,
        )  # fmt: skip

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self.registry)

    def watched(self, kind: str) -> None:
        """A watch event of this kind arrived: the operator is not deaf."""
        self._watch.labels(kind).set(time.time())

    def leads(self, leads: bool) -> None:
        self._leader.set(leads)

    def called(self, verb: str, status: int, seconds: float) -> None:
        """One call to the API server."""
        self._calls.labels(verb, str(status)).observe(seconds)

    def decided(self, seconds: float) -> None:
        self._plan.observe(seconds)

    def reconciled(self, seconds: float) -> None:
        self._reconcile.observe(max(0.0, seconds))

    def reconcile_failed(self, reason: str) -> None:
        self._errors.labels(reason).inc()

    def job_seen(self, job: JobView, away: int = 0) -> None:
        """Bring the job's gauges up to date. `away`: sidecars of its workers that do not answer."""
        status, key = job.status, (job.namespace, job.name)
        self._begin(key)
        self._away.labels(*key).set(away)
        self._attempt.labels(*key).set(status.attempt)
        if status.step is not None:
            self._step.labels(*key).set(status.step)
        for name, tier in status.tiers.items():
            self._last_step.labels(*key, name).set(tier.step)
            self._lag.labels(*key, name).set(tier.lag_steps)
            self._success.labels(*key, name).set(parse_time(tier.time) or 0)
        self._proofs_seen(job)
        if status.placement is not None:
            self._unprotected.labels(*key).set(status.placement.unprotected_workers)
        if status.spares is not None:
            self._spares.labels(*key, "wanted").set(status.spares.wanted)
            self._spares.labels(*key, "ready").set(status.spares.ready)
        self._workers.labels(*key, "wanted").set(job.spec.workers)
        self._workers.labels(*key, "present").set(
            status.size.workers if status.size is not None else job.spec.workers
        )
        for condition in status.conditions:
            self._condition.labels(*key, condition.type).set(condition.status)
        for kind in (conditions.COMPLETED, conditions.FAILED):
            self._condition.labels(*key, kind).set(status.holds(kind))

    def _proofs_seen(self, job: JobView) -> None:
        """Counted at each scrape, and not only when the job is looked at."""
        self._proof_age.remove_by_labels({"namespace": job.namespace, "job": job.name})
        if job.spec.rehearse_every is None:
            return
        for name in job.status.tiers:
            proof = job.status.proofs.get(name)
            at = parse_time(proof.time if proof is not None else job.status.started)
            if at is not None:
                age = self._proof_age.labels(job.namespace, job.name, name)
                age.set_function(lambda at=at: max(0.0, time.time() - at))  # type: ignore[misc]

    def _begin(self, key: tuple[str, str]) -> None:
        """Counters begin at zero: of one that appears as 1, Prometheus sees no increase, so the first event
        would be missed."""
        if key in self._begun:
            return
        self._begun.add(key)
        for cause in Cause:
            self._restores.labels(*key, cause.value)
        for tier in Tier:
            self._ranks.labels(*key, tier.value)
        for counter in (self._lost, self._lost_seconds, self._moves):
            counter.labels(*key)
        for phase in _PHASES:
            self._duration.labels(*key, phase)

    def status_written(self, job: JobView, status: JobRecord) -> None:
        """Count what this write has ended. `job` is as it was before."""
        ended, key = status.last_recovery, (job.namespace, job.name)
        before, after = job.status.placement, status.placement
        if before is not None and after is not None and before.hash != after.hash:
            self._moves.labels(*key).inc()
        if not ended or ended == job.status.last_recovery:
            return
        self._restores.labels(*key, str(ended.get("cause"))).inc()
        self._lost.labels(*key).inc(int(ended.get("lostSteps") or 0))
        self._lost_seconds.labels(*key).inc(int(ended.get("lostSteps") or 0) * (status.step_seconds or 0.0))
        for tier, ranks in (ended.get("tiers") or {}).items():
            self._ranks.labels(*key, tier).inc(int(ranks))
        for phase in _PHASES:
            self._duration.labels(*key, phase).observe(float(ended.get(f"{phase}Seconds") or 0))

    def job_gone(self, namespace: str, name: str) -> None:
        self._begun.discard((namespace, name))
        for metric in self._per_job:
            metric.remove_by_labels({"namespace": namespace, "job": name})
