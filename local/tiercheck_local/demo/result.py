"""Records what a run went through, by job and sidecars, for the table and the page."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiercheck.protocol import names, signing
from tiercheck.protocol.directive import Tier
from tiercheck.protocol.encoding import Malformed, from_json
from tiercheck.protocol.report import Exact, RankRestore, Report
from tiercheck_local.demo.training_log import Digest, RunVerdict, Step
from tiercheck_operator.manifests.owned import parse_secret
from tiercheck_operator.sidecars import Signer


@dataclass(frozen=True)
class FaultRecord:
    """One failure and the way back from it. Times are Unix seconds."""

    name: str
    """One or two words: process, pod, node, rack, all pods."""
    what: str
    """A sentence for people: "a node dies"."""
    target: str
    """What was hit."""
    injected_at: float
    detected_at: float
    restored_at: float
    """When every rank held the version that was decided on."""
    resumed_at: float
    """When the first step of the new attempt ended."""
    attempt: int
    """The attempt that this recovery led to."""
    restored_step: int
    lost_steps: int
    tiers: Mapping[str, int]
    """How many ranks came back from "local", "peer", "parity" (rebuilt from what peers hold) and "remote"."""
    rank_sources: Sequence[str] = ()
    """For each rank, in order, where it came back from: "own memory", "worker 2 (rack b)", "S3"."""
    reason: str = ""
    """Why this version was chosen, as the controller said it."""
    cause: str = ""
    exact: str = ""
    """What the comparison of the steps trained again found, as in status.lastRecovery; empty: not known."""
    exact_message: str = ""

    @property
    def detect_seconds(self) -> float:
        """From the fault until the controller noticed it; never negative, though two clocks are compared."""
        return max(0.0, self.detected_at - self.injected_at)

    @property
    def restore_seconds(self) -> float:
        """From then until every rank held the version."""
        return max(0.0, self.restored_at - max(self.detected_at, self.injected_at))

    @property
    def start_seconds(self) -> float:
        """From then until the first new step: starting processes, rendezvous, loading, one step."""
        return max(0.0, self.resumed_at - max(self.restored_at, self.detected_at, self.injected_at))

    @property
    def total_seconds(self) -> float:
        """The sum of the three: from the fault until the first new step."""
        return self.detect_seconds + self.restore_seconds + self.start_seconds


@dataclass(frozen=True)
class RunRecord:
    """A whole run and the uninterrupted run that it is compared with."""

    machine: str
    """What it ran on, in words."""
    started: float
    """Unix seconds."""
    ended: float
    nodes: Mapping[str, str]
    """Node name to rack name."""
    steps: Sequence[Step]
    """In the order in which they were trained."""
    faults: Sequence[FaultRecord]
    """In the order in which they were injected."""
    reference: Sequence[Step]
    digest: Digest | None
    reference_digest: Digest | None
    verdict: RunVerdict


def count_tiers(ranks: Mapping[int, RankRestore]) -> dict[str, int]:
    """How many ranks came back from where."""
    known = [rank for rank in ranks.values() if rank.rebuilt or rank.tier is not None]
    return dict(Counter("parity" if rank.rebuilt else str(rank.tier and rank.tier.value) for rank in known))


def rank_source(restore: RankRestore, rank: int, racks: Mapping[int, str]) -> str:
    """Where one rank came back from, in words. `racks` is the rack of each worker after the recovery."""
    if restore.rebuilt:
        return "parity"
    if restore.tier is Tier.LOCAL:
        return "own memory"
    if restore.tier is Tier.PEER:
        return f"worker {restore.worker} ({racks.get(restore.worker or 0, 'unknown rack')})"
    if restore.tier is Tier.REMOTE:
        return "S3"
    return f"rank {rank}: from scratch"


def with_resumes(faults: Sequence[FaultRecord], ended: Mapping[int, Mapping[str, Any]]) -> list[FaultRecord]:
    """Returns `faults` with what the comparison after each found. `ended`: their recoveries, by attempt.

    It is known some steps after a recovery has ended, so not when the fault is recorded.
    """
    found = [ended.get(fault.attempt, {}) for fault in faults]
    return [
        replace(fault, exact=str(entry.get("exact", "")), exact_message=str(entry.get("exactMessage", "")))
        for fault, entry in zip(faults, found, strict=True)
    ]


def add_resumes(verdict: RunVerdict, faults: Sequence[FaultRecord]) -> RunVerdict:
    """Returns `verdict`, but not equal if a resume differs."""
    for fault in faults:
        if fault.exact == Exact.DIFFERS.value:
            return replace(verdict, equal=False, sentence=f"a resume differs: {fault.exact_message}")
    return verdict


# The status carries counts only (a thousand ranks would not fit); the rank-by-rank answer is in the sidecars'
# reports, which are asked here the way the operator asks: over HTTPS, with the job's own credentials.
@dataclass
class WatchedRecovery:
    """One attempt's way back, as far as it has been seen. Times are Unix seconds by the operator's clock."""

    attempt: int
    in_flight: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] | None = None


@dataclass
class RecoveryWatch:
    """`look()` takes one look at the job; the newest attempt's Recovery grows with every look."""

    get_job: Callable[[], Mapping[str, Any]]
    get_pods: Callable[[], Sequence[Mapping[str, Any]]]
    get_secret: Callable[[], Mapping[str, Any]]
    attempts: dict[int, WatchedRecovery] = field(default_factory=dict)

    def look(self) -> Mapping[str, Any]:
        """The job's status now."""
        status: Mapping[str, Any] = self.get_job().get("status") or {}
        in_flight = status.get("recovery") or {}
        if "attempt" in in_flight:  # it has none before its version is chosen
            self._of(int(in_flight["attempt"])).in_flight.update(in_flight)
        if finished := status.get("lastRecovery"):
            self._of(int(finished["attempt"])).finished = dict(finished)
        return status

    def ask_sidecars(self, attempt: int) -> dict[int, RankRestore]:
        """How each rank was restored in `attempt`; ranks whose sidecar does not answer are left out."""
        current = [report for report in self.reports().values() if report.attempt == attempt]
        return {rank.rank: rank for report in current for rank in report.restore.ranks}

    def reports(self) -> dict[int, Report]:
        """What each worker's sidecar reports now; workers whose sidecar does not answer are left out."""
        credentials = parse_secret(dict(self.get_secret()))
        context = ssl.create_default_context(cadata=credentials.ca.decode())
        signer = Signer("", credentials.operator_key)
        found = {}
        for pod in self.get_pods():
            address = (pod.get("status") or {}).get("podIP")
            if not address or pod["metadata"].get("deletionTimestamp"):
                continue
            shown = {
                "Authorization": f"Bearer {credentials.token}",
                signing.HEADER: signer.sign_pod(pod["metadata"]["uid"]),
            }
            report = ask(address, context, shown)
            if report is not None:
                found[report.worker] = report
        return found

    def _of(self, attempt: int) -> WatchedRecovery:
        return self.attempts.setdefault(attempt, WatchedRecovery(attempt))


def ask(
    address: str, context: ssl.SSLContext, headers: Mapping[str, str], timeout: float = 3.0
) -> Report | None:
    """The report of the sidecar at `address`; None if it does not answer."""
    try:
        plain = socket.create_connection((address, names.CONTROL_PORT), timeout=timeout)
        with context.wrap_socket(plain, server_hostname=names.TLS_SERVER_NAME) as connection:
            http_connection = http.client.HTTPConnection(address)
            http_connection.sock = connection
            http_connection.request("GET", "/v1/report", headers=dict(headers))
            response = http_connection.getresponse()
            body = response.read()
            return from_json(body, Report) if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException, Malformed):
        return None
