"""Runs one life of a sidecar's process in one thread, with the real state, vault and rules.

A loop of the sidecar runs turn by turn: it is called as it is, and where it would wait for news it is left
again (`OneTurn`). What blocks in reality (a call to the store, a transfer, a fetch) lets simulated time pass
instead, in which everybody else goes on, and this process may be killed. Modelled are the wires: a call
reaches its end or does not, a chunk comes damaged or not, and what a holder is offered goes through its real
`Session` and `Inbox`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.staying import REPLACED, app
from tests.simulation.store import Folder, in_place
from tiercheck.protocol.directive import Directive, Peer, Source, Tier
from tiercheck.protocol.report import ConnectionFailure, Quarantined, Report
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar import offload
from tiercheck_sidecar.artifact_source import ArtifactSink, BoundedCall, FetchFailed, FilledSlot, SourceFailed
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.decoding import decode, encode
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.exchange import session as exchange_session
from tiercheck_sidecar.exchange.frames import (
    ListedArtifact,
    PeerRequest,
    PeerResponse,
    PeerSilent,
    WireBroken,
)
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.exchange.session import Inbox, Session
from tiercheck_sidecar.exchange.streams import TooDamaged
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import DirectiveRefused, SidecarState
from tiercheck_sidecar.model.tier_verdict import TierVerdict
from tiercheck_sidecar.model.watches import neighbours
from tiercheck_sidecar.offload import JobStore, RemoteListing, RemoteSource, Uploader
from tiercheck_sidecar.remote import preflight
from tiercheck_sidecar.remote import store as remote_store
from tiercheck_sidecar.replicate import lane, replicate
from tiercheck_sidecar.replicate.lane import PushRefused
from tiercheck_sidecar.replicate.replicate import Replicator
from tiercheck_sidecar.restore import restore
from tiercheck_sidecar.restore.restore import Restorer
from tiercheck_sidecar.restore.restore_plan import SourceOffer
from tiercheck_sidecar.trainer.pod_socket import TrainerSocket
from tiercheck_sidecar.vault import NotHeld, Seal, Vault
from tiercheck_sidecar.vault.slots import Slot
from tiercheck_sidecar.versions import coordinator, tiers
from tiercheck_sidecar.versions.coordinator import Caller, Coordinator
from tiercheck_sidecar.versions.reclaim import Reclaimer
from tiercheck_sidecar.versions.report_updates import TierAnswer
from tiercheck_sidecar.versions.tally import WorkerState
from tiercheck_sidecar.versions.tier_line import CallFailed
from tiercheck_sidecar.versions.tiers import TierClient

if TYPE_CHECKING:
    from tests.simulation.whole import Pod, Simulation

JOB_UID, JOB = "job-uid", "ns/j"

_IDLE = 0.9
"""Seconds without a look."""


class OneTurn(BaseException):
    """A loop of the sidecar has nothing to do until something changes."""


class Killed(BaseException):
    """The process was killed while it waited."""


class Inline:
    """An executor that runs everything at once, in this thread."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            value = work(*args)
        except Exception as error:
            return SimpleNamespace(result=lambda error=error: (_ for _ in ()).throw(error))
        return SimpleNamespace(result=lambda: value)

    def map(self, work: Callable[..., Any], *lists: Any) -> Any:
        return [work(*args) for args in zip(*lists, strict=False)]

    def shutdown(self, **_: object) -> None:
        pass


class RecordedVault(Vault):
    """Tells the history what comes into memory and what is given up."""

    process: Process

    def _seal(self, slot: Slot, seal: Seal) -> None:
        super()._seal(slot, seal)
        what = (seal.tier, seal.rank, seal.kind, seal.version)
        self.process.world.record("sealed", pod=self.process.pod.uid, what=what)

    def evict(self, unwanted: Callable[[Seal], bool], by: str = "") -> tuple[Seal, ...]:
        """`by`: what gives it up, if that is not the process itself."""
        freed = super().evict(unwanted)
        if freed:
            what = tuple((seal.tier, seal.rank, seal.kind, seal.version) for seal in freed)
            by = by or ("reclaim" if "reclaim" in self.process._busy else "restore")
            self.process.world.record("freed", pod=self.process.pod.uid, what=what, by=by)
        return freed


class Process:
    """Of one pod. `die` at any moment; what lies in the pod's memory stays."""

    def __init__(self, world: Simulation, pod: Pod, worker: int) -> None:
        self.world, self.pod, self.dead = world, pod, False
        name = f"{pod.uid}.{next(pod.lives)}"
        config = SidecarConfig(
            job=JOB,
            job_uid=JOB_UID,
            worker=worker,
            procs_per_worker=1,
            pod_uid=pod.uid,
            pod_ip=world.pods[pod.uid].ip or "",
            memory_dir=pod.folder,
            memory_limit=world.plan.memory,
            run_dir=Path("/run"),
            credentials_dir=Path("/credentials"),
            remote="{}" if world.job.spec.remote is not None else None,
            token="",
        )
        self.state = SidecarState(config, clock=lambda: world.now + world.skew.get(pod.node, 0.0))
        self.state.wait = self._wait  # type: ignore[method-assign]
        self.state.wait_until = self._wait_until  # type: ignore[method-assign]
        self.state.bump = self._bump  # type: ignore[method-assign]
        # Nobody there signs, or claims what is not so.
        self.state._is_signed = lambda told: True  # type: ignore[method-assign]
        self.state.peers._changed = self.state.releases._changed = self._bump
        self.vault = RecordedVault(pod.folder, config.memory_limit, config.ranks, self._bump, instance=name)
        self.vault.process = self
        self.state.when_identified(lambda changed: self.vault.identify(changed.ranks))
        self.coordinator = Coordinator(self.state, clock=lambda: world.now)
        self.folder = Folder(world.bucket, self.wait, lambda: world.no_store(pod.uid))
        stores = JobStore(config, lambda: remote_store.RemoteStore(self.folder, JOB))
        inventory = RemoteListing(self.state, self.coordinator.stored)
        self.uploader = Uploader(self.state, self.vault, stores, inventory, self.coordinator.manifest)
        self.remote = RemoteSource(self.state, stores)
        self.reach = Reach(self)
        self.reclaimer = Reclaimer(self.state, self.vault)
        self.restorer = Restorer(self.state, self.vault, self.reach)  # type: ignore[arg-type]
        self.replicator = Replicator(self.state, self.vault, None, 0)  # type: ignore[arg-type]
        self.tiers = TierClient(self.state, self.vault, self.replicator.acknowledged, self.uploader.uploaded)
        self.reporter = Reporter(self.state, self.vault)
        self.state.instance = name
        self.reporter.holders_lack = self.replicator.holders_lack
        self.inbox = Inbox(self.vault, clock=lambda: world.now)
        self._lanes: list[_Lane] = []
        self._told_at = self._looked_at = -1.0
        self._reported = -1
        self._loops: tuple[Callable[[], object], ...] = (
            lambda: self._turn("restore", self.restorer.run),
            lambda: self._turn("reclaim", self.reclaimer.run),
            lambda: self._turn("prepare", self.reclaimer.prepare),
            self._replicate,
            self._coordinate,
            self._tell,
            pod.launcher.follow,
        )
        self._offload_after = 0.0
        self._pending = False
        self._turns = 0
        self._busy: set[str] = set()
        self.vault.open()
        self.watched: dict[Any, Any] = {}
        self.seen_verdict: TierVerdict | None = None
        self._bump()

    # Waiting

    def _bump(self) -> None:
        self.state._generation += 1
        if not self._pending and not self.dead:
            self._pending = True
            self.world.later(self.world.rng.uniform(*self.world.look_within), self.look)

    def _wait(self, seen: int, timeout: float) -> int:
        if not self._turns:
            raise OneTurn
        self._turns -= 1
        return self.state._generation

    def _wait_until(self, predicate: Callable[[], bool], timeout: float) -> bool:
        if predicate():
            return True
        raise OneTurn(timeout)

    def wait(self, seconds: float) -> None:
        """Let others go on. Raises Killed."""
        self.world.advance(self.world.now + seconds)
        if self.dead:
            raise Killed

    def die(self) -> None:
        self.dead = True
        self.state.stopping = True

    def _turn(self, name: str, loop: Callable[[], None], waits: int = 1) -> float:
        """One turn of a loop. Returns the seconds that it wants to wait."""
        if name in self._busy or self.dead:
            return 0.0
        before, self._turns = self._turns, waits
        self._busy.add(name)
        try:
            loop()
        except OneTurn as over:
            return float(over.args[0]) if over.args else 0.0
        except Killed:
            return 0.0
        finally:
            self._turns = before
            self._busy.discard(name)
        return 0.0

    # Looking

    def look(self) -> None:
        """Something has changed: each loop gets a turn, or comes too late for it and gets the next one."""
        self._pending = False
        if self.dead or self.world.frozen(self.pod.uid):
            return
        world = self.world
        self._looked_at = world.now
        turns = list(self._loops)
        world.rng.shuffle(turns)
        for turn in turns:
            if self.dead:
                return
            if world.rng.random() < world.plan.lazy:
                self._bump()
            else:
                turn()

    def every_second(self) -> None:
        """What loops do although nothing has changed."""
        if self.dead or self.world.frozen(self.pod.uid):
            return
        self._heartbeats()
        self.inbox.sweep()
        if self.state.config.remote is not None and self.world.now >= self._offload_after:
            pause = self._turn("offload", self.uploader.run, 0)
            self._offload_after = self.world.now + pause
        if not self.world.plan.brisk or self.world.now - self._looked_at >= _IDLE:
            self._bump()

    def _tell(self) -> None:
        directive = self.state.directive
        if directive is None or "tell" in self._busy:
            return
        report = self.tiers.gather(directive)
        due = self.world.now - self._told_at >= 1.0
        if report != self.tiers._accepted or due or self.state.verdict is None:
            taken = self.tiers._report(directive, report)
            self.tiers._accepted = report if taken else None
            self._told_at = self.world.now if taken else self._told_at
        self.note_verdict()

    def note_verdict(self) -> None:
        verdict = self.state.verdict
        if verdict is not None and verdict != self.seen_verdict:
            self.seen_verdict = verdict

    def _coordinate(self) -> None:
        verdict = self.coordinator.next_verdict() if self.state.config.worker == 0 else None
        if verdict is None:
            return
        self.world.record_verdict(self, verdict)
        callers = list(self.coordinator._callers)
        self.coordinator.deliver([(each, self.coordinator.replies(each, None)) for each in callers])
        self.coordinator.record_sent(verdict)

    def handle_update(self, caller: Caller, text: bytes, pod: str) -> list[TierAnswer]:
        """Takes what came on a connection from that pod."""
        known = dict(self.coordinator._reports)
        answers = self.coordinator.replies(caller, self.coordinator.handle_update(caller, text))
        for worker, word in self.coordinator._reports.items():
            if known.get(worker) is not word:
                self.world.record("counted", pod=pod, attempt=word.head.attempt, held=counted_snapshots(word))
        for each in answers:
            if each.verdict is not None:
                self.world.record_verdict(self, each.verdict)
        return [decode(encode(each), TierAnswer) for each in answers]

    # Neighbours

    def dial(self, peer: Peer) -> Process:
        """The process at that address. Raises WireBroken."""
        return self.world.connect(self.pod.uid, peer.host, peer.worker)

    def session(self, worker: int, attempt: int) -> Session:
        """With a caller that has proved who it is."""
        claim = CallerClaim(JOB_UID, worker, attempt, "")
        return Session(self.state, self.vault, self.inbox, None, claim)  # type: ignore[arg-type]

    def _heartbeats(self) -> None:
        directive = self.state.directive
        if directive is None:
            return
        peers = neighbours(directive)
        other = {directive.coordinator} if directive.coordinator.worker != directive.worker else set()
        if (directive.attempt, peers) != self.watched:
            self.watched = (directive.attempt, peers)  # type: ignore[assignment]
            self.state.peers.only(peers | other)
        for peer in sorted(peers, key=lambda each: each.worker):
            try:
                said = self.dial(peer).state.newest_attempt
            except PeerSilent:
                self.state.peers.broken(peer, ConnectionFailure.SILENT)
            except WireBroken:
                self.state.peers.broken(peer, ConnectionFailure.REFUSED)
            else:
                self.state.peers.answered(peer)
                self.state.learn(said)

    def _replicate(self) -> None:
        before, era = self.replicator._era, self.replicator.follow()
        if era is not None and era is not before:
            self._lanes = [_Lane(self, holder, kind, era) for holder in era.holders for kind in Kind]
        for each in list(self._lanes):
            each.turn()

    # The controller

    def accept(self, directive: Directive) -> bool:
        """`PUT /v1/directive`."""
        self.state.note_controller()
        try:
            self.state.accept(directive)
        except DirectiveRefused:
            return False
        return True

    def report(self) -> Report:
        self._reported = self.state._generation
        return self.reporter.report()

    @property
    def told_all(self) -> bool:
        """Whether nothing has changed since the last report: a long poll would wait."""
        return self._reported == self.state._generation

    def order(self) -> Any:
        """What the launcher is told."""
        return TrainerSocket._order(SimpleNamespace(_state=self.state, _vault=self.vault))  # type: ignore[arg-type]


class _Lane:
    """One kind of artifacts to one holder: the turn of `Replicator._serve`."""

    def __init__(self, process: Process, holder: Peer, kind: Kind, era: Any) -> None:
        self._process, self._holder, self._kind, self._era = process, holder, kind, era
        self._lane = lane.Lane(process.replicator, holder, kind, era)
        self._name = f"lane {holder.worker} {kind.value}"
        self._reviewed_at = process.world.now

    def _list(self, rank: int) -> tuple[ListedArtifact, ...]:
        mine = self._process.state
        return (
            self._process.dial(self._holder)
            .session(mine.config.worker, mine.attempt)
            ._list(PeerRequest("list", rank))
            .listed
        )

    def turn(self) -> None:
        process = self._process
        replicator, world = process.replicator, process.world
        if self._name in process._busy or replicator._era != self._era:
            return
        if self._kind is Kind.SNAPSHOT and world.now - self._reviewed_at >= replicate._REVIEW_EVERY:
            self._reviewed_at = world.now
            replicator._review(self._holder, self._list, lambda: None, self._era)
        process._busy.add(self._name)
        try:
            sent = self._lane.turn((process, self._holder)) == 0.0  # type: ignore[arg-type]
        except Killed:
            return
        finally:
            process._busy.discard(self._name)
        if sent:
            process._bump()


def push(vault: Vault, seal: Seal, line: tuple[Process, Peer], pace: object = None) -> PeerResponse | None:
    """As `lane.push`, with the bytes in one piece."""
    sender, peer = line
    world, attempt = sender.world, sender.state.attempt
    holder = sender.dial(peer)
    session = holder.session(sender.state.config.worker, attempt)
    ask = PeerRequest("offer", seal.rank, seal.version, seal.world_size, seal.digests, kind=seal.kind)
    said = session._offer(ask)
    if said.state == "have":
        return said
    if said.state == "busy":
        return None
    if said.state != "send":
        raise PushRefused(said.message)
    with (
        vault.pin(seal.artifact, Tier.LOCAL) as slot,
        slot.mapped(size=seal.digests.size) as view,
    ):
        body = bytearray(view)
    if digest(memoryview(body), seal.digests.chunk) != seal.digests:
        raise TooDamaged("chunk 0 arrived damaged 3 times")  # our own memory has rotted
    world.stroll(sender)
    if holder.dead or sender.dial(peer) is not holder:
        raise WireBroken("the connection was closed")
    transfer = holder.inbox.find(said.transfer, sender.state.config.worker)
    if transfer is None:
        raise WireBroken("no such transfer")
    if world.rng.random() < world.plan.noise:
        body[world.rng.randrange(len(body))] ^= 1
    if digest(memoryview(body), seal.digests.chunk) == seal.digests:
        transfer.draft.view[: len(body)] = body
        transfer.verified.add(0)
    last = session._commit(PeerRequest("commit", transfer=said.transfer))
    if last.state == "again":
        raise WireBroken("a chunk came damaged")
    if last.state != "ok":
        raise PushRefused(last.message)
    if world.rng.random() < world.plan.loss:
        raise WireBroken("the answer was lost")
    return last


class Reach:
    """Where a restore fetches from: as `RestoreSources`, with calls for connections."""

    def __init__(self, process: Process) -> None:
        self._process, self.remote = process, process.remote

    def ask(self, rank: int, version: Any, sources: Sequence[Source]) -> tuple[list[SourceOffer], list[str]]:
        places, failures = [], []
        for source in sources:
            try:
                places.append(SourceOffer(source, self._list(rank, version, source)))
            except SourceFailed as error:
                failures.append(str(error))
        return places, failures

    def _list(self, rank: int, version: Any, source: Source) -> dict[Artifact, int]:
        if source.tier is Tier.REMOTE:
            return self.remote.list(rank, version, BoundedCall())
        try:
            assert source.peer is not None
            holder = self._process.dial(source.peer)
        except WireBroken as error:
            raise SourceFailed(str(error)) from error
        listed = (
            holder.session(self._process.state.config.worker, self._process.state.attempt)
            ._list(PeerRequest("list", rank))
            .listed
        )
        return {each.artifact: each.bytes for each in listed}

    def bring(self, artifact: Artifact, sources: Sequence[Source]) -> FilledSlot:
        self._process.world.stroll(self._process)
        if sources[0].tier is Tier.REMOTE:
            with self.remote.open(artifact, BoundedCall()) as found:  # as `fill`, without a file
                draft = self._process.vault.draft(found.seal)
                try:
                    found.read(range(len(found.seal.digests.values)), ArtifactSink(draft.view, -1))
                    draft.keep()
                finally:
                    draft.release()
            return FilledSlot(found.seal)
        reasons: list[str] = []
        bad: list[Quarantined] = []
        for source in sources:
            assert source.peer is not None
            try:
                seal = self._copy(artifact, source.peer, bad)
                if seal is not None:
                    return FilledSlot(seal, tuple(bad), (source.peer.worker,))
            except (WireBroken, NotHeld) as error:
                reasons.append(str(error))
        raise FetchFailed([*reasons, *(each.reason for each in bad)], tuple(bad))

    def _copy(self, artifact: Artifact, peer: Peer, bad: list[Quarantined]) -> Seal | None:
        holder, process = self._process.dial(peer), self._process
        with holder.vault.pin(artifact) as slot:
            assert slot.seal is not None
            with slot.mapped(size=slot.seal.digests.size) as view:
                body = bytes(view)
            digests, world_size = slot.seal.digests, slot.seal.world_size
        if digest(memoryview(body), digests.chunk) != digests:
            holder.session(process.state.config.worker, process.state.attempt)._corrupt(
                PeerRequest.about("corrupt", artifact)
            )
            why = f"chunk 0 of worker {peer.worker}'s {artifact} does not match its digest"
            bad.append(Quarantined(artifact.rank, artifact.version, peer.worker, why, artifact.kind))
            return None
        seal = Seal(artifact.rank, artifact.version, world_size, Tier.LOCAL, digests, artifact.kind)
        draft = process.vault.draft(seal)
        draft.view[: len(body)] = body
        draft.keep()
        return seal

    def lender(self) -> Any:
        return SimpleNamespace(close=lambda: None)


class _Line:
    """As `CoordinatorClient`: to the coordinator. `world` is set while a simulation runs."""

    world: Simulation

    def __init__(self, config: SidecarConfig, host: str, heard: Callable[[TierAnswer], None]) -> None:
        self._config, self.host, self._heard = config, host, heard
        self._end: tuple[Process, Caller] | None = None
        self._coming: list[TierAnswer] = []
        """Verdicts under way, in the order in which a connection keeps them."""

    @property
    def is_open(self) -> bool:
        return self._end is not None

    def close(self) -> None:
        if self._end is not None:
            process, caller = self._end
            process.coordinator.disconnect(caller)
        self._end = None
        self._coming.clear()

    def send(self, text: bytes, number: int) -> TierAnswer:
        world = _Line.world
        try:
            other = world.connect(self._config.pod_uid, self.host, 0)
        except WireBroken as error:
            self.close()
            silent = isinstance(error, PeerSilent)
            raise CallFailed(
                str(error), ConnectionFailure.SILENT if silent else ConnectionFailure.REFUSED
            ) from error
        if self._end is None or self._end[0] is not other:
            self.close()
            self._end = other, Caller(self._push(other))
            other.coordinator.connect(self._end[1])
        *news, answer = other.handle_update(self._end[1], text, self._config.pod_uid)
        if world.rng.random() < world.plan.loss:
            self.close()
            raise CallFailed("no answer", ConnectionFailure.SILENT)
        self._hear_up_to(None)
        for each in news:
            self._heard(each)
        return answer

    def _hear_up_to(self, last: TierAnswer | None) -> None:
        """What was sent before an answer, or before this verdict, comes before it."""
        while self._coming:
            self._heard(decode(encode(each := self._coming.pop(0)), TierAnswer))
            if each is last:
                return

    def _push(self, other: Process) -> Callable[[TierAnswer], None]:
        """Verdicts come some time, and never before a connection is known to be dead."""

        def push(answer: TierAnswer) -> None:
            self._coming.append(answer)

            def arrive(process: Process) -> None:
                if process.dead:
                    return
                if any(each is answer for each in self._coming):
                    self._hear_up_to(answer)
                process.note_verdict()

            _Line.world.post(other.pod.uid, self._config.pod_ip, arrive)

        return push


def counted_snapshots(word: WorkerState) -> tuple[tuple[Tier, int, Kind, Version], ...]:
    """Returns the snapshots that the coordinator takes to be in a worker's memory and to stay there."""
    own = [
        (Tier.LOCAL, rank, version)
        for rank, shape in word.shapes.items()
        for version in set(shape.held.value.snapshots) - set(shape.held.value.leaving)
    ]
    kept = [
        (Tier.PEER, rank, version)
        for of, held in word.copies
        for ranks in of
        for rank in ranks
        for version in held.value.snapshots
    ]
    return tuple((tier, rank, Kind.SNAPSHOT, version) for tier, rank, version in sorted(own) + kept)


class _Time:
    """For modules that ask `time`."""

    world: Simulation

    def monotonic(self) -> float:
        return _Time.world.now

    time = monotonic


@contextlib.contextmanager
def in_simulation(world: Simulation) -> Iterator[None]:
    """Sidecars' modules use simulated time, one thread and simulated wires."""
    _Line.world = _Time.world = world
    clock, numbers = _Time(), itertools.count()
    named = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032x}"))
    with (
        world.volumes.mounted(),
        in_place(
            (tiers, "time", clock),
            (tiers, "CoordinatorClient", _Line),
            (offload, "time", clock),
            (lane, "time", clock),
            (replicate, "time", clock),
            (replicate, "push", push),
            (restore, "time", clock),
            (restore, "ThreadPoolExecutor", Inline),
            (remote_store, "ThreadPoolExecutor", Inline),
            (preflight, "CHUNK", 64),
            (preflight, "SIZE", 17 * 64),
            (preflight, "uuid", named),
            (coordinator, "time", clock),
            (exchange_session, "time", clock),
            (exchange_session, "uuid", named),
            (app, "time", clock),
            *REPLACED,
        ),
    ):
        yield
