"""Builds the report to the controller about this worker, and the metrics for dashboards.

The report's serial grows only with facts that the controller may act on. What a worker holds and which
version is complete change at every step without a new serial: the controller reads them when it decides on a
recovery, and before that it asks every sidecar again. Whether they exist at all, and the coordinator's
snapshot watermark, do change the serial.

Neither contains a credential that this process holds, in whatever text it appears.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercheck.protocol import names
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import field_names
from tiercheck.protocol.report import (
    Holding,
    MemoryReport,
    Report,
    RestoreReport,
    RestoreState,
    TrainerReport,
    TrainerState,
    Watermarks,
)
from tiercheck.protocol.version import Kind, Version
from tiercheck.redaction import known_secrets, redacted
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.vault import Seal, Vault

_NO_TEXT = frozenset({int, float, bool, type(None)})
_FOREIGN = ("restore", "trainer", "remote", "quarantined", "problems")
"""Parts of a report that contain text of libraries, scripts and servers."""


def own_credentials(env: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Returns the job's token, and the values of variables with names of credentials."""
    folder = Path(env.get(names.ENV_CREDENTIALS_DIR) or names.CREDENTIALS_DIR)
    return known_secrets(env, folder / "token")


class ReportRedactor:
    """Removes credentials from reports. Not thread-safe."""

    def __init__(self, known: frozenset[str]) -> None:
        self._hide: Callable[[str], str] = lru_cache(maxsize=512)(lambda text: redacted(text, known))
        self._seen: dict[str, tuple[Any, Any]] = {}
        """The last value of each part, and its redacted form; None if nothing is redacted."""

    def without_credentials(self, report: Report) -> Report:
        """Returns the report with REDACTED in place of credentials."""
        changes = {}
        for name in _FOREIGN:
            value = getattr(report, name)
            if name not in self._seen or self._seen[name][0] != value:
                clean = self._without(value)
                self._seen[name] = (value, None if clean == value else clean)
            if self._seen[name][1] is not None:
                changes[name] = self._seen[name][1]
        return dataclasses.replace(report, **changes) if changes else report

    def _without(self, value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._hide(value) if value else value
        if isinstance(value, tuple):
            return tuple(self._without(entry) for entry in value)
        changes = {}
        for name in field_names(type(value)) or ():
            content = getattr(value, name)
            if type(content) in _NO_TEXT:
                continue
            clean = self._without(content)
            if clean != content:
                changes[name] = clean
        return dataclasses.replace(value, **changes) if changes else value


class Reporter:
    """Builds reports and numbers them. Thread-safe."""

    def __init__(self, state: SidecarState, vault: Vault) -> None:
        self._state, self._vault = state, vault
        self._lock = threading.Lock()
        self._serial = 0
        self._known: tuple[Any, ...] = ()
        self._listed: dict[int, tuple[Seal, Holding]] = {}
        self._held = 1
        """A counter of the changes of `_listed`."""
        self._redactor = ReportRedactor(own_credentials() | {state.config.token})
        self.holders_lack: Callable[[], bool] = lambda: False
        """Returns whether holders lack anything.
        Not reported while training runs, because they always lack the newest then."""
        self.settled: Callable[[], bool] = lambda: False
        """Returns whether the job is over and this sidecar may end. Called without the state's lock."""

    def report(self) -> Report:
        with self._lock:
            report = self._redactor.without_credentials(self._gather(self.settled()))
            essence = _essence(report)
            if essence == self._known:
                return report
            self._known = essence
            self._serial += 1
            return dataclasses.replace(report, serial=self._serial)

    def _gather(self, settled: bool) -> Report:
        state = self._state
        with state.lock:
            directive, verdict = state.directive, state.verdict
            return Report(
                job_uid=state.config.job_uid,
                worker=state.config.worker,
                pod_uid=state.config.pod_uid,
                instance=state.instance,
                serial=self._serial,
                attempt=state.attempt,
                revision=directive.revision if directive else "",
                phase=directive.phase if directive else None,
                restore=self._restore(),
                trainer=self._trainer(),
                holdings=self._holdings(),
                remote=state.remote,
                watermarks=verdict.watermarks if verdict else Watermarks(),
                memory=self._memory(),
                quarantined=state.quarantined,
                problems=state.problems,
                unreachable=state.peers.unreachable(),
                held=self._held,
                holders_lack=state.trainer.report.state is not TrainerState.RUNNING and self.holders_lack(),
                counters=state.counters,
                snapshot_every=state.every,
                proofs=state.proofs,
                followed=state.followed,
                settled=settled,
                newest_attempt=state.newest_attempt.attempt,
                newest_signature=state.newest_attempt.signature,
            )

    def _holdings(self) -> tuple[Holding, ...]:
        before = self._listed
        self._listed = {
            id(seal): before.get(id(seal))
            or (seal, Holding(seal.rank, seal.version, seal.tier, seal.digests.size, seal.kind, seal.share))
            for seal in self._vault.held()
        }
        self._held += self._listed.keys() != before.keys()
        return tuple([holding for _, holding in self._listed.values()])

    def _restore(self) -> RestoreReport:
        state = self._state
        if state.restore.state is not RestoreState.RUNNING:
            return state.restore
        return dataclasses.replace(state.restore, progress=state.meter.describe())

    def _trainer(self) -> TrainerReport:
        state = self._state
        reasons = (state.deltas_off(rank) for rank in self._vault.ranks)
        no_deltas = (next(filter(None, reasons), "") or state.no_room) if state.policy.deltas else ""
        report = state.trainer.report
        return report if report.no_deltas == no_deltas else dataclasses.replace(report, no_deltas=no_deltas)

    def _memory(self) -> MemoryReport:
        plan = self._vault.size_plan()
        return MemoryReport(
            limit=self._vault.limit,
            used=self._vault.used(),
            needed=plan.needed,
            local=plan.local,
            peer=plan.peer,
            snapshot=plan.snapshot,
            delta=plan.delta,
        )


def _all_but(kind: type, *names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that gets the values of a dataclass, without these fields."""
    return attrgetter(*(field.name for field in dataclasses.fields(kind) if field.name not in names))


_OF_REPORT = _all_but(
    Report, "serial", "restore", "trainer", "memory", "watermarks", "holdings", "held", "counters"
)
_OF_RESTORE = _all_but(RestoreReport, "progress")
_OF_TRAINER = _all_but(TrainerReport, "step", "step_seconds", "slowest_rank", "slowest_step")
_OF_MEMORY = _all_but(MemoryReport, "used")


def _essence(report: Report) -> tuple[Any, ...]:
    marks = report.watermarks
    return (
        _OF_REPORT(report),
        _OF_RESTORE(report.restore),
        _OF_TRAINER(report.trainer),
        _OF_MEMORY(report.memory),
        _present(marks.local),
        _present(marks.peer),
        marks.remote,
        # All sidecars receive it from the coordinator; worker 0 alone notifies the controller of a change.
        marks.snapshot if report.worker == 0 else _present(marks.snapshot),
    )


def _present(version: Version | None) -> Version | None:
    return version and Version(0, 0)


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
    """Returns the text that Prometheus scrapes."""
    return generate_latest(ReportCollector(reporter))
