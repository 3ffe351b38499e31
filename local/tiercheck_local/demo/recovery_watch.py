"""Watches one job come back, by the operator's status and by what each sidecar says.

The status carries counts only (a thousand ranks would not fit); the rank-by-rank answer is in the sidecars'
reports, which are asked here the way the operator asks: over HTTPS, with the job's own credentials.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercheck.protocol import names, signing
from tiercheck.protocol.encoding import Malformed, from_json
from tiercheck.protocol.report import RankRestore, Report
from tiercheck_operator.manifests.owned import parse_secret
from tiercheck_operator.sidecars import Signer


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
