"""Plants bugs that would cost somebody a training run; the simulation has to find each.

Each is a patch of the code under test, named after what it takes away. `focus` narrows schedules to jobs
where the bug can show, so that it is found soon; nothing else about the schedules differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.simulation.plan import FIRST_OF_ALL_FAULTS, FIRST_STAYING, Plan
from tiercheck.clocks import SteadyClock
from tiercheck.launcher.app import Launcher
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.version import Chain, History, Kind, Version
from tiercheck.trainer.inprocess.listener import OrderListener
from tiercheck_operator.controller import decide
from tiercheck_operator.controller.attempt import directives
from tiercheck_operator.controller.failures import trigger
from tiercheck_operator.controller.members import membership
from tiercheck_operator.controller.observe import inventories, situation
from tiercheck_operator.controller.status import status
from tiercheck_operator.model import parsing
from tiercheck_operator.planning.recovery import recovery
from tiercheck_sidecar.exchange import session as exchange_session
from tiercheck_sidecar.exchange.frames import PeerResponse
from tiercheck_sidecar.exchange.session import Session
from tiercheck_sidecar.model.state import ReleaseHandshake, SidecarState
from tiercheck_sidecar.model.trainer_watch import TrainerWatch
from tiercheck_sidecar.remote import keys
from tiercheck_sidecar.remote import store as remote_store
from tiercheck_sidecar.replicate import lane, replicate
from tiercheck_sidecar.restore import restore, restore_plan
from tiercheck_sidecar.trainer import session
from tiercheck_sidecar.vault import Vault
from tiercheck_sidecar.vault.stock import MemoryStock
from tiercheck_sidecar.versions import coordinator, reclaim, report_updates, watermark

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutation:
    name: str
    breaks: str
    """What it does, in a clause."""
    patches: Callable[[], list[Patch]]
    focus: Callable[[Plan], bool] = lambda _: True
    first: int = 0
    """No seed before this one shows it."""

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for where, name, what in self.patches():
                stack.enter_context(mock.patch.object(where, name, what))
            yield


def _copies(plan: Plan) -> bool:
    return plan.spec.copies > 0


def _remote(plan: Plan) -> bool:
    return plan.spec.remote is not None


def _attached(plan: Plan) -> bool:
    return plan.spec.attach is not None


def _struck(*names: str) -> Callable[[Plan], bool]:
    return lambda plan: any(fault.name in names for fault in plan.faults)


def _soon(first: tuple[str, ...], then: tuple[str, ...], within: float) -> Callable[[Plan], bool]:
    """One of `first`, and within so many seconds one of `then`: what is struck is freed a few steps later."""
    return lambda plan: any(
        0 < other.at - one.at <= within
        for one in plan.faults
        for other in plan.faults
        if one.name in first and other.name in then
    )


def _newest(plan: Plan) -> bool:
    return plan.seed >= FIRST_OF_ALL_FAULTS


def _both(*conditions: Callable[[Plan], bool]) -> Callable[[Plan], bool]:
    return lambda plan: all(condition(plan) for condition in conditions)


def _minimum_of_newest() -> list[Patch]:
    def least(many: Any) -> Any:
        runs = [each for each in many if each]
        newest = [each[-1] for each in runs]
        last = min(newest, key=lambda span: span.last, default=None)
        return () if last is None else (last,)

    return [(watermark, "intersect", least)]


def _reclaim_one_too_many() -> list[Patch]:
    real = reclaim.freeable

    def greedy(place: Any, history: History, verdict: Any, owed: Any = None) -> Any:
        gone = real(place, history, verdict, owed)
        left = sorted(each for each in place.snapshots if (Kind.SNAPSHOT, each) not in gone)
        return gone | {(Kind.SNAPSHOT, left[0])} if len(left) == 1 and verdict is not None else gone

    return [(reclaim, "freeable", greedy)]


def _reclaim_at_the_mark_of_one_tier() -> list[Patch]:
    real = watermark._verdict

    def careless(history: Any, standing: Any, shapes: Any, prove_steps: int) -> Any:
        return dataclasses.replace(real(history, standing, shapes, prove_steps), floor=standing.local)

    return [(watermark, "_verdict", careless)]


def _acknowledge_before_verification() -> list[Patch]:
    def commit(self: Session, ask: Any) -> PeerResponse:
        return PeerResponse("ok")

    return [(Session, "_commit", commit)]


def _restore_what_is_at_hand() -> list[Patch]:
    real = restore.plan

    def newest(own: Any, history: History) -> Version | None:
        found = (each.version for each in own if each.kind is Kind.SNAPSHOT and history.accepts(each.version))
        return max(found, default=None)

    def near_enough(
        rank: int, version: Version, history: History, own: Any, places: Any, *, base: Version | None = None
    ) -> Any:
        at_hand = newest(own, history)
        return (
            real(rank, version, history, own, places, base=base)
            if at_hand is None
            else restore_plan.RestorePlan(Chain(at_hand), ())
        )

    def chain(own: MemoryStock, directive: Any) -> Chain | None:
        at_hand = max(filter(directive.history.accepts, own.snapshots), default=None)
        return None if at_hand is None else Chain(at_hand)

    return [(restore, "plan", near_enough), (session, "restored_chain", chain)]


def _restore_the_oldest() -> list[Patch]:
    real = recovery._expected_loss
    return [(recovery, "_expected_loss", lambda *args: -real(*args))]


def _forget_copies() -> list[Patch]:
    real = inventories.build_inventories

    def own_only(reports: Any) -> Any:
        return [dataclasses.replace(each, hosted={}) for each in real(reports)]

    return [(inventories, "build_inventories", own_only)]


def _attempt_goes_back() -> list[Patch]:
    real = History.after

    def forgetful(self: History, number: int, base: int, ranks: int = 0) -> History:
        return real(self, number, max(0, base - 1), ranks)

    return [(History, "after", forgetful)]


def _manifest_before_artifacts() -> list[Patch]:
    def early(self: remote_store.RemoteStore, manifest: Any) -> bool:
        from tiercheck.protocol.encoding import to_json

        return self._objects.create(keys.manifest_key(manifest.version), to_json(manifest))

    def eager(self: coordinator.Coordinator) -> Any:
        verdict, directive = self._verdict, self._state.directive
        if verdict is None or directive is None or verdict.upload is None or verdict.upload in self._stored:
            return None
        mine = {rank: each for rank, each in self._artifacts.items() if each.version == verdict.upload}
        if not mine:
            return None
        from tiercheck.protocol.version import Manifest

        return Manifest(
            self._state.config.job,
            directive.job_uid,
            verdict.upload,
            directive.workers,
            tuple(mine.values()),
            0.0,
        )

    return [(remote_store.RemoteStore, "commit", early), (coordinator.Coordinator, "manifest", eager)]


def _retention_keeps_too_few() -> list[Patch]:
    real = keys.to_delete
    return [(keys, "to_delete", lambda committed, keep, *more: real(committed, keep - 1, *more))]


def _objects_before_their_manifest() -> list[Patch]:
    real = remote_store.RemoteStore._delete_artifacts

    def retain(
        self: Any, keep: int, protect: Any = frozenset(), seconds: Any = None, history: Any = None
    ) -> Any:
        committed = self._committed()
        for version in keys.to_delete(committed, keep, protect, seconds, history):
            real(self, version)
        return self.versions()

    return [(remote_store.RemoteStore, "retain", retain)]


def _silent_means_dead() -> list[Patch]:
    real = situation.find_suspects

    def hasty(obs: Any, heard: Any) -> Any:
        from tiercheck_operator.controller.members.suspicion import SuspectedPod
        from tiercheck_operator.model.conditions import Cause

        found = dict(real(obs, heard))
        for pod in obs.pods:
            known = obs.reports.get(pod.uid)
            if known is not None and known.silent_since is not None and known.answered_at is not None:
                found.setdefault(pod.uid, SuspectedPod(Cause.SIDECAR_SILENT, "it is silent", obs.now, False))
        return found

    return [(situation, "find_suspects", hasty)]


def _restart_for_nothing() -> list[Patch]:
    real = trigger.find_trigger

    def nervous(obs: Any) -> Any:
        found = real(obs)
        step = obs.job.status.step or 0
        if found is None and step and step % 17 == 0:
            from tiercheck_operator.model.conditions import Cause

            return trigger.Trigger(
                Cause.TRAINER_FAILED if hasattr(Cause, "TRAINER_FAILED") else Cause.HUNG, "no reason", obs.now
            )
        return found

    return [(trigger, "find_trigger", nervous)]


def _holes_in_chains() -> list[Patch]:
    def leap(version: Version, snapshots: Any, deltas: Any, history: History) -> Chain | None:
        bases = [each for each in snapshots if each <= version and history.accepts(each)]
        if not bases:
            return None
        base = max(bases)
        return Chain(
            base, tuple(each for each in sorted(deltas) if base < each <= version and history.accepts(each))
        )

    def everything(snapshots: Any, deltas: Any, history: History) -> frozenset[Version]:
        bases = [each for each in snapshots if history.accepts(each)]
        return frozenset(bases) | {
            each for each in deltas if bases and each > min(bases) and history.accepts(each)
        }

    from tiercheck_sidecar.vault import stock

    return [
        (session, "chain_to", leap), (stock, "rebuildable", everything),
        (reclaim, "rebuildable", everything),
        (reclaim, "chain_to", leap),
    ]  # fmt: skip


def _holders_of_before() -> list[Patch]:
    def as_it_was(self: Any, directive: Any) -> Any:
        return [(holder.worker, artifacts) for holder, artifacts in self._has.items()]

    return [(replicate.Replicator, "acknowledged", as_it_was)]


def _peer_mark_of_other_holders() -> list[Patch]:
    real = coordinator.Coordinator._enter

    def enter(self: Any, directive: Any) -> None:
        same, before = directive.attempt == self._attempt, self._watermarks
        real(self, directive)
        if same:
            self._watermarks = before

    return [(coordinator.Coordinator, "_enter", enter)]


def _verdicts_of_other_placements() -> list[Patch]:
    real = SidecarState.follow

    def follow(self: Any, verdict: Any) -> None:
        here = self.directive.placement if self.directive is not None else ""
        real(self, dataclasses.replace(verdict, placement=here))

    return [(SidecarState, "follow", follow)]


def _anybodys_copies() -> list[Patch]:
    real = exchange_session.refuse_offer

    def welcome(fence: Any, directive: Any, claim: Any, ask: Any) -> Any:
        if directive is not None:
            claim = dataclasses.replace(claim, worker=ask.rank // directive.procs_per_worker)
        return real(fence, directive, claim, ask)

    return [(exchange_session, "refuse_offer", welcome)]


def _credentials_issued_anew() -> list[Patch]:
    left = tuple(step for step in decide.STEPS if step is not decide.wait_for_lost_credentials)
    return [(decide, "STEPS", left)]


def _owners_pods_as_ours() -> list[Patch]:
    real = membership._never_up

    def hasty(obs: Any, living: Any, lost: Any) -> Any:
        spec = dataclasses.replace(obs.job.spec, attach=None)
        return real(dataclasses.replace(obs, job=dataclasses.replace(obs.job, spec=spec)), living, lost)

    return [(membership, "_never_up", hasty)]


def _copies_given_up_count() -> list[Patch]:
    real = report_updates.ReportInterner.updated

    def updated(self: Any, base: Any, news: Any) -> Any:
        return real(self, base, dataclasses.replace(news, copies=news.copies or None))

    return [(report_updates.ReportInterner, "updated", updated)]


def _doubled_orders_interrupt() -> list[Patch]:
    def follow(self: Any, order: Any) -> None:
        self._order = order
        self._interrupt()

    return [(OrderListener, "_follow", follow)]


def _late_leavers_stay() -> list[Patch]:
    real = Launcher._may
    return [(Launcher, "_may", lambda self, local, _: real(self, local, "listens"))]


def _left_for_any_attempt() -> list[Patch]:
    def left(self: Any, ranks: Any, attempt: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.listeners(ranks) if self._listeners[rank].left)

    return [(TrainerWatch, "left", left)]


_LOSSES = _struck("vanish", "evict", "node", "rack", "delete")
MUTATIONS = (
    Mutation("no fence", "directives of older attempts and earlier phases are followed",
        lambda: [(SidecarState, "_check", lambda self, directive: None)],
        lambda plan: plan.echo > 0),
    Mutation("minimum of newest", "watermarks are the least of each rank's newest", _minimum_of_newest),
    Mutation("falling watermark", "a watermark is what was found last",
        lambda: [(watermark, "_later", lambda one, other: other)]),
    Mutation("one too many", "reclaim frees the last snapshot too", _reclaim_one_too_many),
    Mutation("one tier's mark", "reclaim goes by the local watermark alone", _reclaim_at_the_mark_of_one_tier,
        _copies),
    Mutation("never free", "nothing is reclaimed", lambda: [(reclaim, "freeable", lambda *_: frozenset())]),
    Mutation("early acknowledgement", "a holder acknowledges what it has not kept",
        _acknowledge_before_verification, _copies),
    Mutation("unverified restore", "own memory is loaded without a look at digests",
        lambda: [(restore.RankRestorer, "_verify", lambda self, artifact: self._sound.add(artifact))],
        _soon(("flip", "rot"), ("crash",), 2.5)),
    Mutation("uncommitted restore", "a rank restores what it has at hand, not the version of the attempt",
        _restore_what_is_at_hand, _struck("crash")),
    Mutation("oldest version", "the version with the greatest loss is taken", _restore_the_oldest),
    Mutation("copies forgotten", "holders' copies are no sources", _forget_copies, _both(_copies, _LOSSES)),
    Mutation("no barrier", "trainers are released before all have restored",
        lambda: [(decide, "wanted_phase", lambda _: Phase.RELEASE),
            (directives, "wanted_phase", lambda _: Phase.RELEASE)], _LOSSES),
    Mutation("cut one step early", "a new attempt's branch begins one step before its version",
        _attempt_goes_back),
    Mutation("early manifest", "a manifest is written before all artifacts are there",
        _manifest_before_artifacts, _remote),
    Mutation("newest deleted", "retention deletes the newest",
        lambda: [(keys, "to_delete", lambda committed, keep, *_: tuple(sorted(committed)[keep:]))],
        _remote),
    Mutation("one too few", "retention keeps one version less", _retention_keeps_too_few, _remote),
    Mutation("orphans", "artifacts of versions that are on their way pass for abandoned",
        lambda: [(keys, "is_abandoned", lambda version, kept, protect, history=None: bool(kept))],
        _remote),
    Mutation("objects first", "retention deletes artifacts and leaves their manifest",
        _objects_before_their_manifest, _remote),
    Mutation("silence is death", "a silent sidecar's pod is given up at once", _silent_means_dead,
        _struck("deaf", "sidecar", "hang")),
    Mutation("nervous", "a new attempt begins without a reason", _restart_for_nothing),
    Mutation("always protected", "Protected is true whatever happens",
        lambda: [(status, "_trouble", lambda *_: None)],
        _both(_copies, _struck("full", "cut"))),
    Mutation("one try", "what failed once is not tried again",
        lambda: [(lane.Backoff, "ready", lambda self, key, now: key not in self._failures)], _copies),
    Mutation("holes in chains", "a missing delta is skipped", _holes_in_chains,
        lambda plan: plan.spec.delta.value != "None"),
    Mutation("holders of before", "what counts is what replication knows, not what the directive says",
        _holders_of_before, _both(_copies, _struck("sidecar"))),
    Mutation("labels believed", "whoever has a job's labels is its pod",
        lambda: [(parsing, "_allowed_job_uids", lambda maker, labels: {labels.get(names.LABEL_JOB_UID)})],
        _both(_struck("neighbour"), _newest)),
    Mutation("mark of other holders", "the peer watermark survives a change of holders",
        _peer_mark_of_other_holders, _struck("swap")),
    Mutation("verdict of other holders", "a verdict of another placement is followed",
        _verdicts_of_other_placements, _struck("swap")),
    Mutation("anybody's copies", "any worker may offer any rank", _anybodys_copies, _struck("forge")),
    Mutation("wall clock", "silence is measured by a clock that steps",
        lambda: [(SteadyClock, "__call__", lambda self: self._wall())], _struck("jump")),
    Mutation("owner's pods as ours", "a new pod of another controller's goes where one fell silent",
        _owners_pods_as_ours, _both(_attached, _struck("cut", "deaf", "node"))),
    Mutation("credentials anew", "a lost Secret is issued anew under running sidecars",
        _credentials_issued_anew, _struck("secret")),
    Mutation("rotten upload", "a snapshot that rotted is tried to be uploaded for ever",
        lambda: [(Vault, "evict_if_bad", lambda *_, **__: "")],
        _both(_remote, _struck("rot"), lambda plan: plan.spec.copies == 0)),
    Mutation("copies given up", "copies that a holder gave up still count", _copies_given_up_count,
        _struck("wipe")),
    Mutation("freed too early", "own snapshots are freed before the coordinator leaves them out",
        lambda: [(ReleaseHandshake, "propose", lambda self, doomed: doomed)]),
    Mutation("doubled orders", "every order interrupts, also one that is known", _doubled_orders_interrupt,
        first=FIRST_STAYING),
    Mutation("late leavers", "a process that does not leave its step in time stays", _late_leavers_stay,
        first=FIRST_STAYING),
    Mutation("left before", "who left the step of an earlier attempt counts as having left this one",
        _left_for_any_attempt, first=FIRST_STAYING),
)  # fmt: skip
