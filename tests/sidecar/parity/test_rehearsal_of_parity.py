"""With parity, a rehearsal puts together what a lost worker would be given, and keeps nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.sidecar.parity.group import Group, flip
from tests.sidecar.rehearsal.test_rehearsal import NoRemote
from tiercheck.protocol.directive import Policy, Tier
from tiercheck.protocol.report import Watermarks
from tiercheck.protocol.version import Artifact, Version
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.rehearsal.rehearser import Rehearser
from tiercheck_sidecar.restore.sources import RestoreSources

MakeJob = Callable[..., Group]
V = Version(10, 1)


def rehearsed(job: Group) -> SidecarState:
    """Worker 0, once it has looked at all tiers."""
    me = job.stations[0]
    me.accept(replace(job.directive(0), policy=Policy(1, 1_000_000, 5, rehearse_every=600.0)))
    with me.state.lock:
        me.state.verdict = TierVerdict(1, Watermarks(local=V, peer=V))
    reach = RestoreSources(me.state, me.vault, me.identity, 8471, NoRemote())
    Rehearser(me.state, me.vault, reach, wait=lambda until, seconds: until()).look()
    return me.state


def test_what_parity_would_give_back_is_proved(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1)
    job.protect(V, 50_000)
    used = [station.vault.used() for station in job.stations]
    state = rehearsed(job)
    assert {proof.tier: proof.version for proof in state.proofs} == {Tier.LOCAL: V, Tier.PEER: V}
    assert not state.problems
    assert [station.vault.used() for station in job.stations] == used


def test_member_without_whom_it_could_not_be_put_together_is_named_and_keeps_what_it_has(
    make_job: MakeJob,
) -> None:
    job = make_job(data=2, parity=1)
    job.protect(V, 50_000)
    with job.stations[1].vault.pin(Artifact(1, V)) as slot:
        flip(slot.path, 30_000)
    state = rehearsed(job)
    (problem,) = state.problems
    assert (
        f"the {Artifact(0, V)}, would not come back from parity: what worker 1 gives for it is bad"
        in problem.message
    )
    assert [proof.tier for proof in state.proofs] == [Tier.LOCAL]
    assert job.stations[1].vault.find(Artifact(1, V), Tier.LOCAL) is not None
    assert not job.stations[1].state.quarantined
