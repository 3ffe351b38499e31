"""Derives from one observation of a job its members, spares and topology, each only once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tiercheck.protocol.report import Report
from tiercheck_operator.controller.members.membership import (
    Membership,
    SparePool,
    classify_pod,
    find_members,
    find_spares,
    note_places,
)
from tiercheck_operator.controller.members.suspicion import Evidence, collect_evidence, find_suspects
from tiercheck_operator.model import conditions
from tiercheck_operator.model.conditions import Cause
from tiercheck_operator.model.observed import Observation, PodView
from tiercheck_operator.model.status import JobRecord, PlaceRecord, Recovery, parse_time
from tiercheck_operator.planning.topology import Level, Topology, levels_from_spec, spread_level


@dataclass(frozen=True)
class Situation(Observation):
    """An observation with derived properties. Each is computed when it is first used."""

    @classmethod
    def of(cls, obs: Observation) -> Situation:
        """Returns the situation; a job that its owner started again is treated as at its beginning."""
        if obs.job.spec.attach is not None:
            obs = _started_again(obs) or obs
        obs = _without_stale_size(obs)
        return cls(**{field.name: getattr(obs, field.name) for field in fields(obs)})

    @cached_property
    def evidence(self) -> Evidence:
        """Returns what sidecars report about each other, and which of them are silent."""
        return collect_evidence(self)

    @cached_property
    def membership(self) -> Membership:
        """Returns which pods are the job's workers, and which were lost."""
        return find_members(self, find_suspects(self, self.evidence))

    @cached_property
    def members(self) -> Mapping[int, PodView]:
        """Returns the members by worker."""
        return self.membership.members

    @cached_property
    def places(self) -> tuple[PlaceRecord, ...]:
        """Returns the nodes where pods lately did not start or had to be left, this observation included."""
        spares = (classify_pod(self, pod, {}) for pod in self.spare_pool.lost)
        lost = [*self.membership.lost.values(), *filter(None, spares)]
        return note_places(self.job.status.places, lost, self.now, self.patience.place)

    @cached_property
    def spare_pool(self) -> SparePool:
        return find_spares(self)

    @cached_property
    def attempt_reports(self) -> Mapping[int, Report]:
        """Returns the reports of the current attempt, by worker, in their order."""
        known = self.current_reports
        return {worker: known[pod.uid] for worker, pod in sorted(self.members.items()) if pod.uid in known}

    @cached_property
    def newest_step(self) -> int:
        """Returns the newest known step of the current attempt, or of one on the way to it; 0 if none.
        Reports of lost pods count too, because nothing else is known of the last steps."""
        recovery = self.job.status.recovery
        steps = [report.trainer.step or 0 for report in self.all_attempt_reports]
        if recovery is not None:
            steps.append(recovery.reached)
            if recovery.decided_at is not None:
                steps.append(recovery.step + recovery.lost_steps)
        return max([*steps, self.job.status.step or 0])

    @cached_property
    def newest_attempt(self) -> int:
        """Returns the newest attempt that the operator has signed, as far as sidecars report; 0 if none."""
        reports = [known.report for known in self.reports.values() if known.report is not None]
        return max((report.newest_attempt for report in reports), default=0)

    @cached_property
    def resumption(self) -> Recovery | None:
        """Returns the recovery that resumes a suspended job; None if it was not suspended."""
        status = self.job.status
        suspended = self.conditions.get(conditions.SUSPENDED)
        if not is_suspending(status) and not (suspended is not None and suspended.status):
            return None
        if not status.attempt:
            return Recovery(Cause.FIRST_START.value, "the job starts", self.now, self.now)
        return Recovery(Cause.RESUMED.value, "spec.suspend is false again", self.now, self.now)

    @cached_property
    def is_still_ending(self) -> bool:
        """Returns whether there are pods that were directed to finish, whatever spec.suspend is by then.
        They end after their pending uploads. An attempt that began with them would lose them."""
        status = self.job.status
        return (
            is_suspending(status) and bool(status.attempt and self.all_pods) and self.job.spec.attach is None
        )

    @cached_property
    def seconds_to_deadline(self) -> float | None:
        """Returns the seconds left to the deadline, not positive once it has passed; None: no deadline."""
        limit, started = self.job.spec.active_deadline, parse_time(self.job.status.started)
        if limit is None or started is None or self.resumption is not None:
            return limit
        return started + limit - self.now

    @cached_property
    def may_resize(self) -> bool:
        """Returns whether the job may have fewer workers than its spec asks for, or had."""
        known = conditions.FULL_SIZE in self.conditions or self.job.status.size is not None
        return known or self.job.spec.min_workers is not None

    @cached_property
    def has_spares(self) -> bool:
        """Returns whether there are spares, or pods that are used as spares, or should be."""
        return bool(self.wanted_spares or self.spares or self.membership.beyond)

    @cached_property
    def all_in_place(self) -> bool:
        """Returns whether each worker has one pod, with a node where it may stay, and there are no others."""
        housed = sum(pod.node is not None for pod in self.members.values())
        return housed == self.size == len(self.pods) and not self.membership.departures

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Returns the failure domain levels, widest first. Raises ValueError if spec.topology is invalid."""
        return levels_from_spec(self.job.spec.topology_preset, self.job.spec.topology_levels)

    @cached_property
    def spread(self) -> Level:
        """Returns the level at which copies must not share a domain. Raises ValueError as `levels` does."""
        return spread_level(self.levels, self.job.spec.spread_level)

    @cached_property
    def topology(self) -> Topology:
        """Returns the topology of all nodes. Raises ValueError as `levels` does."""
        return Topology.build({name: node.labels for name, node in self.nodes.items()}, self.levels)

    @cached_property
    def member_topology(self) -> Topology:
        """Returns the topology of the members' nodes, without levels that none has. Raises ValueError."""
        names = {pod.node or "" for pod in self.members.values()}
        labels = {name: self.nodes[name].labels if name in self.nodes else {} for name in names}
        return Topology.build(labels, self.levels)


def is_suspending(status: JobRecord) -> bool:
    """Returns whether pods were directed to finish because of spec.suspend."""
    return status.recovery is not None and Cause.parse(status.recovery.cause) is Cause.SUSPENDING


def _without_stale_size(obs: Observation) -> Observation:
    """Drops a size that the spec does not allow: the spec was changed while the job was suspended."""
    size = obs.job.status.size
    if size is None or 0 < size.workers < obs.job.spec.workers:
        return obs
    return replace(obs, job=replace(obs.job, status=replace(obs.job.status, size=None)))


def _started_again(obs: Observation) -> Observation | None:
    """Returns a failed attached job as at its beginning if its owner made new pods; None: not so.
    Attempts and history go on; only the crash budget begins anew, because it was the owner's policy to try
    again."""
    status = obs.job.status
    if not status.holds(conditions.FAILED):
        return None
    if not obs.living or any(pod.uid in obs.attempt_pods for pod in obs.living):
        return None
    kept = tuple(entry for entry in status.conditions if entry.type != conditions.FAILED)
    fresh = replace(status, conditions=kept, completed=None, crashes=0, recovery=None)
    return replace(obs, job=replace(obs.job, status=fresh))
