"""What a person's dashboard shows of one sidecar, computed from its report at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercheck.protocol.directive import Tier
from tiercheck.protocol.report import Report, RestoreState, TrainerState, Watermarks
from tiercheck.protocol.version import Kind
from tiercheck_sidecar.control.report import Reporter

_GAUGES: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
    ("attempt", "Attempt of the newest accepted directive.", lambda report: report.attempt),
    ("memory_limit_bytes", "Bytes the memory volume may hold.", lambda report: report.memory.limit),
    ("memory_used_bytes", "Bytes of slots and seals.", lambda report: report.memory.used),
    ("memory_needed_bytes", "Bytes for all slots of this worker.", lambda report: report.memory.needed),
    ("trainer_step", "Newest step reported by a local rank.", lambda report: report.trainer.step or 0),
    (
        "trainer_running",
        "1 while the training command runs.",
        lambda report: report.trainer.state is TrainerState.RUNNING,
    ),
    ("restore_seconds", "Duration of the newest restore.", lambda report: report.restore.seconds),
    (
        "restore_failed",
        "1 if the newest restore failed.",
        lambda report: report.restore.state is RestoreState.FAILED,
    ),
    (
        "remote_reachable",
        "1 if the remote tier answered last time, 0 if it did not or was not tried yet.",
        lambda report: report.remote.reachable is True,
    ),
    ("remote_versions", "Complete versions in the remote tier.", lambda report: len(report.remote.versions)),
    ("snapshot_every", "Steps between snapshots; 0: not decided yet.", lambda report: report.snapshot_every),
    (
        "not_finite_steps",
        "Steps in a row that the sanity gate refused.",
        lambda report: report.trainer.not_finite,
    ),
    (
        "chain_length",
        "Deltas between the newest whole snapshot and the newest step.",
        lambda report: _chain_length(report.watermarks),
    ),
)
_COUNTERS = (
    ("captured", "Snapshots sealed.", "captured"),
    ("deltas", "Deltas sealed.", "deltas"),
    ("skipped", "Snapshots skipped because no slot was free.", "skipped"),
    ("deltas_skipped", "Deltas that were due and not taken.", "deltas_skipped"),
    ("replay_mismatches", "Restores whose replay did not give the recorded state.", "replay_mismatches"),
    ("not_finite", "Steps that the sanity gate refused.", "not_finite"),
    ("replicated", "Artifacts acknowledged by a holder.", "replicated"),
    ("rehearsals", "Rehearsals of one tier that proved it.", "proved"),
    ("rehearsals_failed", "Rehearsals of one tier that found what would not come back.", "disproved"),
    ("uploaded", "Artifacts brought to the remote tier.", "uploaded"),
    ("refused_stale", "Messages of older attempts refused.", "refused_stale"),
    ("refused_reports", "Senseless tier reports refused.", "refused_reports"),
)
"""Names, words, and fields of the report's counters."""


class ReportCollector(Collector):
    """`tiercheck_*` metrics of one sidecar."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def collect(self) -> Iterable[Metric]:
        report = self._reporter.report()
        for name, text, of in _GAUGES:
            yield GaugeMetricFamily(f"tiercheck_{name}", text, value=float(of(report)))
        marks = {tier: getattr(report.watermarks, tier) for tier in ("local", "peer", "remote", "snapshot")}
        yield _labelled(
            "watermark_step",
            "Newest step complete for every rank, per tier; snapshot: of which every rank holds a whole one.",
            ("tier",),
            {(tier,): version.step for tier, version in marks.items() if version is not None},
        )
        held = {
            tier: [each for each in report.holdings if each.tier is tier] for tier in (Tier.LOCAL, Tier.PEER)
        }
        yield _labelled(
            "held_bytes",
            "Bytes of verified artifacts, per tier.",
            ("tier",),
            {(tier.value,): sum(each.bytes for each in here) for tier, here in held.items()},
        )
        yield _labelled(
            "held",
            "Verified artifacts here.",
            ("tier", "kind"),
            {
                (tier.value, kind.value): sum(each.kind is kind for each in here)
                for tier, here in held.items()
                for kind in Kind
            },
        )
        yield _labelled(
            "artifact_bytes",
            "Bytes of the largest slot of an own rank.",
            ("kind",),
            {(Kind.SNAPSHOT.value,): report.memory.snapshot, (Kind.DELTA.value,): report.memory.delta},
        )
        yield _labelled(
            "problem",
            "1 for each problem that is present.",
            ("reason",),
            {(problem.reason,): 1 for problem in report.problems},
        )
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(f"tiercheck_{name}", text, value=getattr(report.counters, field))


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Metric:
    found = GaugeMetricFamily(f"tiercheck_{name}", text, labels=labels)
    for each, value in values.items():
        found.add_metric(each, value)
    return found


def _chain_length(marks: Watermarks) -> int:
    return max(0, marks.local.step - marks.snapshot.step) if marks.local and marks.snapshot else 0


def render(reporter: Reporter) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(reporter))
    return generate_latest(registry)
