"""Collects the operator's Prometheus metrics, and serves them with health and readiness over HTTP.

A job's series are removed with the job. There may be hundreds of jobs, each with dozens of series, so these
are kept as plain numbers. The library's own metrics take half a KiB for each series, with locks and creation
times: more for a job than all other data about it.

Clients are not authenticated, so each connection lasts for seconds only. If there are too many, the oldest
one of the address with most connections is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tiercheck.about import __version__
from tiercheck.connections import ConnectionAcceptor, UnauthenticatedClients, hang_up
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Exact
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import JobView
from tiercheck_operator.model.status import JobRecord, parse_time

Job = tuple[str, str]
"""Namespace and name."""
JOB_LABELS = ("namespace", "tiercheck_job")


class JobSeries(Collector):
    """One metric: a number for each job and each value of its other labels.
    `shown`: converts a number at each scrape."""

    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str] = (),
        shown: Callable[[float], float] = float,
    ) -> None:
        self.labels = (*JOB_LABELS, *labels)
        self._family, self._name, self._text, self._shown = family, name, text, shown
        self._numbers: dict[Job, dict[tuple[str, ...], float]] = {}

    def set(self, job: Job, number: float, *labels: str) -> None:
        self._numbers.setdefault(job, {})[labels] = number

    def add(self, job: Job, amount: float, *labels: str) -> None:
        """Adds to a number. An amount of 0 creates the series, so that its first event is an increase."""
        of_job = self._numbers.setdefault(job, {})
        of_job[labels] = of_job.get(labels, 0) + amount

    def forget(self, job: Job) -> None:
        self._numbers.pop(job, None)

    def describe(self) -> Iterable[Metric]:
        return [self._family(self._name, self._text, labels=self.labels)]

    def collect(self) -> Iterator[Metric]:
        found = self._family(self._name, self._text, labels=self.labels)
        for job, numbers in self._numbers.items():
            for labels, number in numbers.items():
                found.add_metric([*job, *labels], self._shown(number))
        yield found


class JobDurations(Collector):
    """One histogram for each job and value of one more label."""

    def __init__(self, name: str, text: str, label: str, bounds: Sequence[float]) -> None:
        self.labels = (*JOB_LABELS, label)
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts: dict[Job, dict[str, list[int]]] = {}
        """The number of values in each bucket alone, by its upper bound, and beyond the last bound."""
        self._sums: dict[Job, dict[str, float]] = {}

    def begin(self, job: Job, label: str) -> None:
        """Creates the histogram without values."""
        self._counts.setdefault(job, {}).setdefault(label, [0] * (len(self._bounds) + 1))
        self._sums.setdefault(job, {}).setdefault(label, 0.0)

    def observe(self, job: Job, seconds: float, label: str) -> None:
        self.begin(job, label)
        self._counts[job][label][bisect_left(self._bounds, seconds)] += 1
        self._sums[job][label] += seconds

    def forget(self, job: Job) -> None:
        self._counts.pop(job, None)
        self._sums.pop(job, None)

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self.labels)]

    def collect(self) -> Iterator[Metric]:
        found = HistogramMetricFamily(self._name, self._text, labels=self.labels)
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        for job, of_job in self._counts.items():
            for label, counts in of_job.items():
                upto = [sum(counts[: number + 1]) for number in range(len(counts))]
                buckets = list(zip(names, map(float, upto), strict=True))
                found.add_metric([*job, label], buckets, self._sums[job][label])
        yield found


S = TypeVar("S", JobSeries, JobDurations)
_PHASES = ("detect", "restore", "total")
_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """The operator's metrics, in a registry of their own, so that tests can run several in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._begun: set[tuple[str, str]] = set()
        self._per_job: list[JobSeries | JobDurations] = []

        def of_jobs(series: S) -> S:
            self.registry.register(series)
            self._per_job.append(series)
            return series

        def shared(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(f"tiercheck_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str, shown: Callable[[float], float] = float) -> JobSeries:
            return of_jobs(JobSeries(GaugeMetricFamily, f"tiercheck_{name}", text, labels, shown))

        def counter(name: str, text: str, *labels: str) -> JobSeries:
            return of_jobs(JobSeries(CounterMetricFamily, f"tiercheck_{name}", text, labels))

        self._step = gauge("training_step", "Newest step that every worker has reported.")
        self._last_step = gauge("checkpoint_last_step", "Step of the newest complete version.", "tier")
        self._lag = gauge("checkpoint_lag_steps", "Steps that training is ahead of that version.", "tier")
        self._success = gauge(
            "checkpoint_last_success_timestamp_seconds", "When that version was seen complete.", "tier"
        )
        self._proof_age = gauge(
            "restore_proof_age_seconds",
            "Since some rank last proved that it would come back from the tier; without any proof since "
            "the job started.",
            "tier",
            shown=lambda at: max(0.0, time.time() - at),
        )
        self._unprotected = gauge("placement_unprotected_workers", "Workers without a copy elsewhere.")
        self._attempt = gauge("attempt", "The current attempt.")
        self._spares = gauge("spares", "Spare pods of the job: wanted, and ready to take over.", "state")
        self._workers = gauge(
            "workers", "Workers of the job: wanted by its spec, and those that it has now.", "state"
        )
        self._away = gauge(
            "sidecars_away", "Workers whose sidecar does not answer now; nothing new of them is kept."
        )
        self._condition = gauge("job_condition", "1 if the condition is true.", "type")
        self._watch = shared("watch_last_event_timestamp_seconds", "Newest watch event.", ["kind"])
        self._leader = shared("leader", "1 if this replica leads.", [])
        shared("build_info", "The operator's version.", ["version"]).labels(__version__).set(1)
        self._restores = counter("restores", "Recoveries that ended, by cause.", "cause")
        self._ranks = counter("restored_ranks", "Ranks restored, by tier.", "tier")
        self._lost = counter("lost_steps", "Steps trained again.")
        self._lost_seconds = counter("lost_seconds", "Time that training those steps again takes.")
        self._resumes = counter(
            "resumes", "Restores after which steps trained again were compared.", "result"
        )
        self._moves = counter("placement_changes", "Placements that differ from the one before.")
        name = "tiercheck_recovery_duration_seconds"
        self._duration = of_jobs(JobDurations(name, "Parts of a recovery.", "phase", _SECONDS))
        self._plan = Histogram(
            "tiercheck_plan_duration_seconds", "Deciding, within one reconcile.",
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10), registry=self.registry,
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

    def text(self) -> bytes:
        """Returns all metrics in the exposition format."""
        return generate_latest(self.registry)

    def watched(self, kind: str) -> None:
        """Records that a watch event of this kind arrived."""
        self._watch.labels(kind).set(time.time())

    def leads(self, leads: bool) -> None:
        self._leader.set(leads)

    def called(self, verb: str, status: int, seconds: float) -> None:
        """Records one call to the API server."""
        self._calls.labels(verb, str(status)).observe(seconds)

    def decided(self, seconds: float) -> None:
        self._plan.observe(seconds)

    def reconciled(self, seconds: float) -> None:
        self._reconcile.observe(max(0.0, seconds))

    def reconcile_failed(self, reason: str) -> None:
        self._errors.labels(reason).inc()

    def job_seen(self, job: JobView, away: int = 0) -> None:
        """Updates the job's gauges. `away`: the number of its workers' sidecars that do not answer."""
        status, key = job.status, (job.namespace, job.name)
        self._begin(key)
        self._away.set(key, away)
        self._attempt.set(key, status.attempt)
        if status.step is not None:
            self._step.set(key, status.step)
        for name, tier in status.tiers.items():
            self._last_step.set(key, tier.step, name)
            self._lag.set(key, tier.lag_steps, name)
            self._success.set(key, parse_time(tier.time) or 0, name)
        self._proofs_seen(job)
        if status.placement is not None:
            self._unprotected.set(key, status.placement.unprotected_workers)
        if status.spares is not None:
            self._spares.set(key, status.spares.wanted, "wanted")
            self._spares.set(key, status.spares.ready, "ready")
        self._workers.set(key, job.spec.workers, "wanted")
        present = status.size.workers if status.size is not None else job.spec.workers
        self._workers.set(key, present, "present")
        for condition in status.conditions:
            self._condition.set(key, condition.status is True, condition.type)
        for kind in (conditions.COMPLETED, conditions.FAILED):
            self._condition.set(key, status.holds(kind), kind)

    def _proofs_seen(self, job: JobView) -> None:
        """Stores the times of proofs; their age is computed at each scrape."""
        self._proof_age.forget((job.namespace, job.name))
        if job.spec.rehearse_every is None:
            return
        for name in job.status.tiers:
            proof = job.status.proofs.get(name)
            at = parse_time(proof.time if proof is not None else job.status.started)
            if at is not None:
                self._proof_age.set((job.namespace, job.name), at, name)

    def _begin(self, key: tuple[str, str]) -> None:
        """Creates counters at zero: Prometheus sees no increase in one that appears as 1."""
        if key in self._begun:
            return
        self._begun.add(key)
        for cause in Cause:
            self._restores.add(key, 0, cause.value)
        for tier in Tier:
            self._ranks.add(key, 0, tier.value)
        for exact in Exact:
            self._resumes.add(key, 0, exact.value)
        for counter in (self._lost, self._lost_seconds, self._moves):
            counter.add(key, 0)
        for phase in _PHASES:
            self._duration.begin(key, phase)

    def status_written(self, job: JobView, status: JobRecord) -> None:
        """Counts what has ended with this status write. `job` is the view before it."""
        ended, key = status.last_recovery, (job.namespace, job.name)
        before, after = job.status.placement, status.placement
        if before is not None and after is not None and before.hash != after.hash:
            self._moves.add(key, 1)
        if not ended:
            return
        known = job.status.last_recovery or {}
        new = ended.get("attempt") != known.get("attempt")
        exact = ended.get("exact")
        if exact and (new or exact != known.get("exact")):
            self._resumes.add(key, 1, exact)
        if not new:
            return
        self._restores.add(key, 1, str(ended.get("cause")))
        steps = int(ended.get("lostSteps") or 0)
        self._lost.add(key, steps)
        self._lost_seconds.add(key, steps * (status.step_seconds or 0.0))
        for tier, ranks in (ended.get("tiers") or {}).items():
            self._ranks.add(key, int(ranks), tier)
        for phase in _PHASES:
            self._duration.observe(key, float(ended.get(f"{phase}Seconds") or 0), phase)

    def job_gone(self, namespace: str, name: str) -> None:
        self._begun.discard((namespace, name))
        for metric in self._per_job:
            metric.forget((namespace, name))


_PATIENCE = 10.0
"""Seconds that a connection may last."""
_MOST = 256


@web.middleware
async def _once(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Closes each connection after one answer, because clients are not authenticated."""
    response = await handler(request)
    response.force_close()
    return response


class Pages(ConnectionAcceptor[web.AppRunner]):
    """Serves `metrics` (exposition format), `trouble` (sentences; empty: none) and `ready`.
    `tls`: a folder with tls.crt and tls.key; empty: plain HTTP."""

    def __init__(
        self,
        metrics: Callable[[], bytes],
        trouble: Callable[[], str],
        ready: Callable[[], bool],
        patience: float = _PATIENCE,
        tls: str = "",
    ) -> None:
        self._tls = tls
        self._metrics, self._trouble, self._ready, self._patience = metrics, trouble, ready, patience
        app = web.Application(middlewares=[_once])
        app.add_routes(
            [
                web.get("/metrics", self._metrics_page),
                web.get("/healthz", self._health_page),
                web.get("/readyz", self._ready_page),
            ]
        )
        self._strangers = UnauthenticatedClients(lambda: _MOST)
        super().__init__(web.AppRunner(app, access_log=None, shutdown_timeout=1.0), self._serve)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        server = self._runner.server
        assert server is not None
        guest = self._strangers.enter(address, partial(hang_up, connection))
        try:
            with contextlib.suppress(OSError):
                context = self._context()
                await asyncio.get_running_loop().connect_accepted_socket(server, connection, ssl=context)
                await asyncio.sleep(self._patience)
        finally:
            hang_up(connection)
            self._strangers.leave(guest)

    def _context(self) -> ssl.SSLContext | None:
        """Reads the certificate for each connection, as it may be renewed at any time. Raises OSError."""
        if not self._tls:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(f"{self._tls}/tls.crt", f"{self._tls}/tls.key")
        return context

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), content_type="text/plain", charset="utf-8")

    async def _health_page(self, _: web.Request) -> web.Response:
        trouble = self._trouble()
        return web.Response(text=f"{trouble or 'ok'}\n", status=500 if trouble else 200)

    async def _ready_page(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(text="ready\n" if ready else "starting\n", status=200 if ready else 503)
