"""What a person's dashboard shows of one sidecar, computed from its report at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Report, RestoreState, TrainerState
from tiercheck.protocol.version import Kind
from tiercheck_sidecar.control.report import Reporter


class ReportCollector(Collector):
    """`tiercheck_*` metrics of one sidecar."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def collect(self) -> Iterable[Metric]:
        report = self._reporter.report()
        yield _gauge("tiercheck_attempt", "Attempt of the newest accepted directive.", report.attempt)
        yield _gauge("tiercheck_memory_limit_bytes", "Bytes the memory volume may hold.", report.memory.limit)
        yield _gauge("tiercheck_memory_used_bytes", "Bytes of slots and seals.", report.memory.used)
        yield _gauge(
            "tiercheck_memory_needed_bytes", "Bytes for all slots of this worker.", report.memory.needed
        )
        yield _gauge(
            "tiercheck_trainer_step", "Newest step reported by a local rank.", report.trainer.step or 0
        )
        yield _gauge(
            "tiercheck_trainer_running",
            "1 while the training command runs.",
            int(report.trainer.state is TrainerState.RUNNING),
        )
        yield _gauge("tiercheck_restore_seconds", "Duration of the newest restore.", report.restore.seconds)
        yield _gauge(
            "tiercheck_restore_failed",
            "1 if the newest restore failed.",
            int(report.restore.state is RestoreState.FAILED),
        )
        marks = GaugeMetricFamily(
            "tiercheck_watermark_step",
            "Newest step complete for every rank, per tier; snapshot: of which every rank holds a whole one.",
            labels=["tier"],
        )
        for tier in ("local", "peer", "remote", "snapshot"):
            version = getattr(report.watermarks, tier)
            if version is not None:
                marks.add_metric([tier], version.step)
        yield marks
        held = GaugeMetricFamily(
            "tiercheck_held_bytes", "Bytes of verified artifacts, per tier.", labels=["tier"]
        )
        for name in ("local", "peer"):
            held.add_metric([name], sum(each.bytes for each in report.holdings if each.tier.value == name))
        yield held
        yield from _artifacts(report)
        remote = report.remote
        yield _gauge(
            "tiercheck_remote_reachable",
            "1 if the remote tier answered last time, 0 if it did not or was not tried yet.",
            int(remote.reachable is True),
        )
        yield _gauge(
            "tiercheck_remote_versions", "Complete versions in the remote tier.", len(remote.versions)
        )
        problems = GaugeMetricFamily(
            "tiercheck_problem", "1 for each problem that is present.", labels=["reason"]
        )
        for problem in report.problems:
            problems.add_metric([problem.reason], 1)
        yield problems
        counters = report.counters
        yield _counter("tiercheck_captured", "Snapshots sealed.", counters.captured)
        yield _counter("tiercheck_deltas", "Deltas sealed.", counters.deltas)
        yield _counter("tiercheck_skipped", "Snapshots skipped because no slot was free.", counters.skipped)
        yield _counter(
            "tiercheck_deltas_skipped", "Deltas that were due and not taken.", counters.deltas_skipped
        )
        yield _counter(
            "tiercheck_replay_mismatches",
            "Restores whose replay did not give the recorded state.",
            counters.replay_mismatches,
        )
        yield _counter("tiercheck_not_finite", "Steps that the sanity gate refused.", counters.not_finite)
        yield _counter("tiercheck_replicated", "Artifacts acknowledged by a holder.", counters.replicated)
        yield _counter("tiercheck_rehearsals", "Rehearsals of one tier that proved it.", counters.proved)
        yield _counter(
            "tiercheck_rehearsals_failed",
            "Rehearsals of one tier that found what would not come back.",
            counters.disproved,
        )
        yield _counter("tiercheck_uploaded", "Artifacts brought to the remote tier.", counters.uploaded)
        yield _counter(
            "tiercheck_refused_stale", "Messages of older attempts refused.", counters.refused_stale
        )
        yield _counter(
            "tiercheck_refused_reports", "Senseless tier reports refused.", counters.refused_reports
        )


def _artifacts(report: Report) -> Iterable[Metric]:
    yield _gauge(
        "tiercheck_snapshot_every", "Steps between snapshots; 0: not decided yet.", report.snapshot_every
    )
    yield _gauge(
        "tiercheck_not_finite_steps",
        "Steps in a row that the sanity gate refused.",
        report.trainer.not_finite,
    )
    sizes = GaugeMetricFamily(
        "tiercheck_artifact_bytes", "Bytes of the largest slot of an own rank.", labels=["kind"]
    )
    sizes.add_metric([Kind.SNAPSHOT.value], report.memory.snapshot)
    sizes.add_metric([Kind.DELTA.value], report.memory.delta)
    yield sizes
    held = GaugeMetricFamily("tiercheck_held", "Verified artifacts here.", labels=["tier", "kind"])
    for tier in (Tier.LOCAL, Tier.PEER):
        for kind in Kind:
            found = sum((each.tier, each.kind) == (tier, kind) for each in report.holdings)
            held.add_metric([tier.value, kind.value], found)
    yield held
    mark, whole = report.watermarks.local, report.watermarks.snapshot
    chain = max(0, mark.step - whole.step) if mark and whole else 0
    yield _gauge(
        "tiercheck_chain_length", "Deltas between the newest whole snapshot and the newest step.", chain
    )


def render(reporter: Reporter) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(reporter))
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
