"""What the user wants: `spec` as decisions use it, each field with its place in the API.

A job's own labels and annotations for Kueue are handed on to each pod, spares and replacements included: each
pod is a workload of its own there. Kueue's pod groups are not used. They remove pods beyond the group's
count, such as a spare or the replacement of a pod that is about to leave. They refuse pods that differ, such
as one that avoids a node.
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
from tiercheck.protocol.directive import RESTORE_STALL, DeltaMode, HealthCheck
from tiercheck_operator.model.spelling import OURS, As, At, parse_duration, parse_quantity, read_as


class RuleAction(str, Enum):
    """What a failure leads to."""

    RESTART = "Restart"
    """A restart that counts against maxRestarts."""
    RESTART_IGNORING_LIMIT = "RestartIgnoringLimit"
    """A restart that does not."""
    FAIL = "Fail"
    """The job is given up."""


@dataclass(frozen=True)
class ExitCodes:
    """`values` of exit codes other than 0, or, with `within` false, all but these."""

    values: frozenset[int]
    within: Annotated[bool, At("operator"), As(partial(eq, "In"))] = True

    def match(self, code: int | None) -> bool:
        return bool(code) and (code in self.values) is self.within


_CONDITIONS = As(lambda raw: tuple((str(each["type"]), str(each.get("status") or "True")) for each in raw))


@dataclass(frozen=True)
class FailureRule:
    """One of `failurePolicy.rules`. One of its three matchers is set, as in a Job's podFailurePolicy."""

    name: str
    action: RuleAction
    exit_codes: Annotated[ExitCodes | None, At("onExitCodes")] = None
    reasons: Annotated[frozenset[str], At("onReasons")] = frozenset()
    node_conditions: Annotated[tuple[tuple[str, str], ...], At("onNodeConditions"), _CONDITIONS] = ()
    """(type, status) pairs, any of which is enough."""


@dataclass(frozen=True)
class HangSpec:
    """`failurePolicy.hang`. The job counts as hung if a rank makes no step for `factor` times as long as a
    step usually takes, and for `least` seconds at least."""

    factor: Annotated[float, At("stepFactor")] = 20.0
    least: Annotated[float, At("minSeconds")] = 1800.0
    first_step: Annotated[float | None, At("firstStepSeconds")] = None
    """Seconds that the first step of an attempt may take; None: an hour if the attempt began from a version
    (so that its script is known to make steps), else any time."""


DEFAULT_HANG = HangSpec()
_CHECK_SECONDS = 60.0
REMOTE_EVERY = 500
"""Steps between snapshots that also go to the remote tier, unless the job says otherwise."""


def read_hang(raw: Mapping[str, Any]) -> HangSpec | None:
    """None: hangs are not looked for."""
    return None if raw.get("mode") == "Off" else read_as(HangSpec, raw)


def read_health_check(raw: Mapping[str, Any]) -> HealthCheck:
    command = tuple(str(word) for word in raw["command"])
    return HealthCheck(command, float(raw.get("timeoutSeconds") or _CHECK_SECONDS))


@dataclass(frozen=True)
class Attach:
    """`spec.attach`: another controller's workload, whose pods are the job's workers."""

    api_version: Annotated[str, At("owner.apiVersion")]
    kind: Annotated[str, At("owner.kind")]
    name: Annotated[str, At("owner.name")]
    uid: Annotated[str, At("owner.uid")]
    container: str
    """The one that runs the training command."""


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
    """YAML gives whole cores as numbers. Raises ValueError."""
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
    """The part of `spec` that decisions use."""

    workers: int
    """That the user asks for; `Observation.size` is how many the job goes on with."""
    procs_per_worker: int = 1
    suspend: bool = False
    managed_by: str = names.CONTROLLER
    template: Mapping[str, Any] = field(default_factory=dict)
    topology_preset: Annotated[str | None, At("topology.preset")] = None
    topology_levels: Annotated[tuple[Mapping[str, str], ...] | None, At("topology.levels")] = None
    """The user's own, or those of the Kueue Topology once it was found."""
    size_limit: Annotated[str, At("tiers.local.sizeLimit")] = "8Gi"
    copies: Annotated[int, At("tiers.peer.copies")] = 1
    """0 with parity, and by default for a single worker."""
    spread_level: Annotated[str | None, At("tiers.peer.spread.level")] = None
    spread_required: Annotated[bool, At("tiers.peer.spread.mode"), As(partial(eq, "Required"))] = False
    snapshot_every: Annotated[int | None, At("checkpoint.snapshot.everySteps")] = None
    """None: chosen from the sizes."""
    remote: Annotated[Mapping[str, Any] | None, At("tiers.remote"), As(_read_remote)] = None
    """As it is, with `everySteps`; None: no remote tier."""
    restore_step: Annotated[int | None, At("restore.from"), As(_read_restore_step)] = None
    """None: the latest."""
    prove_steps: Annotated[int, At("restore.proveSteps")] = 0
    """Steps that a restore gives up where it would leave none to train again and compare."""
    interrupt_seconds: Annotated[float, At("recovery"), As(_read_interrupt)] = 5.0
    """How long ranks may take to leave their step, so that their processes stay; 0: all are started anew."""
    max_restarts: Annotated[int, At("failurePolicy.maxRestarts")] = 10
    """Of those that count."""
    ttl_seconds: Annotated[float | None, At("ttlSecondsAfterFinished")] = None
    eviction_hold: Annotated[float | None, At("disruptionBudget"), As(_read_eviction_hold)] = 600.0
    """Seconds that a restore may keep workers from being evicted; None: no PodDisruptionBudget."""
    rules: Annotated[tuple[FailureRule, ...], At("failurePolicy.rules")] = ()
    reset_seconds: Annotated[float, At("failurePolicy.resetAfterSeconds")] = 3600.0
    """Of training beyond the last crash after which restarts are counted anew."""
    hang: Annotated[HangSpec | None, At("failurePolicy.hang"), As(read_hang)] = DEFAULT_HANG
    """None: hangs are not looked for."""
    health_check: Annotated[HealthCheck | None, At("failurePolicy.healthCheck"), As(read_health_check)] = None
    """None: every place is good enough."""
    active_deadline: Annotated[float | None, At("activeDeadlineSeconds")] = None
    """Seconds that the job may be active; None: as long as it takes."""
    gang: Annotated[str | None, At("gang.scheduler")] = None
    """None: pods are placed one by one."""
    gang_queue: Annotated[str, At("gang.queue")] = ""
    spares: int = 0
    """Warm pods beside the workers' own."""
    min_workers: Annotated[int | None, At("elastic.minWorkers")] = None
    """None: the job never goes on smaller."""
    capacity_timeout: Annotated[float | None, At("failurePolicy.capacityTimeoutSeconds")] = None
    """Seconds; None: the operator's default."""
    node_memory: Annotated[bool, At("tiers.local.medium"), As(partial(eq, "NodeMemory"))] = False
    sidecar_resources: Annotated[
        Mapping[str, Mapping[str, str]], At("sidecar.resources"), As(_read_resources)
    ] = field(default_factory=dict)
    """Requests and limits that the user gives the sidecar."""
    sidecar_env: Annotated[tuple[Mapping[str, Any], ...], At("sidecar.env"), As(tuple)] = ()
    """Variables of the sidecar, as a container has them."""
    attach: Attach | None = None
    """None: the pods are made from the template."""
    parity: Annotated[tuple[int, int] | None, At("tiers.peer.parity"), _PARITY] = None
    """(data, parity), in place of copies; None: copies."""
    peer_bandwidth: Annotated[_Bytes | None, At("tiers.peer.bandwidth")] = None
    peer_encrypted: Annotated[bool, At("tiers.peer.encryption"), As(partial(eq, "Required"))] = False
    peer_interfaces: Annotated[tuple[str, ...], At("tiers.peer.interfaces")] = ()
    """Names or CIDRs, beside the pod's address."""
    peer_ucx: Annotated[bool, At("tiers.peer.transport"), As(partial(eq, "UCX"))] = False
    delta: Annotated[DeltaMode, At("checkpoint.delta.mode")] = DeltaMode.AUTO
    sanity_gate: Annotated[bool, At("checkpoint.sanityGate"), As(partial(ne, "Off"))] = True
    verify_all: Annotated[bool, At("checkpoint.verify"), As(partial(eq, "Full"))] = False
    state_size: Annotated[_Bytes | None, At("checkpoint.stateSize")] = None
    """Bytes of one rank's snapshot, as far as the user knows before the job starts."""
    kueue_topology: Annotated[str | None, At("topology.kueueTopology")] = None
    """Name of a Kueue Topology that the levels are to be taken from."""
    topology_problem: Annotated[str, OURS] = ""
    """Why they are not, as a sentence; then the host is the only level."""
    rollback_after: Annotated[int | None, At("failurePolicy.rollbackAfterNonFinite")] = None
    """Steps in a row that the sanity gate may refuse before the job goes back; None: it never does."""
    restore_stall: Annotated[float, At("failurePolicy.restoreStallSeconds")] = RESTORE_STALL
    """Seconds without a byte after which a source of a restore is given up."""
    rehearse_every: Annotated[float | None, At("restore.rehearseEvery"), _REHEARSALS] = 600.0
    """Seconds between two proofs that a tier would come back; None: none are made."""

    @property
    def deltas(self) -> bool:
        """Whether they are wanted."""
        return self.delta is not DeltaMode.NONE

    @property
    def remote_every(self) -> int | None:
        """Steps between snapshots that also go to the remote tier; None: there is none."""
        return None if self.remote is None else int(self.remote["everySteps"])


def read_spec(raw: Mapping[str, Any]) -> JobSpec:
    """Of what passed the CRD's schema. Raises KeyError, TypeError or ValueError on what did not."""
    spec = read_as(JobSpec, raw)
    if spec.parity is not None:
        return replace(spec, copies=0)
    given = ((raw.get("tiers") or {}).get("peer") or {}).get("copies")
    return replace(spec, copies=0) if given is None and spec.workers == 1 else spec


def interfaces_problem(spec: JobSpec) -> str:
    """Of `tiers.peer.interfaces`, what the CRD's schema cannot see; empty if nothing is wrong."""
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
    """Those of Kueue, without what makes a pod group."""
    return {
        key: str(value)
        for key, value in (given or {}).items()
        if key.startswith(PREFIX) and not key.removeprefix(PREFIX).startswith(_OF_GROUPS)
    }
