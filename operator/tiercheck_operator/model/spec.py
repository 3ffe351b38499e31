"""Defines `spec` as decisions use it, each field with its path in the API.

A job's labels and annotations for Kueue are copied to each pod, including spares and replacements: each pod
is a Kueue workload of its own. Kueue's pod groups are not used. They remove pods beyond the group's count,
such as a spare or the replacement of a pod that is about to leave. They refuse pods that differ, such as one
that avoids a node.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from operator import eq, ne
from typing import Annotated, Any

from tiercheck.protocol import names
from tiercheck.protocol.directive import RESTORE_STALL, DeltaMode, HangLimits, HealthCheck
from tiercheck_operator.model.serialization import INTERNAL, As, At, from_api, parse_duration, parse_quantity


class RuleAction(str, Enum):
    """The consequence of a failure."""

    RESTART = "Restart"
    RESTART_IGNORING_LIMIT = "RestartIgnoringLimit"
    FAIL = "Fail"


@dataclass(frozen=True)
class ExitCodes:
    """A set of exit codes other than 0: `values`, or all other codes if `within` is false."""

    values: frozenset[int]
    within: Annotated[bool, At("operator"), As(partial(eq, "In"))] = True

    def match(self, code: int | None) -> bool:
        return bool(code) and (code in self.values) is self.within


_CONDITIONS = As(lambda raw: tuple((str(each["type"]), str(each.get("status") or "True")) for each in raw))


@dataclass(frozen=True)
class FailureRule:
    """A rule of `failurePolicy.rules`. One of its three matchers is set, as in a Job's podFailurePolicy."""

    name: str
    action: RuleAction
    exit_codes: Annotated[ExitCodes | None, At("onExitCodes")] = None
    reasons: Annotated[frozenset[str], At("onReasons")] = frozenset()
    node_conditions: Annotated[tuple[tuple[str, str], ...], At("onNodeConditions"), _CONDITIONS] = ()
    """(type, status) pairs; any one of them matches."""


DEFAULT_HANG = HangLimits(20.0, 1800.0)
_CHECK_SECONDS = 60.0
REMOTE_EVERY = 500
"""Steps between snapshots that also go to the remote tier; the default."""


def read_hang(raw: Mapping[str, Any]) -> HangLimits | None:
    """Reads `failurePolicy.hang`; None if hangs are not detected."""
    if raw.get("mode") == "Off":
        return None
    fields = {"steps": "stepFactor", "seconds": "minSeconds", "first_step": "firstStepSeconds"}
    given = {field: float(raw[name]) for field, name in fields.items() if raw.get(name) is not None}
    return replace(DEFAULT_HANG, **given)


def read_health_check(raw: Mapping[str, Any]) -> HealthCheck:
    command = tuple(str(word) for word in raw["command"])
    return HealthCheck(command, float(raw.get("timeoutSeconds") or _CHECK_SECONDS))


@dataclass(frozen=True)
class Attach:
    """The workload of another controller in `spec.attach`: its pods are the job's workers."""

    api_version: Annotated[str, At("owner.apiVersion")]
    kind: Annotated[str, At("owner.kind")]
    name: Annotated[str, At("owner.name")]
    uid: Annotated[str, At("owner.uid")]
    container: str


def _read_remote(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not (raw.get("s3") or raw.get("directory")):
        return None
    return {**raw, "everySteps": int(raw.get("everySteps") or REMOTE_EVERY)}


def _read_restore_step(raw: Any) -> int | None:
    return int(raw["step"]) if isinstance(raw, Mapping) and raw.get("step") is not None else None


def _read_interrupt(raw: Mapping[str, Any]) -> float:
    return 0.0 if raw.get("inProcess") == "Never" else float(raw.get("interruptSeconds", 5))


def _read_eviction_hold(raw: Mapping[str, Any]) -> float | None:
    given = raw.get("holdSeconds")
    return None if raw.get("mode") == "Off" else JobSpec.eviction_hold if given is None else float(given)


def _read_resources(raw: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns requests and limits as text; YAML has whole cores as numbers. Raises ValueError."""
    given = {kind: raw[kind] for kind in ("requests", "limits") if raw.get(kind)}
    for text in (text for quantities in given.values() for text in quantities.values()):
        parse_quantity(text)
    return {
        kind: {name: str(text) for name, text in quantities.items()} for kind, quantities in given.items()
    }


_Bytes = Annotated[int, As(parse_quantity)]
_PARITY = As(lambda raw: (int(raw["data"]), int(raw["parity"])))
_REHEARSALS = As(lambda text: None if text in ("Off", "0") else parse_duration(text))


@dataclass(frozen=True)
class JobSpec:
    """The part of `spec` that decisions use; crds/tiercheckjobs.yaml describes each field at its path.

    None: not given, or switched off."""

    workers: int
    """The number that the user requests; `Observation.size` is the number in use."""
    procs_per_worker: int = 1
    suspend: bool = False
    managed_by: str = names.CONTROLLER
    template: Mapping[str, Any] = field(default_factory=dict)
    topology_preset: Annotated[str | None, At("topology.preset")] = None
    topology_levels: Annotated[tuple[Mapping[str, str], ...] | None, At("topology.levels")] = None
    """The user's levels, or those of the Kueue Topology once it was found."""
    size_limit: Annotated[str, At("tiers.local.sizeLimit")] = "8Gi"
    copies: Annotated[int, At("tiers.peer.copies")] = 1
    """The number of copies: 0 with parity, and by default for a single worker."""
    spread_level: Annotated[str | None, At("tiers.peer.spread.level")] = None
    spread_required: Annotated[bool, At("tiers.peer.spread.mode"), As(partial(eq, "Required"))] = False
    snapshot_every: Annotated[int | None, At("checkpoint.snapshot.everySteps")] = None
    remote: Annotated[Mapping[str, Any] | None, At("tiers.remote"), As(_read_remote)] = None
    """The remote tier's settings as in the API, with `everySteps`; None: no remote tier."""
    restore_step: Annotated[int | None, At("restore.from"), As(_read_restore_step)] = None
    prove_steps: Annotated[int, At("restore.proveSteps")] = 0
    interrupt_seconds: Annotated[float, At("recovery"), As(_read_interrupt)] = 5.0
    """Seconds in which ranks must leave their step for their processes to stay; 0: all restart."""
    max_restarts: Annotated[int, At("failurePolicy.maxRestarts")] = 10
    ttl_seconds: Annotated[float | None, At("ttlSecondsAfterFinished")] = None
    eviction_hold: Annotated[float | None, At("disruptionBudget"), As(_read_eviction_hold)] = 600.0
    """Seconds that a restore may keep workers from being evicted; None: no PodDisruptionBudget."""
    rules: Annotated[tuple[FailureRule, ...], At("failurePolicy.rules")] = ()
    reset_seconds: Annotated[float, At("failurePolicy.resetAfterSeconds")] = 3600.0
    hang: Annotated[HangLimits | None, At("failurePolicy.hang"), As(read_hang)] = DEFAULT_HANG
    health_check: Annotated[HealthCheck | None, At("failurePolicy.healthCheck"), As(read_health_check)] = None
    active_deadline: Annotated[float | None, At("activeDeadlineSeconds")] = None
    gang: Annotated[str | None, At("gang.scheduler")] = None
    gang_queue: Annotated[str, At("gang.queue")] = ""
    spares: int = 0
    min_workers: Annotated[int | None, At("elastic.minWorkers")] = None
    capacity_timeout: Annotated[float | None, At("failurePolicy.capacityTimeoutSeconds")] = None
    node_memory: Annotated[bool, At("tiers.local.medium"), As(partial(eq, "NodeMemory"))] = False
    sidecar_resources: Annotated[
        Mapping[str, Mapping[str, str]], At("sidecar.resources"), As(_read_resources)
    ] = field(default_factory=dict)
    sidecar_env: Annotated[tuple[Mapping[str, Any], ...], At("sidecar.env"), As(tuple)] = ()
    attach: Attach | None = None
    parity: Annotated[tuple[int, int] | None, At("tiers.peer.parity"), _PARITY] = None
    """(data, parity), in place of copies; None: copies."""
    peer_bandwidth: Annotated[_Bytes | None, At("tiers.peer.bandwidth")] = None
    peer_encrypted: Annotated[bool, At("tiers.peer.encryption"), As(partial(eq, "Required"))] = False
    peer_interfaces: Annotated[tuple[str, ...], At("tiers.peer.interfaces")] = ()
    peer_ucx: Annotated[bool, At("tiers.peer.transport"), As(partial(eq, "UCX"))] = False
    delta: Annotated[DeltaMode, At("checkpoint.delta.mode")] = DeltaMode.AUTO
    sanity_gate: Annotated[bool, At("checkpoint.sanityGate"), As(partial(ne, "Off"))] = True
    verify_all: Annotated[bool, At("checkpoint.verify"), As(partial(eq, "Full"))] = False
    state_size: Annotated[_Bytes | None, At("checkpoint.stateSize")] = None
    kueue_topology: Annotated[str | None, At("topology.kueueTopology")] = None
    topology_problem: Annotated[str, INTERNAL] = ""
    """The reason why the Topology is not used, as a sentence; then the host is the only level."""
    rollback_after: Annotated[int | None, At("failurePolicy.rollbackAfterNonFinite")] = None
    restore_stall: Annotated[float, At("failurePolicy.restoreStallSeconds")] = RESTORE_STALL
    rehearse_every: Annotated[float | None, At("restore.rehearseEvery"), _REHEARSALS] = 600.0
    """Seconds between two proofs that a tier can be restored; None: none are made."""

    @property
    def deltas(self) -> bool:
        """Returns whether the job takes deltas."""
        return self.delta is not DeltaMode.NONE

    @property
    def remote_every(self) -> int | None:
        """Steps between snapshots that also go to the remote tier; None: there is none."""
        return None if self.remote is None else int(self.remote["everySteps"])


def read_spec(raw: Mapping[str, Any]) -> JobSpec:
    """Parses `spec`. Raises KeyError, TypeError or ValueError on what violates the CRD's schema."""
    spec = from_api(JobSpec, raw)
    if spec.parity is not None:
        return replace(spec, copies=0)
    given = ((raw.get("tiers") or {}).get("peer") or {}).get("copies")
    return replace(spec, copies=0) if given is None and spec.workers == 1 else spec


def interfaces_problem(spec: JobSpec) -> str:
    """Returns an error in `tiers.peer.interfaces` that the CRD's schema cannot detect; empty: none."""
    for entry in spec.peer_interfaces:
        if "/" in entry:
            try:
                ipaddress.ip_network(entry, strict=False)
            except ValueError as error:
                return f"spec.tiers.peer.interfaces: {error}"
    return ""


PREFIX = "kueue.x-k8s.io/"
_OF_GROUPS = ("pod-group-", "retriable-in-group", "role-hash")


def queue_entries(given: Mapping[str, object] | None) -> dict[str, str]:
    """Returns the entries for Kueue, without those of pod groups."""
    return {
        key: str(value)
        for key, value in (given or {}).items()
        if key.startswith(PREFIX) and not key.removeprefix(PREFIX).startswith(_OF_GROUPS)
    }
